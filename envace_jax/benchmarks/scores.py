"""Figures of attempts: shares with intervals, and how the trials of one task agree. Pure; knows no benchmark.

An attempt is masked where something outside failed: it is counted as that, and enters no other figure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from envace_jax.types import Json

Z = 1.959963984540054  # of a 95% interval
RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One attempt at a case."""

    case_id: str
    category: str
    trial: int
    score: float | None  # None: masked, or not scored
    masked: bool = False
    detail: Json = None


def category_figures(attempts: Sequence[Attempt], trials: int) -> dict[str, Any]:
    """Figures of one category's scored attempts.

    `score` is the mean over cases of the mean over trials, in percent, and `interval` a 95% Wilson interval of it for
    as many independent cases, which is a little too wide where there are several trials. None where nothing is known.
    """
    known = [attempt for attempt in attempts if attempt.score is not None]
    by_case: dict[str, list[float]] = {}
    for attempt in known:
        by_case.setdefault(attempt.case_id, []).append(float(attempt.score or 0.0))
    means = [float(np.mean(values)) for values in by_case.values()]
    by_trial = [[float(a.score or 0.0) for a in known if a.trial == trial] for trial in range(trials)]
    return {
        "cases": len({attempt.case_id for attempt in attempts}),
        "cases_scored": len(means),
        "attempts": len(attempts),
        "masked": sum(attempt.masked for attempt in attempts),
        "score": 100 * float(np.mean(means)) if means else None,
        "interval": [100 * end for end in wilson(float(np.mean(means)), len(means))] if means else None,
        "by_trial": [100 * float(np.mean(values)) if values else None for values in by_trial],
    }


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95% interval, in [0, 1], of a share seen in `count` independent cases."""
    if count < 1:
        raise ValueError("an interval needs at least one case")
    scale = 1 + Z * Z / count
    middle = (share + Z * Z / (2 * count)) / scale
    half = Z / scale * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap(counts: np.ndarray, figure: Callable[[np.ndarray], float], seed: int = 0) -> tuple[float, float]:
    """The 2.5% and 97.5% quantiles of a figure of sums over samples, drawn with replacement.

    `counts` is i64[samples, K]; `figure` gets the sums i64[K] of as many rows.
    """
    rng = np.random.default_rng(seed)
    found = [figure(counts[rng.integers(0, len(counts), len(counts))].sum(axis=0)) for _ in range(RESAMPLES)]
    return float(np.quantile(found, 0.025)), float(np.quantile(found, 0.975))


def pass_hat(attempts: Sequence[Attempt], trials: int) -> dict[str, float]:
    """tau-bench's pass^k in percent, k = 1 to `trials`: how likely k trials of a case, drawn from those there are, all
    succeed. Cases with fewer known trials than k count in no pass^k."""
    by_case: dict[str, list[bool]] = {}
    for attempt in attempts:
        if attempt.score is not None:
            by_case.setdefault(attempt.case_id, []).append(attempt.score >= 1.0 - 1e-9)
    found = {}
    for k in range(1, trials + 1):
        shares = [math.comb(sum(won), k) / math.comb(len(won), k) for won in by_case.values() if len(won) >= k]
        if shares:
            found[f"pass^{k}"] = 100 * float(np.mean(shares))
    return found


def mean_of_known(figures: Mapping[str, Any], names: Sequence[str]) -> float | None:
    """The plain mean of figures by name; None where any of them is not known."""
    values = [figures.get(name) for name in names]
    return (
        None if any(value is None for value in values) else float(np.mean([float(v) for v in values if v is not None]))
    )
