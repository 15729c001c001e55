"""How the processes of a run end together: whatever ends one ends all, within a minute, each with a line that says why.

A thread in every process writes a growing number to the table of keys that process 0 keeps (`jax.distributed`), and
reads the others' there. A second one looks whether they grow, whether one has ended the run, and whether process 0
answers. It ends its own process even while that waits in a collective for somebody who will never come. Knows
processes, and nothing of what they compute.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn, Protocol

import jax

PULSE_S = 2.0
# Pulses are counted, not seconds: a machine that stood still for a while must not hold the others for dead.
SILENT_PULSES = 15
UNANSWERED_PULSES = 10  # of process 0
TELL_S = 5.0  # the most that telling the others may take
LAST_S = 10.0  # process 0 keeps the table, so it waits this long for the others to have read why the run ends
LOST = 75  # exit code where another process is gone; a shell's EX_TEMPFAIL: the same command goes on
FOLDER = "envace_jax/"
ENDED, ALIVE, GONE = f"{FOLDER}ended", f"{FOLDER}alive/", f"{FOLDER}gone/"


# How errors of the runtime begin.
CODES = "(UNKNOWN|INTERNAL|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED|FAILED_PRECONDITION|RESOURCE_EXHAUSTED): "
# It outlives a signal that is sent to all processes of a job.
SPEAK = (
    "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "sys.stdin.read() or print(sys.argv[1], file=sys.stderr)"
)


class Table(Protocol):
    """What is used of jax's client."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...


