"""The lines a person watches while a run goes on, with an estimate of the time left.

On a terminal the line of the current step is rewritten in place; elsewhere every step gets a line of its own. It shows
text and knows nothing of what the text means.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable
from typing import TextIO

RECENT = 16  # steps that the estimate of the time left looks back on


class Progress:
    """Shows steps `done` + 1 to `total` on `stream` (stdout when not given)."""

    def __init__(
        self, total: int, done: int = 0, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._last = total, done
        self._stream = sys.stdout if stream is None else stream
        self._in_place = self._stream.isatty()
        self._shown = 0  # characters of the line that may be rewritten
        self._clock = clock
        self._mark = clock()
        self._seconds: list[float] = []

    def step(self, step: int, text: str) -> None:
        """Shows the finished `step`: its text, how long it took, and the time left by the median of recent steps."""
        now = self._clock()
        if step > self._last:
            self._seconds.append((now - self._mark) / (step - self._last))
        self._mark, self._last = now, step
        recent = self._seconds[-RECENT:] or [0.0]
        left = statistics.median(recent) * (self._total - step)
        line = f"step {step}/{self._total}  {text}  {recent[-1]:.1f} s/step  {duration(left)} left"
        if self._in_place:
            self._rewrite(line)
        else:
            self._print(line)

    def within(self, text: str) -> None:
        """Shows how far the current step is; on a terminal only."""
        if self._in_place:
            self._rewrite(f"step {self._last + 1}/{self._total}  {text}" if self._last < self._total else text)

    def note(self, text: str) -> None:
        """Prints a line that stays, such as an evaluation's result. The time up to here is not counted as a step's."""
        self.close()
        self._print(text)
        self._mark = self._clock()

    def close(self) -> None:
        """Ends the line that was being rewritten."""
        if self._shown:
            self._print("")
        self._shown = 0

    def _rewrite(self, line: str) -> None:
        line = line[: max(shutil.get_terminal_size().columns - 1, 1)]  # a wrapped line could not be rewritten
        self._stream.write("\r" + line.ljust(self._shown))
        self._stream.flush()
        self._shown = len(line)

    def _print(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


def duration(seconds: float) -> str:
    """A length of time as a person would say it: 42 s, 3 min 05 s, 2 h 10 min."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
