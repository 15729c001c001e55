"""Environments in processes of their own, for packages that cannot live in this interpreter or must be kept in bounds.

A `WorkerPool` keeps children that run a script (`worker_child.py` says which functions it has) in an interpreter of its
own, one JSON line per request and answer. An episode is opened in one of them; its calls are executed in order there,
calls of different episodes side by side, and every answer is a future.

A child that takes too long over a request is killed, one that needs too much memory ends; both are a fault of that
request's episode alone. The other episodes of that child are opened anew and their calls made again when they are next
asked for something. Knows no benchmarks, tasks or rewards.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from envace_jax.types import Json

LOOP = Path(__file__).with_name("worker_child.py")
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")  # no keys, no PYTHON...: no business of it
NOISE = 2000  # characters of a child's stderr that are kept for messages
GIB = 1 << 30


class EnvironmentFault(RuntimeError):
    """Something outside went wrong with a request (time, memory, a crash, a bug): it says nothing about the policy."""


class WorkerStartError(ValueError):
    """The children cannot be started: no such interpreter, or the package is missing or of another version."""


class _Died(Exception):
    """A child that is no more. `slow`: it was killed because a request took too long."""

    def __init__(self, reason: str, slow: bool = False):
        super().__init__(reason)
        self.slow = slow


class WorkerPool:
    """`workers` children of `python` running `script`.

    Args:
      memory_bytes: address space that one child may have; 0: no limit.
      timeout_s: seconds that one request may take.
      start_timeout_s: seconds that a child's `setup` may take.
      variables: environment variables for the children, which otherwise see only PASSED_ON.

    The first child is started at once, the others when they are needed. Raises WorkerStartError where it cannot be.
    `info` is what the script's `setup` gave.
    """

    def __init__(
        self,
        script: Path,
        python: str,
        *,
        workers: int = 2,
        memory_bytes: int = 2 * GIB,
        timeout_s: float = 30.0,
        start_timeout_s: float = 120.0,
        variables: Mapping[str, str] | None = None,
    ):
        if workers < 1 or timeout_s <= 0 or memory_bytes < 0:
            raise ValueError(
                f"workers={workers}, timeout_s={timeout_s}, memory_bytes={memory_bytes}: impossible limits"
            )
        settings = _Settings(script, python, memory_bytes, timeout_s, start_timeout_s, dict(variables or {}))
        self._numbers = itertools.count()
        self._workers = [_Worker(settings, number) for number in range(workers)]
        try:
            self.info: Json = self._workers[0].submit(_Job("start")).result()
        except EnvironmentFault as fault:
            self.close()
            raise WorkerStartError(str(fault)) from None

    def open(self, spec: Json) -> WorkerEpisode:
        """A new episode, in the child that has fewest; the script's `open_episode` gets `spec` at the first request."""
        worker = min(self._workers, key=lambda worker: worker.episodes)
        return WorkerEpisode(worker, next(self._numbers), spec)

    def ask(self, request: Json) -> Future[Json]:
        """The script's answer to a request that needs no episode, from the child with the least to do."""
        return min(self._workers, key=lambda worker: worker.waiting).submit(_Job("ask", fields={"request": request}))

    def close(self) -> None:
        """Ends the children. What was still asked for fails."""
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.thread.join()


class WorkerEpisode:
    """An episode in one of a pool's children. After a fault every further request meets the same fault."""

    def __init__(self, worker: _Worker, number: int, spec: Json):
        self.number, self.spec = number, spec
        self.log: list[tuple[Mapping[str, Json], Json]] = []  # calls so far and their results
        self.fault: EnvironmentFault | None = None
        self._worker, self._closed = worker, False
        worker.episodes += 1

    def call(self, name: str, arguments: Mapping[str, Json]) -> Future[Json]:
        """The result of a call; the future raises EnvironmentFault where there is none."""
        return self._submit("call", {"name": name, "arguments": dict(arguments)})

    def state(self) -> Future[Json]:
        """The state after all calls so far."""
        return self._submit("state", {})

    def close(self) -> None:
        """Lets the child forget the episode, after what is still asked for."""
        if not self._closed:
            self._submit("close", {})
            self._closed = True
            self._worker.episodes -= 1

    def _submit(self, do: str, fields: Mapping[str, Json]) -> Future[Json]:
        if self._closed:
            raise ValueError("the episode is closed")
        return self._worker.submit(_Job(do, self, fields))