class Watch:
    """Looks after the run's other processes from `start` to `stop`.

    Args:
      table: keys and values that all processes see.
      process, processes: which one this is, of how many.
      how_on: says how the run goes on after it has ended.
      words: through which this process ends.
    """

    def __init__(
        self,
        table: Table,
        process: int,
        processes: int,
        how_on: Callable[[], str],
        words: LastWords,
    ):
        self._table, self._process, self._others = table, process, [i for i in range(processes) if i != process]
        self._how_on, self._words = how_on, words
        self._entries: dict[str, str] = {}  # what the table held when it last answered
        self._answers = self._looked = self._unanswered = 0
        self._problem = "no answer"
        self._heard: dict[int, tuple[str, int]] = {i: ("", 0) for i in self._others}  # (last word, pulses since then)
        self._ending, self._stopped = threading.Lock(), threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(each,), name="watch", daemon=True)
            for each in (self.talk, self.look)
        ]

    def start(self) -> None:
        """Returns when this process has been heard of, so that one that dies later is missed by name."""
        _briefly(self.talk, TELL_S)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No longer looks: the run is over in all processes."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        self._words.close()

    def talk(self) -> None:
        """Says that this process is there, and reads what all have said. May wait long where process 0 is cut off."""
        try:
            self._table.key_value_set(f"{ALIVE}{self._process}", f"{self._answers} {socket.gethostname()}", True)
            self._entries = dict(self._table.key_value_dir_get(FOLDER))
            self._answers += 1
        except Exception as error:  # whatever the client raises, process 0 did not answer
            self._problem = next(iter(str(error).splitlines()), type(error).__name__)[:200]

    def look(self) -> None:
        """Ends this process where one has ended the run or is no longer heard of."""
        new, self._looked = self._answers != self._looked, self._answers
        self._unanswered = 0 if new else self._unanswered + 1
        if self._unanswered >= UNANSWERED_PULSES:
            line = f"process 0 does not answer: it or its host is gone ({self._problem}); {self._how_on()}"
            self._end(LOST, line)
            return
        if not new:
            return
        entries = self._entries
        if ENDED in entries:
            ended = json.loads(entries[ENDED])
            self._end(ended["code"], ended["line"])
            return
        for other in self._others:
            said, pulses = entries.get(f"{ALIVE}{other}", ""), self._heard[other][1]
            self._heard[other] = (said, pulses + 1 if said == self._heard[other][0] else 0)
            if self._heard[other][1] >= SILENT_PULSES:
                self._others.remove(other)  # it will not be seen off
                self._end_all(LOST, self._lost(other, said))
                return

    def end_run(self, code: int, line: str) -> NoReturn:
        """Ends this process with an exit code, and all others too: they print the line."""
        self._end_all(code, f"process {self._process} ended the run: {line}", said=True)
        raise SystemExit(code)

    def leave(self, code: int) -> None:
        """Ends this process alone; the others find out."""
        self._words.leave(code)

    def wait(self) -> None:
        """Waits for as long as it takes to find out which process is gone; returns if none is."""
        time.sleep((SILENT_PULSES + UNANSWERED_PULSES) * PULSE_S)
        if self._ending.locked():
            time.sleep(2 * (LAST_S + TELL_S))  # it is found out, and said

    def _lost(self, other: int, said: str) -> str:
        host = f" on {said.split(' ', 1)[1]}" if " " in said else ""
        return (
            f"process {other}{host} was not heard of for {SILENT_PULSES * PULSE_S:.0f} s: it died, or its host or "
            f"network did; {self._how_on()}"
        )

    def _end_all(self, code: int, line: str, said: bool = False) -> None:
        told = json.dumps({"code": code, "line": line})
        _briefly(lambda: self._table.key_value_set(ENDED, told), TELL_S)  # fails where another was faster
        self._end(code, line, said)

    def _end(self, code: int, line: str, said: bool = False) -> None:
        if not self._ending.acquire(blocking=False):
            time.sleep(2 * (LAST_S + TELL_S))  # another thread of this process is at it
        if not said:
            print(f"error: process {self._process}: {line}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        if self._process == 0:
            _briefly(self._see_off, LAST_S)
        else:
            _briefly(lambda: self._table.key_value_set(f"{GONE}{self._process}", "", True), TELL_S)
        self._words.leave(code)

    def _see_off(self) -> None:
        """Waits until all others have read why the run ends."""
        gone = {f"{GONE}{other}" for other in self._others}
        while not gone <= dict(self._table.key_value_dir_get(GONE)).keys():
            time.sleep(0.1)

    def _repeat(self, each: Callable[[], None]) -> None:
        while not self._stopped.wait(PULSE_S):
            each()


def _briefly(act: Callable[[], None], most_s: float) -> None:
    """Does something that may fail, or wait for somebody who is gone; goes on after `most_s` seconds at the latest."""

    def try_to() -> None:
        with contextlib.suppress(Exception):
            act()

    thread = threading.Thread(target=try_to, daemon=True)
    thread.start()
    thread.join(most_s)


def begin(how_on: Callable[[], str]) -> Watch | None:
    """Watches from now on; None where this process has joined no others."""
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return None
    from jax._src import distributed  # its table of keys has no public name

    table = distributed.global_state.client
    assert table is not None  # it is initialized
    process = jax.process_index()
    words = LastWords(
        f"error: process {process} ended without a word: it was killed or crashed (out of memory?), or process 0 is "
        "gone; the same command on every host continues the run from its last checkpoint"
    )
    watch = Watch(table, process, jax.process_count(), how_on, words)
    watch.start()
    return watch


def may_be_anothers(error: BaseException) -> bool:
    """Whether an error may only say that another process did not come to a collective."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        # jax raises JaxRuntimeError, and ValueError where a failed collective is noticed by reading its result.
        if isinstance(link, jax.errors.JaxRuntimeError) or re.match(CODES, str(link)):
            return "RESOURCE_EXHAUSTED" not in str(link)
        link = link.__cause__ or link.__context__
    return False


class LastWords:
    """Says that this process ended, where it cannot say so itself: killed, or aborted by a library.

    jax aborts all others when process 0 is gone. A small process waits for this one's end and speaks then, unless
    `leave` or `close` came before.
    """

    def __init__(self, line: str):
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", SPEAK, line], stdin=subprocess.PIPE, start_new_session=True
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # killed before: then nobody speaks
            self._process.stdin.write(b"no need\n")
            self._process.stdin.close()
        self._process.wait()

    def leave(self, code: int) -> None:
        """Ends this process at once, without further words."""
        self.close()
        os._exit(code)
