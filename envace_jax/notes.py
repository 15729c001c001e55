"""What a person who watches a run would otherwise take for a hang, or learn only from the curves, in a line each.

Knows numbers of steps alone; nothing of policies, rollouts or batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

FIRST, AGAIN = 3, 25  # steps in a row without anything learned, after which that is said first, and again
ADVANTAGES = ("advantage_abs_act", "advantage_abs_rehearse")


class Shown(Protocol):
    """Where the lines go."""

    def note(self, text: str) -> None:
        """Shows a line that stays."""
        ...

    def within(self, text: str) -> None:
        """Shows what is going on, on a terminal."""
        ...


class Notes:
    """The lines of one run. `compiled` are the numbers of rows whose train step is compiled already."""

    def __init__(self, shown: Shown, compiled: Iterable[int] = ()) -> None:
        self._shown, self._compiled = shown, set(compiled)
        self._quiet = 0  # steps in a row from which nothing was learned

    def rows(self, rows: int) -> None:
        """A train step of so many rows begins."""
        if rows not in self._compiled:
            self._compiled.add(rows)
            self._shown.note(
                f"the first train step of {rows} rows is compiled now, minutes for a large model; "
                "batch.row_buckets can have it done in the warm-up"
            )
        self._shown.within(f"learning from {rows} rows")

    def learned(self, metrics: Mapping[str, float]) -> None:
        """A step is over."""
        if any(metrics.get(name, 0.0) for name in ADVANTAGES):
            self._quiet = 0
            return
        self._quiet += 1
        if self._quiet == FIRST or self._quiet % AGAIN == 0:
            self._shown.note(f"{self._quiet} steps in a row: {nothing(metrics)}")


def nothing(metrics: Mapping[str, float]) -> str:
    """Why nothing could be learned from the tasks of a step whose advantages are all 0."""
    reward = metrics.get("reward", math.nan)
    if math.isnan(reward):
        return "every attempt is masked, so the tasks teach nothing; the trajectories say why"
    if metrics.get("solved") == 1:
        return "every attempt solved its task, so there is nothing left to learn from these tasks"
    if metrics.get("masked"):
        return (
            f"what was not masked ({metrics['masked']:.0f} attempts of the last step were) earned the same, so the "
            "tasks teach nothing; the trajectories say why they are masked"
        )
    if reward == 0:
        return (
            "no attempt earned anything, so the tasks teach nothing; does the model know such tools? are limits long "
            "enough (ended_*)? python -m envace_jax.report shows what the attempts did"
        )
    return "all attempts at a task earned the same, so the tasks teach nothing; try more data.attempts, or other tasks"