@dataclasses.dataclass(frozen=True)
class _Settings:
    script: Path
    python: str
    memory_bytes: int
    timeout_s: float
    start_timeout_s: float
    variables: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class _Job:
    do: str
    episode: WorkerEpisode | None = None
    fields: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    answer: Future[Json] = dataclasses.field(default_factory=Future)


class _Worker:
    """A thread that does jobs in order, and its child, started anew whenever there is none."""

    def __init__(self, settings: _Settings, number: int):
        self.episodes = 0  # open ones that belong here
        self._settings = settings
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._child: _Child | None = None
        self._stopping = threading.Event()
        # The kernel ends a child with the thread that started it, so this thread starts them all and stays.
        self.thread = threading.Thread(target=self._loop, name=f"worker-{number}", daemon=True)
        self.thread.start()

    @property
    def waiting(self) -> int:
        return self._jobs.qsize()

    def submit(self, job: _Job) -> Future[Json]:
        if self._stopping.is_set():
            job.answer.set_exception(EnvironmentFault("the worker pool is closed"))
        else:
            self._jobs.put(job)
        return job.answer

    def stop(self) -> None:
        self._stopping.set()
        if (child := self._child) is not None:
            child.kill()  # what is under way fails at once
        self._jobs.put(None)

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.answer.set_running_or_notify_cancel():
                try:
                    job.answer.set_result(self._perform(job))
                except Exception as error:
                    job.answer.set_exception(error)
        if self._child is not None:
            self._child.discard()

    def _perform(self, job: _Job) -> Json:
        """Does a job. A child may end because of what it did before: then the job is tried again in a new one."""
        episode = job.episode
        if job.do == "close":
            return self._forget(episode)
        if episode is not None and episode.fault is not None:
            raise episode.fault
        while True:
            fresh = self._child is None
            try:
                return self._try(job)
            except _Died as death:
                self._child = None
                if fresh or death.slow or self._stopping.is_set():
                    raise self._faulty(episode, f"{self._settings.script.name}: {job.do}: {death}") from None

    def _try(self, job: _Job) -> Json:
        if self._stopping.is_set():
            raise _Died("the worker pool is closed")
        if self._child is None:
            self._child = _Child(self._settings)
        if job.do == "start":
            return self._child.info
        if job.episode is None:
            return self._ask(job.do, job.fields)
        self._restore(job.episode)
        answer = self._ask(job.do, job.fields, job.episode)
        if job.do == "call":
            job.episode.log.append((job.fields, answer))
        return answer

    def _restore(self, episode: WorkerEpisode) -> None:
        """Opens the episode in this child, where it is not, and makes its calls so far again."""
        assert self._child is not None
        if episode.number in self._child.open:
            return
        self._child.open.add(episode.number)
        self._ask("open", {"spec": episode.spec}, episode)
        for fields, result in episode.log:
            if self._ask("call", fields, episode) != result:
                raise self._faulty(episode, f"{fields['name']} gave another result when its episode was made again")

    def _ask(self, do: str, fields: Mapping[str, Json], episode: WorkerEpisode | None = None) -> Json:
        assert self._child is not None
        number = None if episode is None else episode.number
        answer = self._child.exchange({"do": do, "episode": number, **fields}, self._settings.timeout_s)
        if "error" in answer:
            raise self._faulty(episode, f"{self._settings.script.name}: {do}: {answer['error']}")
        return answer["answer"]

    def _forget(self, episode: WorkerEpisode | None) -> None:
        if episode is not None and self._child is not None and episode.number in self._child.open:
            self._child.open.discard(episode.number)
            try:
                self._ask("close", {}, episode)
            except _Died:
                self._child = None

    def _faulty(self, episode: WorkerEpisode | None, message: str) -> EnvironmentFault:
        fault = EnvironmentFault(message)
        if episode is not None:
            episode.fault = fault
        return fault


