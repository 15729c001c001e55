"""What a person sees of a training run: the live panel on a terminal, else a line a step.

It says which numbers are shown and in which words; `progress.py` and `live.py` show them.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO

from envace_jax import terminal
from envace_jax.progress import Progress

MOST_REASONS = 20  # for trajectories being masked, that lines tell
EVALUATION = "eval_"  # what names of evaluation results begin with

# The progress line: a text and the metrics in it.
STEP_LINE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward {:.3f}", ("reward",)),
    ("solved {:.2f}", ("solved",)),
    ("fidelity {:.2f}", ("agreement",)),
    ("|advantage| {:.3f} act {:.3f} rehearse", ("advantage_abs_act", "advantage_abs_rehearse")),
    ("tokens {:.0f} act {:.0f} rehearse", ("tokens_act", "tokens_rehearse")),
    ("logprob difference {:.1e} (max {:.1e})", ("logprob_diff", "logprob_diff_max")),
    ("masked {:.0f}", ("masked",)),
    ("{:.0f} tokens/s", ("tokens_per_second",)),
)


class Display(Protocol):
    """What shows a run."""

    def step(self, step: int, values: Mapping[str, Any], text: str) -> None:
        """A step was finished; `text` has what matters of its metrics."""

    def evaluation(self, step: int, values: Mapping[str, Any], text: str) -> None:
        """An evaluation was."""

    def masked(self, reasons: Mapping[str, int]) -> None:
        """How many trajectories of the step to be finished next are masked, by reason."""

    def within(self, text: str) -> None:
        """How far the current step is."""

    def note(self, text: str) -> None:
        """A line that stays."""

    def close(self) -> None:
        """Nothing more is shown."""


class Lines:
    """A line for each step and evaluation."""

    def __init__(self, total: int, done: int, stream: TextIO) -> None:
        self._progress = Progress(total, done, stream)
        self._reasons = set[str]()  # those that were told
        self.within, self.note, self.close = self._progress.within, self._progress.note, self._progress.close

    def step(self, step: int, values: Mapping[str, Any], text: str) -> None:
        self._progress.step(step, text)

    def evaluation(self, step: int, values: Mapping[str, Any], text: str) -> None:
        self.note(text)

    def masked(self, reasons: Mapping[str, int]) -> None:
        """Their number is in the step's line; why comes before it, each reason once."""
        for reason, count in reasons.items():
            kind = re.sub(r"\d+", "N", reason)  # what differs by numbers alone is one reason
            if kind not in self._reasons and len(self._reasons) < MOST_REASONS:
                self._reasons.add(kind)
                self.note(f"masked, {count} x (told once): {terminal.plain(reason)}")


def open_display(
    total: int, done: int, title: str, stream: TextIO | None = None, evaluations: Sequence[Mapping[str, Any]] = ()
) -> Display:
    """Begins to show a run of `total` steps, `done` of them behind it, on `stream` (stdout when not given).

    `evaluations` are the records of those that were before, in metrics.jsonl's form.
    """
    stream = sys.stdout if stream is None else stream
    if not terminal.is_capable(stream):
        return Lines(total, done, stream)
    from envace_jax.live import LivePanel  # rich takes a moment to import

    return LivePanel(total, done, title, stream, evaluations)


def is_evaluation(record: Mapping[str, Any]) -> bool:
    """Whether metrics are an evaluation's, and not a step's."""
    return all(name.startswith(EVALUATION) or name == "step" for name in record)


def step_text(values: Mapping[str, Any]) -> str:
    """The numbers of a training step that a person follows, on one line; what is missing or nan is left out."""
    parts = []
    for text, names in STEP_LINE:
        if all(values.get(name) is not None and not math.isnan(values[name]) for name in names):
            parts.append(text.format(*(float(values[name]) for name in names)))
    return "  ".join(parts)


def evaluation_text(step: int, values: Mapping[str, Any]) -> str:
    """An evaluation's numbers on one line."""
    results = "  ".join(f"{name.removeprefix(EVALUATION)} {float(value):.3f}" for name, value in values.items())
    return f"step {step} evaluation: {results}"
