"""A thread that owns a sampler and decodes the requests of many clients side by side.

Whoever wants something sampled submits a request from any thread and gets a handle: pieces as they are drawn, or the
whole sample in the end. `Engine.as_sampler` is the engine in the shape of a `Sampler`, so that `rollout` runs on it
unchanged, its segments in one batch with everybody else's. Knows token ids only, no text and no HTTP.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np

from envace_jax.sampling import Sample, Sampler, SampleRequest, SamplerStats
from envace_jax.types import FinishReason, Params


class EngineStopped(RuntimeError):
    """The engine ended, or failed, before the request was done."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a request drew since its last piece."""

    tokens: np.ndarray  # i32[C]
    logprobs: np.ndarray  # f32[C]
    cached_tokens: int  # of the prompt, found in a kept cache
    finish_reason: FinishReason | None = None  # of the last piece


class Handle:
    """A request under way. `sample` is a future of the whole; pieces are for one reader.

    The future raises EngineStopped where the engine ended first, and CancelledError after `Engine.cancel`.
    """

    def __init__(self, request: SampleRequest, number: int):
        self.request, self.number = request, number  # the engine's number; request ids are their senders'
        self.sample: Future[Sample] = Future()
        self.submitted = time.monotonic()
        self.started: float | None = None  # when it got a slot
        self.cancelled = False
        self._pieces: collections.deque[Piece] = collections.deque()
        self._sent = 0
        self._wake: Callable[[], None] = lambda: None

    def listen(self, wake: Callable[[], None]) -> None:
        """Has `wake` called, in the engine's thread, whenever there is something to `take` or the request is over."""
        self._wake = wake
        if self._pieces or self.sample.done():
            wake()

    def take(self) -> list[Piece]:
        """The pieces that came since the last call. Raises EngineStopped or CancelledError instead of the last one."""
        over = self.sample.done()  # asked first: no piece comes after it
        taken = [self._pieces.popleft() for _ in range(len(self._pieces))]
        if over and not taken and self.sample.exception() is not None:
            raise self.sample.exception()  # type: ignore[misc]
        return taken

    def result(self, timeout: float | None = None) -> Sample:
        """The whole sample, waited for in a thread."""
        return self.sample.result(timeout)

    # --- for the engine's thread ---

    def drawn(self, tokens: np.ndarray, logprobs: np.ndarray, cached_tokens: int) -> None:
        self._sent += len(tokens)
        self._pieces.append(Piece(tokens, logprobs, cached_tokens))
        self._wake()

    def finished(self, sample: Sample) -> None:
        rest = slice(self._sent, None)
        self._pieces.append(
            Piece(sample.tokens[rest], sample.logprobs[rest], sample.cached_tokens, sample.finish_reason)
        )
        self.sample.set_result(dataclasses.replace(sample, request_id=self.request.request_id))
        self._wake()

    def failed(self, error: BaseException) -> None:
        self.sample.set_exception(error)
        self._wake()


async def merged(handles: Sequence[Handle]) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of several requests with their places, as they come, until all are over or given up."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever read
            loop.call_soon_threadsafe(event.set)

    for handle in handles:
        handle.listen(wake)
    open_ = set(range(len(handles)))
    while open_:
        await event.wait()
        event.clear()
        for place in sorted(open_):
            # Again, since a fault that follows pieces wakes nobody twice; the reader may give it up between two.
            while not handles[place].cancelled and (taken := handles[place].take()):
                for piece in taken:
                    if piece.finish_reason is not None:
                        open_.discard(place)
                    yield place, piece
            if handles[place].cancelled:
                open_.discard(place)