class _Child:
    """One process; `open` are the numbers of the episodes that it holds. Every method may raise _Died."""

    def __init__(self, settings: _Settings):
        command = [settings.python, "-s", str(LOOP), str(settings.script), str(settings.memory_bytes), str(os.getpid())]
        # One order of sets and dicts in every child, or an episode made again might give other results.
        variables = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | {"PYTHONHASHSEED": "0"}
        self.open: set[int] = set()
        self._noise = b""
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                env=variables | dict(settings.variables), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise _Died(f"{settings.python} cannot be started: {error.strerror}") from None
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            os.set_blocking(stream.fileno(), False)  # type: ignore[union-attr]
        ready = self._receive(b"", settings.start_timeout_s)
        if "error" in ready:
            self.discard()
            raise _Died(ready["error"])
        self.info: Json = ready["answer"]

    def exchange(self, request: Mapping[str, Json], timeout_s: float) -> dict[str, Any]:
        """The answer to a request, `{"answer": ...}` or `{"error": ...}`."""
        return self._receive(json.dumps(request, allow_nan=False).encode() + b"\n", timeout_s)

    def kill(self) -> None:
        """Ends the process and whatever it started, and waits until it is gone."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def discard(self) -> None:
        """As `kill`, and closes our ends of the pipes: only for the thread that reads them."""
        self.kill()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _receive(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        """Writes the request and reads one line, looking after stderr meanwhile."""
        stdin, stdout, stderr = (
            stream.fileno() for stream in (self._process.stdin, self._process.stdout, self._process.stderr) if stream
        )
        deadline, line = time.monotonic() + timeout_s, bytearray()
        poll = select.poll()
        for number in (stdout, stderr):
            poll.register(number, select.POLLIN)
        if request:
            poll.register(stdin, select.POLLOUT)
        while not line.endswith(b"\n"):
            ready = dict(poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))))
            if not ready:
                raise self._end(f"no answer within {timeout_s:g} s", slow=True)
            if stdin in ready:
                try:
                    request = request[os.write(stdin, request) :]
                except OSError:
                    raise self._end(None) from None
                if not request:
                    poll.unregister(stdin)
            if stderr in ready and not self._read_noise(stderr):
                poll.unregister(stderr)
            if stdout in ready:
                part = os.read(stdout, 1 << 16)
                if not part:
                    raise self._end(None)
                line += part
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise self._end(f"an answer that is no JSON: {error}") from None
        if "memory" in answer:
            raise self._end("out of memory")
        return answer

    def _read_noise(self, stderr: int) -> bool:
        """Keeps the end of what there is to read; False at its end."""
        part = os.read(stderr, 1 << 16)
        self._noise = (self._noise + part)[-NOISE:]
        return bool(part)

    def _end(self, reason: str | None, slow: bool = False) -> _Died:
        """Kills the process and says why; without a reason, how it ended by itself."""
        if reason is None:
            try:
                self._process.wait(1.0)  # its own end, not ours
            except subprocess.TimeoutExpired:
                pass
            code = self._process.poll()
            reason = "it closed its output" if code is None else f"the process ended (exit status {code})"
        self.kill()
        try:
            while self._process.stderr and self._read_noise(self._process.stderr.fileno()):
                pass
        except BlockingIOError:
            pass  # something that it started still holds the other end
        self.discard()
        said = " ".join(self._noise.decode("utf-8", "replace").split())
        return _Died(f"{reason}; stderr ends: {said[-NOISE // 4 :]}" if said else reason, slow)
