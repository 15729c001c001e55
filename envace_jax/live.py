"""The live panel at the bottom of a terminal: a thread draws what the run has told of itself.

The run only leaves word of what has changed, so neither a slow terminal nor Ctrl-C meets it amid a drawing. What is
printed meanwhile stands above the panel (`terminal.py`); evaluations and notes are, so that they stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from envace_jax.display import EVALUATION
from envace_jax.panel import View, make_console, panel_lines
from envace_jax.progress import Pace, step_line
from envace_jax.terminal import Bottom

TICK_S = 0.25  # between two drawings
ROWS_ABOVE = 6  # of the terminal that are left to what is printed
LAST_REWARDS = 16


class LivePanel:
    """Shows steps `done` + 1 to `total` at the bottom of the terminal `stream`."""

    def __init__(
        self,
        total: int,
        done: int,
        title: str,
        stream: TextIO,
        evaluations: Sequence[Mapping[str, Any]] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._console, self._bottom = stream, make_console(stream), Bottom(stream)
        self._pace = Pace(total, done, clock)
        self._changed, self._closed = threading.Event(), False
        self._view = View(title=title, total=total, done=done)
        for record in evaluations:
            self._evaluated(record["step"], record)
        self._last_line = ""
        self._thread = threading.Thread(target=self._keep_drawing, name="panel", daemon=True)
        self._thread.start()

    def step(self, step: int, values: Mapping[str, Any], text: str) -> None:
        self._pace.step(step)
        self._last_line = step_line(self._pace, text)
        reward = float(values.get("reward", math.nan))
        rewards = (*self._view.rewards, reward)[-LAST_REWARDS:]
        self._tell(done=step, values=dict(values), rewards=rewards, seconds=self._pace.seconds, now="")

    def evaluation(self, step: int, values: Mapping[str, Any], text: str) -> None:
        self._evaluated(step, values)
        self.note(text)

    def masked(self, reasons: Mapping[str, int]) -> None:
        before = self._view.masked_before + sum(self._view.masked.values())
        self._tell(masked=dict(reasons), masked_before=before)

    def within(self, text: str) -> None:
        self._tell(now=text)

    def note(self, text: str) -> None:
        """Prints a line that stays, above the panel. The time up to here is not counted as a step's."""
        self._print(text)
        self._pace.pause()
        self._tell(now="")

    def close(self) -> None:
        """Takes the panel away and leaves the last step's line."""
        if self._closed:
            return
        self._closed = True
        self._changed.set()
        self._thread.join()
        self._bottom.close()
        if self._last_line:
            self._print(self._last_line)

    def _print(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed; the run goes on without
            self._stream.write(line + "\n")
            self._stream.flush()

    def _evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        results = {name.removeprefix(EVALUATION): value for name, value in values.items() if name != "step"}
        self._tell(evaluated=step, evaluation=results, first=self._view.first or results)

    def _tell(self, **changes: Any) -> None:
        self._view = dataclasses.replace(self._view, **changes)
        self._changed.set()

    def _keep_drawing(self) -> None:
        while not self._closed:
            try:
                self._draw()
            except OSError:  # the terminal was closed
                return
            self._changed.wait(TICK_S)
            self._changed.clear()

    def _draw(self) -> None:
        left = self._pace.left(running=True) if self._pace.known else None
        columns, rows = self._bottom.size()
        view = dataclasses.replace(self._view, left=left)
        self._bottom.draw(panel_lines(view, self._console, columns, rows - ROWS_ABOVE))
