"""The sampler: requests go into slots, their key-value caches stay behind, finished samples come out.

A new prompt continues the kept stream that is its longest prefix, or takes over the longest prefix that any stream
shares with it, and pays only for the rest (delta prefill); streams that no longer fit are dropped, least recently used
first. Knows token ids only, no text, roles or episodes. Where caches lie is `pooled_cache.py`'s business, or with pages
`paged_cache.py`'s; everything decided derives from values that all processes hold, so several hosts may run it in step.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from envace_jax import drawing, paged_cache, pooled_cache
from envace_jax.buckets import Buckets
from envace_jax.compilation import Lowering, compile_together
from envace_jax.sample_requests import Running, Sample, SampleRequest, SamplerStats, Settings, segment_key
from envace_jax.sharding import BATCH_AXES, axis_size, chosen_chip
from envace_jax.types import FinishReason, Params, Policy

__all__ = ["Sample", "SampleRequest", "Sampler", "SamplerStats", "sample_all", "segment_key"]


class Sampler:
    """Continuous batching over a fixed number of slots.

    Args:
      policy: the model, as pure functions.
      slots: sequences decoded side by side; a multiple of the mesh's data x fsdp.
      cache_rows: streams whose caches are kept, those in slots included; at least `slots`, a multiple of the mesh's
        data x fsdp. None: twice the slots, since a trajectory has two streams. With pages they cost no memory of their
        own.
      max_length: positions per stream, prompt and sample together.
      buckets: padded shapes, see `buckets.py`; the largest cache length must be at least `max_length`.
      vocab_limit: the tokenizer's length; ids at or above it are never drawn.
      stop_ids: ids that end a segment unless its request says otherwise (at most 4).
      mesh: slots and rows are split over ("data", "fsdp"), kv heads over "tensor" where divisible.
      cache_dtype: of keys and values.
      decode_chunk: the most tokens a call of `step` draws per slot.
      pages: pages of the key-value cache, a multiple of the mesh's data x fsdp; each part must hold a stream of
        max_length and one page more. 0: whole rows and a working set. With pages the cache has no other length than
        max_length, and `buckets.cache_lengths` are not used.
      page_size: positions of a page.
      refill_share: a call of `step` ends early when this share of the slots that were drawing has finished.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        slots: int,
        max_length: int,
        buckets: Buckets,
        vocab_limit: int,
        stop_ids: Sequence[int],
        cache_rows: int | None = None,
        mesh: Mesh | None = None,
        cache_dtype: Any = jnp.float32,
        decode_chunk: int = 16,
        refill_share: float = 0.125,
        pages: int = 0,
        page_size: int = 64,
    ):
        shards = axis_size(mesh, BATCH_AXES) if mesh is not None else 1
        rows = 2 * slots if cache_rows is None else cache_rows
        if slots < 1 or slots % shards:
            raise ValueError(f"slots must be a positive multiple of {shards} (mesh data x fsdp), got {slots}")
        if rows < slots or rows % shards:
            raise ValueError(f"cache_rows must be at least {slots} and a multiple of {shards}, got {rows}")
        if pages:
            _check_pages(pages, page_size, max_length, shards)
            buckets = Buckets(buckets.prefill_lengths, buckets.prefill_rows, (max_length,))
        if buckets.cache_lengths[-1] < max_length:
            raise ValueError(f"cache_lengths end at {buckets.cache_lengths[-1]}, below max_length {max_length}")
        if not 0 < vocab_limit <= policy.vocab_size:
            raise ValueError(f"vocab_limit must lie in 1..{policy.vocab_size} (embedding rows), got {vocab_limit}")
        if decode_chunk < 1:
            raise ValueError(f"decode_chunk must be at least 1, got {decode_chunk}")
        if not 0.0 < refill_share <= 1.0:
            raise ValueError(f"refill_share must be above 0 and at most 1, got {refill_share}")
        self.slots, self.max_length, self.buckets = slots, max_length, buckets
        self.decode_chunk, self.refill_share = decode_chunk, refill_share
        self.stop_ids = _checked_stop_ids(stop_ids)
        self.stats = SamplerStats()
        settings = Settings(
            slots, max_length, buckets, vocab_limit, rows, pages, page_size, mesh, shards, cache_dtype, decode_chunk
        )
        self._running: dict[int, Running] = {}  # by slot
        self._drawn: dict[int, tuple[np.ndarray, np.ndarray, int]] = {}  # by request
        self._cache: Any = (
            paged_cache.PagedCache(paged_cache.make_programs(policy, settings), settings)
            if pages
            else pooled_cache.PooledCache(pooled_cache.make_programs(policy, settings), settings)
        )

    @property
    def programs(self) -> Any:
        """The compiled functions, shared with a `twin`."""
        return self._cache.programs

    @property
    def compile_count(self) -> int:
        """Programs compiled so far, bounded by `buckets.compile_bound()`."""
        return self.programs.compile_count()

    def twin(self) -> Sampler:
        """Another, empty sampler with the same settings that shares the compiled programs."""
        other = copy.copy(self)
        other.stats = SamplerStats()
        other._running, other._drawn = {}, {}
        other._cache = type(self._cache)(self.programs, self._cache.settings)
        return other

    def reset(self) -> None:
        """Forgets all kept caches and drops whatever is running. To be called after a weight update."""
        self._running, self._drawn = {}, {}
        self._cache.reset()

    def warm_up(self, params: Params, progress: Callable[[str], None] = lambda _: None) -> None:
        """Compiles all programs that the buckets allow, and runs each on padding; leaves the sampler as `reset` does.

        Afterwards no request compiles anything, as long as `step` gets parameters of these shapes, dtypes and
        placement. `progress` is told what is compiled next, `buckets.compile_bound()` times.
        """
        compile_together(self.to_lower(params), progress)
        self.run_all(params)

    def run_all(self, params: Params) -> None:
        """Runs all programs that the buckets allow on padding, and compiles those that are not; `warm_up`'s end."""
        self._running = {}
        self._cache.run_all(params)

    def to_lower(self, params: Params) -> list[Lowering]:
        """What `warm_up` compiles, by name, as functions that lower it for `params`, those for decoding."""

        def lower(kind: str, shape: tuple[int, ...]) -> list[jax.stages.Lowered]:
            return [self._cache.lower(params, kind, shape)]

        return [(name, functools.partial(lower, kind, shape)) for name, kind, shape in self._cache.shapes()]

    def lowered(self, params: Params, wanted: Callable[[str], bool] = lambda _: True) -> dict[str, jax.stages.Lowered]:
        """What `warm_up` compiles, by the names it tells, lowered and not run: the very programs of a run.

        `params` are those for decoding, arrays or `jax.ShapeDtypeStruct` with shardings. The mesh may be of devices
        that are not there. `wanted` chooses by name.
        """
        with chosen_chip(self._cache.settings.mesh):
            return {name: lower()[0] for name, lower in self.to_lower(params) if wanted(name)}

    def free(self) -> int:
        """Slots that a request may take."""
        return self.slots - len(self._running)

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Puts requests (at most `free()`) into slots; their prompts are prefilled by the next `step`.

        Raises ValueError, before any is taken, for too many requests, or a prompt that is empty or leaves no room to
        draw.
        """
        if len(requests) > self.free():
            raise ValueError(f"{len(requests)} requests submitted, but {self.free()} of {self.slots} slots are free")
        if requests:
            self._cache.place([self._checked(request) for request in requests], self._running, self.stats)

    def check(self, request: SampleRequest) -> None:
        """Raises ValueError for a request that `submit` would not take."""
        self._checked(request)

    def cancel(self, request_id: int) -> bool:
        """Takes a request out of its slot, which is free at once; False if it is in none.

        What its cache holds so far stays there for others to continue. No other request draws anything else for it.
        """
        for slot, item in self._running.items():
            if item.request.request_id == request_id:
                del self._running[slot]
                self._drawn.pop(request_id, None)
                self._cache.cancel(slot, item, self._running, self.stats)
                return True
        return False

    def drawn(self) -> dict[int, tuple[np.ndarray, np.ndarray, int]]:
        """What each request that is still in a slot drew in the last call of `step`, by id: tokens i32[C] and
        logprobs f32[C], and how many tokens of its prompt a kept cache had. Together, in order, they are the beginning
        of its sample."""
        return self._drawn

    def step(self, params: Params) -> list[Sample]:
        """Prefills what was submitted, then draws up to `decode_chunk` tokens per slot; returns what finished."""
        self._drawn = {}
        if not self._running:
            return []
        active = len(self._cache.prefill(params, self._running, self.stats))
        enough = active - max(1, int(active * self.refill_share))
        return self._harvest(self._cache.decode(params, self._running, self.decode_chunk, enough))

    def _checked(self, request: SampleRequest) -> Running:
        """The request with its prompt, token budget and stop ids."""
        prompt = np.asarray(request.prompt_tokens, np.int32)
        room = self.max_length - len(prompt)
        if len(prompt) == 0 or room < 1 or request.max_tokens < 1:
            raise ValueError(
                f"request {request.request_id}: a prompt of {len(prompt)} tokens, max_tokens {request.max_tokens}; "
                f"needs 1..{self.max_length - 1} (max_length {self.max_length}), and max_tokens of at least 1"
            )
        if not (request.temperature >= 0 and 0 < request.top_p <= 1):
            raise ValueError(
                f"request {request.request_id}: temperature {request.temperature} and top_p {request.top_p}; "
                "needs temperature >= 0 and 0 < top_p <= 1"
            )
        stop_ids = self.stop_ids if request.stop_ids is None else _checked_stop_ids(request.stop_ids)
        return Running(request, prompt, min(request.max_tokens, room), stop_ids)

    def _harvest(self, report: np.ndarray) -> list[Sample]:
        columns = self.decode_chunk + 1
        filled, active, steps = report[:, 2 * columns], report[:, 2 * columns + 1], int(report[0, 2 * columns + 2])
        logprobs = np.ascontiguousarray(report[:, columns : 2 * columns]).view(np.float32)
        self.stats.decode_steps += steps
        finished = []
        for slot in sorted(self._running):
            item, count = self._running[slot], int(filled[slot])
            if count == 0 and item.count == 0:
                continue  # it waits for pages still, and its slot is as another left it
            self.stats.busy_slot_steps += count - (item.count == 0)  # a segment's first token came from its prefill
            self.stats.decoded_tokens += count
            item.count += count
            item.tokens.append(report[slot, :count].copy())
            item.logprobs.append(logprobs[slot, :count].copy())
            if active[slot]:
                self._drawn[item.request.request_id] = (item.tokens[-1], item.logprobs[-1], item.cached)
            else:
                finished.append(self._finish(slot, item))
        return finished

    def _finish(self, slot: int, item: Running) -> Sample:
        tokens = np.concatenate(item.tokens)
        # The cache holds the prompt and every drawn token but the last, which no step has fed.
        self._cache.finish(slot, item, tokens[:-1])
        del self._running[slot]
        reason: FinishReason = "stop" if int(tokens[-1]) in item.stop_ids else "length"
        return Sample(item.request.request_id, tokens, np.concatenate(item.logprobs), reason, item.cached)


def sample_all(sampler: Sampler, params: Params, requests: Sequence[SampleRequest]) -> list[Sample]:
    """Samples every request, a slot each as slots become free, and gives the samples as they come. Kept caches stay."""
    waiting = list(reversed(requests))
    done: list[Sample] = []
    while len(done) < len(requests):
        batch = [waiting.pop() for _ in range(min(sampler.free(), len(waiting)))]
        if batch:
            sampler.submit(batch)
        done += sampler.step(params)
    return done


def _checked_stop_ids(stop_ids: Sequence[int]) -> tuple[int, ...]:
    if len(stop_ids) > drawing.STOP_COLUMNS:
        raise ValueError(f"at most {drawing.STOP_COLUMNS} stop ids, got {list(stop_ids)}")
    return tuple(int(i) for i in stop_ids)


def _check_pages(pages: int, page_size: int, max_length: int, shards: int) -> None:
    if page_size < 1 or pages < 1 or pages % shards:
        raise ValueError(
            f"pages must be a positive multiple of {shards} (mesh data x fsdp) and page_size at least 1, "
            f"got {pages} of {page_size}"
        )
    needed = -(-max_length // page_size) + 1
    if pages // shards < needed:
        raise ValueError(
            f"{pages} pages of {page_size} leave {pages // shards} to each of {shards} parts, but a stream of "
            f"max_length {max_length} and one page to copy need {needed}"
        )
