"""What the live panel shows, drawn with rich as lines of text for a given number of columns and rows.

A pure function of what is known of the run; it knows no terminal, and no clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from envace_jax.progress import duration
from envace_jax.terminal import plain

WIDEST = 110  # columns; a longer line is hard to follow
BORDERED = 50  # columns from which on there is a border
LABEL = 13  # columns of a number's name
BARS = "▁▂▃▄▅▆▇█"

# The numbers of a step: name, format and metrics. The second list stands beside the first where there is room.
Number = tuple[str, str, tuple[str, ...]]
FIRST: tuple[Number, ...] = (
    ("reward", "{:.3f}", ("reward",)),
    ("solved", "{:.2f}", ("solved",)),
    ("fidelity", "{:.2f}", ("agreement",)),
)
SECOND: tuple[Number, ...] = (
    ("|advantage|", "{:.3f} act  {:.3f} rehearse", ("advantage_abs_act", "advantage_abs_rehearse")),
    ("tokens", "{:,.0f} act  {:,.0f} rehearse", ("tokens_act", "tokens_rehearse")),
    ("logprobs", "{:.1e} apart, max {:.1e}", ("logprob_diff", "logprob_diff_max")),
)
SPEED: Number = ("speed", "{:,.0f} tokens/s", ("tokens_per_second",))
BESIDE = 70  # columns from which on the lists stand beside each other
FIRST_WIDTH = 33  # columns of the first
REASONS = 2  # the most frequent reasons that are shown


@dataclasses.dataclass(frozen=True)
class View:
    """What is known of a run at a moment."""

    title: str
    total: int  # steps
    done: int
    now: str = ""  # what is going on
    left: float | None = None  # seconds; None before there is an estimate
    seconds: float = 0.0  # what the last step took
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # metrics of the last step
    rewards: tuple[float, ...] = ()  # of recent steps
    masked: Mapping[str, int] = dataclasses.field(default_factory=dict)  # reason -> trajectories of the last step
    masked_before: int = 0  # trajectories of all steps before it
    evaluated: int | None = None  # the step of the last evaluation
    evaluation: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # its results
    first: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # those of the first evaluation


def make_console(stream: TextIO) -> Console:
    """Renders for `stream`: as many colours as it has, none where NO_COLOR is set, letters it can write."""
    return Console(file=stream, force_terminal=True, highlight=False, emoji=False, markup=False)


def panel_lines(view: View, console: Console, columns: int, rows: int) -> list[str]:
    """The panel as lines with their escape sequences, narrower than `columns` and at most max(rows, 1) of them."""
    width, ascii_only = max(min(columns - 1, WIDEST), 1), not console.encoding.startswith("utf")
    bordered = width >= BORDERED and rows >= 5
    inner = max(width - 4 * bordered, 1)
    content: list[RenderableType] = [
        _progress(view, inner),
        _labelled("now", _text(view.now or "-")),
        *_numbers(view, inner, ascii_only),
        *_why_masked(view),
        *_evaluation(view, inner),
    ]
    content = content[: max(rows - 2 * bordered, 1)]
    shown: RenderableType = Group(*content)
    if bordered:
        shown = Panel(
            shown,
            title=_text(view.title, "bold"),
            title_align="left",
            box=box.ASCII if ascii_only else box.ROUNDED,
            border_style="dim",
            width=width,
        )
    with console.capture() as captured:
        console.print(shown, width=width, overflow="ellipsis", no_wrap=True, crop=True)
    return captured.get().splitlines()


def _progress(view: View, width: int) -> RenderableType:
    steps, share = f"step {view.done}/{view.total}", f"{100 * view.done // max(view.total, 1)}%"
    left = "time left: known after a step" if view.left is None else f"{duration(view.left)} left"
    if view.done == view.total:
        left = "all steps done"
    room = width - len(f"{steps}  {share}  {left}") - 2
    if room < 8:
        return Text(f"{steps}  {left}", "bold")
    grid = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(view.total, 1), completed=view.done, width=room, complete_style="cyan")
    grid.add_row(Text(steps, "bold"), bar, share, left)
    return grid


def _numbers(view: View, width: int, ascii_only: bool) -> list[Text]:
    first = [_labelled(name, Text(_number(form, names, view.values), "bold")) for name, form, names in FIRST]
    second = [_labelled(name, Text(_number(form, names, view.values))) for name, form, names in SECOND]
    room = min(width, FIRST_WIDTH) - first[0].cell_len - 3
    if not ascii_only and len(view.rewards) > 1 and room > 1:
        first[0].append(f"  {_sparks(view.rewards[-room:])}", "cyan")
    speed = _number(SPEED[1], SPEED[2], view.values) + (f"  {view.seconds:.1f} s/step" if view.seconds else "")
    first.append(_labelled("masked", _masked(view)))
    second.append(_labelled(SPEED[0], Text(speed)))
    if width < BESIDE:
        return [*first[:-1], *second, first[-1]]
    for number, more in zip(first, second, strict=True):
        number.truncate(FIRST_WIDTH - 1, overflow="ellipsis", pad=True)
        number.append(" ").append_text(more)
    return first


def _masked(view: View) -> Text:
    count, before = sum(view.masked.values()), view.masked_before
    attempts = sum(value for name, value in view.values.items() if name.startswith("ended_"))
    of = f" of {attempts:.0f}" if attempts else ""
    text = Text().append(f"{count}{of}", "bold yellow" if count else "")
    return text.append(f", {count + before} in all", "dim") if count + before else text


def _why_masked(view: View) -> list[Text]:
    reasons = sorted(view.masked.items(), key=lambda item: -item[1])
    shown = [_labelled("", _text(f"{count} x {reason}", "yellow")) for reason, count in reasons[:REASONS]]
    if len(reasons) > REASONS:
        shown[-1].append(f"  ({len(reasons) - REASONS} more reasons)", "dim")
    return shown


def _evaluation(view: View, width: int) -> list[Text]:
    """Each result with what has changed since the first evaluation, as many on a line as there is room for."""
    if view.evaluated is None:
        return [_labelled("evaluation", Text("none yet", "dim"))]
    results = []
    for name, value in view.evaluation.items():
        if name == "masked" and not value:
            continue
        text = Text(f"{plain(name).replace('_', ' ')} ").append(_number("{:.3f}", (name,), view.evaluation), "bold")
        before = view.first.get(name)
        if before is not None and value is not None and view.first is not view.evaluation:
            change = float(value) - float(before)
            text.append(f" {change:+.3f}", "green" if change > 0 else "red" if change < 0 else "dim")
        results.append(text)
    lines = [_labelled(f"eval at {view.evaluated}", Text())]
    used = 0
    for text in results:
        if used and used + text.cell_len > width - LABEL:
            lines.append(_labelled("", Text()))
            used = 0
        lines[-1].append_text(text).append("   ")
        used += text.cell_len + 3
    for line in lines:
        line.rstrip()
    return lines


def _labelled(name: str, text: Text) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    return line.append(f"{name} ".ljust(LABEL), "dim").append_text(text)


def _number(form: str, names: tuple[str, ...], values: Mapping[str, Any]) -> str:
    """The metrics of these names as text; a dash where one is missing or was null."""
    found = [values.get(name) for name in names]
    known = [float(value) for value in found if value is not None]
    return form.format(*known) if len(known) == len(names) else "-"


def _sparks(values: tuple[float, ...]) -> str:
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    steps = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * steps)] if math.isfinite(value) else " " for value in values)


def _text(text: str, style: str = "") -> Text:
    return Text(plain(text), style, no_wrap=True, overflow="ellipsis")
