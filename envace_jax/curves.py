"""The picture of a run: its metrics drawn over its steps, from metrics.jsonl alone.

A panel is a title, a unit and the metrics on it, listed in `PANELS`; a metric that was not recorded is left out, and a
panel without any says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envace_jax.display import EVALUATION
from envace_jax.metrics import read_json_lines

# (title, y axis, ((metric, label), ...)); evaluations are drawn with markers because they are rare
PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Training, answered by rehearsal", "share", (("reward", "mean reward"), ("solved", "solved"))),
    (
        "Success in the real environment",
        "share of tasks",
        (
            ("eval_real_success", "held-out, sampled"),
            ("eval_real_success_greedy", "held-out, greedy"),
            ("eval_unseen_domain", "unseen domain, sampled"),
            ("eval_unseen_domain_greedy", "unseen domain, greedy"),
        ),
    ),
    (
        "Fidelity of rehearsal",
        "share equal to executed",
        (
            ("eval_fidelity", "held-out, with examples"),
            ("eval_fidelity_without_examples", "held-out, without examples"),
            ("agreement", "in training"),
        ),
    ),
    ("Tokens per step", "trained tokens", (("tokens_act", "act"), ("tokens_rehearse", "rehearse"))),
    (
        "Advantages",
        "mean |advantage|",
        (("advantage_abs_act", "act"), ("advantage_abs_rehearse", "rehearse")),
    ),
    (
        "Sampler against trainer",
        "|logprob difference|",
        (("logprob_diff", "mean"), ("logprob_diff_max", "max")),
    ),
)
LOGARITHMIC = ("Sampler against trainer",)
SHARES = tuple(title for title, unit, _ in PANELS if unit.startswith("share"))  # drawn from 0 to 1


def write_curves(source: Path | str, path: Path | str, title: str = "") -> None:
    """Draws the metrics file `source` as the PNG `path`; an unfinished drawing is never seen under that name."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    records = read_json_lines(source)
    figure, grid = pyplot.subplots(2, 3, figsize=(15, 8), layout="constrained")
    for axes, (name, unit, metrics) in zip(grid.flat, PANELS, strict=True):
        drawn = [_draw(axes, records, metric, label) for metric, label in metrics]
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if not any(drawn):
            axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color="grey")
            continue
        axes.legend(frameon=False)
        if name in SHARES:
            axes.set_ylim(-0.02, 1.02)
        elif name in LOGARITHMIC and any(line.get_ydata().max() > 0 for line in axes.lines):
            axes.set_yscale("log", nonpositive="mask")
        else:
            axes.set_ylim(bottom=0)
    if title:
        figure.suptitle(title)
    path = Path(path)
    temporary = path.with_name(f".{path.stem}.tmp.png")
    figure.savefig(temporary, dpi=110)
    pyplot.close(figure)
    temporary.replace(path)


def _draw(axes: Any, records: Sequence[dict[str, Any]], metric: str, label: str) -> bool:
    """Draws one metric; many points get a smoothed line over the faint raw one. False when it was never recorded."""
    points = [(record["step"], record[metric]) for record in records if record.get(metric) is not None]
    if not points:
        return False
    steps, values = zip(*points, strict=True)
    if metric.startswith(EVALUATION):
        axes.plot(steps, values, marker="o", label=label)
        return True
    if len(points) < 20:
        axes.plot(steps, values, label=label)
        return True
    (raw,) = axes.plot(steps, values, alpha=0.25, linewidth=1)
    axes.plot(steps, _smooth(values), color=raw.get_color(), label=f"{label} (10-step mean)")
    return True


def _smooth(values: Sequence[float], window: int = 10) -> list[float]:
    """The mean of each value and up to `window` - 1 before it."""
    result = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        result.append(sum(part) / len(part))
    return result