class Engine:
    """Decodes what is submitted, first come first served, `sampler.slots` requests at a time.

    Args:
      sampler: empty; the engine's alone from now on.
      params: what it decodes from (`Policy.for_decoding`).

    A fault of the device fails the requests in slots and leaves the engine running, with an empty sampler.
    """

    def __init__(self, sampler: Sampler, params: Params):
        self.slots, self.max_length, self.stop_ids = sampler.slots, sampler.max_length, sampler.stop_ids
        self.faults = 0
        self._sampler, self._params = sampler, params
        self._changed = threading.Condition()
        self._waiting: collections.deque[Handle] = collections.deque()
        self._running: dict[int, Handle] = {}
        self._numbers = 0
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread; to be called once."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the call of `step` under way; what is not done by then raises EngineStopped."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not self._stopping

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests in slots."""
        return len(self._running)

    @property
    def stats(self) -> SamplerStats:
        return self._sampler.stats

    def submit(self, request: SampleRequest) -> Handle:
        """Puts a request at the end of the line. Raises ValueError as `Sampler.submit`, EngineStopped after `stop`."""
        self._sampler.check(request)
        with self._changed:
            if self._stopping:
                raise EngineStopped("the engine has stopped")
            self._numbers += 1
            handle = Handle(request, self._numbers)
            self._waiting.append(handle)
            self._changed.notify()
        return handle

    def cancel(self, handle: Handle) -> None:
        """Gives a request up; its slot is free after the call of `step` under way, which may still draw some tokens for
        it, `decode_chunk` at most. Nothing where it is over already."""
        with self._changed:
            handle.cancelled = True
            self._changed.notify()

    def as_sampler(self, given_up: threading.Event | None = None) -> Any:
        """The engine in place of a Sampler, for one thread (`SharedSampler`); setting `given_up` ends it."""
        return SharedSampler(self, given_up or threading.Event())

    # --- the thread ---

    def _run(self) -> None:
        try:
            self._loop()
        finally:  # nobody waits for ever, whatever ended it
            with self._changed:
                self._stopping = True
                left, self._waiting = [*self._waiting], collections.deque()
            self._fail_running("the engine has stopped")
            for handle in left:
                handle.failed(EngineStopped("the engine has stopped"))

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._waiting or self._running)
                if self._stopping:
                    return
                dropped = [handle for handle in (*self._waiting, *self._running.values()) if handle.cancelled]
                self._waiting = collections.deque(handle for handle in self._waiting if not handle.cancelled)
                free = self._sampler.free() + sum(handle.number in self._running for handle in dropped)
                chosen = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
            left = [handle.number for handle in dropped if self._running.pop(handle.number, None)]
            self._running |= {handle.number: handle for handle in chosen}  # whatever fails from here on, they are told
            for handle in dropped:
                handle.failed(CancelledError())
            try:
                self._step(left, chosen)
            except Exception as error:  # the device's: memory, a lost connection
                self.faults += 1
                self._fail_running(f"{type(error).__name__}: {error}")
                self._sampler.reset()

    def _step(self, left: Sequence[int], chosen: Sequence[Handle]) -> None:
        for number in left:
            self._sampler.cancel(number)
        now = time.monotonic()
        for handle in chosen:
            handle.started = now
        if chosen:
            self._sampler.submit([dataclasses.replace(handle.request, request_id=handle.number) for handle in chosen])
        samples = self._sampler.step(self._params)
        for number, drawn in self._sampler.drawn().items():
            self._running[number].drawn(*drawn)
        for sample in samples:
            self._running.pop(sample.request_id).finished(sample)

    def _fail_running(self, reason: str) -> None:
        running, self._running = self._running, {}
        for handle in running.values():
            handle.failed(EngineStopped(" ".join(reason.split())[:300]))


class SharedSampler:
    """The part of a Sampler's interface that `rollout` uses, on an engine that others use too; for one thread.

    `step` waits until a request of its own is done. Caches are not reset: the parameters are always the same.
    """

    def __init__(self, engine: Engine, given_up: threading.Event):
        self.slots, self.max_length, self.stop_ids = engine.slots, engine.max_length, engine.stop_ids
        self.stats = SamplerStats()  # prompt tokens reused and prefilled, and tokens decoded, of its own requests
        self._engine, self._given_up = engine, given_up
        self._open: dict[int, Handle] = {}  # by the engine's number
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()

    def free(self) -> int:
        return self.slots - len(self._open)

    def reset(self) -> None:
        pass

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        for request in requests:
            handle = self._engine.submit(request)
            self._open[handle.number] = handle
            handle.sample.add_done_callback(functools.partial(self._over, handle.number))

    def step(self, params: Params = None) -> list[Sample]:
        """What finished, at least one sample. Raises CancelledError once it is given up, EngineStopped as a handle."""
        del params  # the engine's are those
        if not self._open:
            return []
        numbers: list[int] = []
        while not numbers:
            if self._given_up.is_set():
                self.close()
                raise CancelledError
            with contextlib.suppress(queue.Empty):
                numbers.append(self._done.get(timeout=0.1))
        with contextlib.suppress(queue.Empty):
            while True:
                numbers.append(self._done.get_nowait())
        samples = [self._open.pop(number).result() for number in numbers]
        for sample in samples:
            self.stats.reused_tokens += sample.cached_tokens
            self.stats.decoded_tokens += len(sample.tokens)
        return samples

    def _over(self, number: int, _: Future[Sample]) -> None:
        self._done.put(number)

    def close(self) -> None:
        """Gives up whatever is under way."""
        for handle in self._open.values():
            self._engine.cancel(handle)
        self._open = {}
