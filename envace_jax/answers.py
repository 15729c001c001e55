"""Answers kept by what was asked, so that nothing is asked twice: in memory, and in a file of JSON lines.

With several processes each adds to a file of its own beside the first one's, and reads all that are there at its
start. Who asked, what an answer means and when it is usable are the caller's business.
"""

from __future__ import annotations

import collections
import hashlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TextIO

from envace_jax import hosts
from envace_jax.types import Json


def key_of(asked: Json) -> str:
    """The key of a question: a hash of the JSON value that stands for all that decides its answer."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def own_file(path: Path, process: int) -> Path:
    """Where a process keeps its answers: the first one in `path`, process 3 in NAME.3.jsonl beside it."""
    return path if process == 0 else path.with_name(f"{path.stem}.{process}{path.suffix}")


class AnswerCache:
    """Answers (JSON values) by key, in a file that is only ever added to; a question under way is shared too.

    An answer is in the file before anybody gets it, so a run that was killed finds every answer that it used. A line
    that was half-written then is passed over, and so is an answer that does not fit what is asked. `counts` gets
    `cache_hits`, the questions that were not asked again.
    """

    def __init__(self, path: Path, counts: collections.Counter[str] | None = None):
        self._counts = collections.Counter[str]() if counts is None else counts
        self._path, self._lock = own_file(path, hosts.index()), threading.Lock()
        self._kept: dict[str, Json] = {}
        self._under_way: dict[str, Future[Json]] = {}
        self._file: TextIO | None = None  # opened when there is something to keep
        self._torn = False
        for file in (path, *sorted(path.parent.glob(f"{path.stem}.*{path.suffix}"))):
            data = file.read_bytes() if file.exists() else b""
            if file == self._path:
                self._torn = bool(data) and not data.endswith(b"\n")
            for line in data.splitlines():
                try:
                    key, answer = json.loads(line)
                    self._kept[key] = answer
                except (ValueError, TypeError):
                    continue

    def answer(self, key: str, ask: Callable[[], Future[Json]], fits: Callable[[Json], bool]) -> Future[Json]:
        """The kept answer if it `fits`, the one under way, or `ask()`'s, which is kept from now on.

        The future is shared, so nobody can cancel it. A fault is not kept.
        """
        with self._lock:
            shared = self._under_way.get(key)
            if shared is None and key in self._kept and fits(self._kept[key]):
                shared = Future()
                shared.set_result(self._kept[key])
            if shared is not None:
                self._counts["cache_hits"] += 1
                return shared
            shared = self._under_way[key] = Future()
            shared.set_running_or_notify_cancel()

        def settle(asked: Future[Json]) -> None:
            try:
                answer = asked.result()
                self._keep(key, answer)
            except BaseException as fault:  # also a CancelledError: whoever waits must hear of it
                self._forget(key)
                shared.set_exception(fault)
            else:
                self._forget(key)
                shared.set_result(answer)

        try:
            asked = ask()
        except Exception as fault:  # others may share it already
            asked = Future()
            asked.set_exception(fault)
        asked.add_done_callback(settle)
        return shared

    def close(self) -> None:
        """Closes the file; what is answered later opens it again."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _forget(self, key: str) -> None:
        with self._lock:
            self._under_way.pop(key, None)

    def _keep(self, key: str, answer: Json) -> None:
        with self._lock:
            self._kept[key] = answer
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", encoding="utf-8")
                self._file.write("\n" if self._torn else "")
                self._torn = False
            self._file.write(json.dumps([key, answer]) + "\n")
            self._file.flush()
