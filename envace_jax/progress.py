"""The lines a person watches while a run goes on, with an estimate of the time left.

On a terminal the line of the current step is rewritten in place; elsewhere every step gets a line of its own. It shows
text and knows nothing of what the text means. A training run on a terminal that can do more has `live.py` instead.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable
from typing import TextIO

RECENT = 16  # steps that the estimate of the time left looks back on


class Pace:
    """How long steps take, and how long those that are left will."""

    def __init__(self, total: int, done: int, clock: Callable[[], float]) -> None:
        self.total, self.last = total, done
        self._clock, self._mark = clock, clock()
        self._seconds: list[float] = []

    def step(self, step: int) -> None:
        """A step was finished now."""
        now = self._clock()
        if step > self.last:
            self._seconds.append((now - self._mark) / (step - self.last))
        self._mark, self.last = now, step

    def pause(self) -> None:
        """The time up to now is not counted as a step's."""
        self._mark = self._clock()

    @property
    def known(self) -> bool:
        """Whether a step was seen, so that there is an estimate."""
        return bool(self._seconds)

    @property
    def seconds(self) -> float:
        """What the last step took; 0 before the first."""
        return self._seconds[-1] if self._seconds else 0.0

    def left(self, running: bool = False) -> float:
        """Seconds to the end by the median of recent steps, as of the last step, or with `running` as of now."""
        usual, steps = statistics.median(self._seconds[-RECENT:] or [0.0]), self.total - self.last
        spent = min(self._clock() - self._mark, usual) if running and steps else 0.0
        return usual * steps - spent


class Progress:
    """Shows steps `done` + 1 to `total` on `stream` (stdout when not given)."""

    def __init__(
        self, total: int, done: int = 0, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pace = Pace(total, done, clock)
        self._stream = sys.stdout if stream is None else stream
        self._in_place = self._stream.isatty()
        self._shown = 0  # characters of the line that may be rewritten

    def step(self, step: int, text: str) -> None:
        """Shows the finished `step`: its text, how long it took, and the time left by the median of recent steps."""
        self._pace.step(step)
        line = step_line(self._pace, text)
        if self._in_place:
            self._rewrite(line)
        else:
            self._print(line)

    def within(self, text: str) -> None:
        """Shows how far the current step is; on a terminal only."""
        last, total = self._pace.last, self._pace.total
        if self._in_place:
            self._rewrite(f"step {last + 1}/{total}  {text}" if last < total else text)

    def note(self, text: str) -> None:
        """Prints a line that stays, such as an evaluation's result. The time up to here is not counted as a step's."""
        self.close()
        self._print(text)
        self._pace.pause()

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


def step_line(pace: Pace, text: str) -> str:
    """What stands of a finished step: its number, its text, how long it took and how long the others will."""
    return f"step {pace.last}/{pace.total}  {text}  {pace.seconds:.1f} s/step  {duration(pace.left())} left"


def duration(seconds: float) -> str:
    """A length of time as a person would say it: 42 s, 3 min 05 s, 2 h 10 min."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
