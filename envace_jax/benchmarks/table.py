"""The results of an evaluation as a short table for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from envace_jax.terminal import plain


def lines(results: Mapping[str, Any]) -> Iterator[str]:
    """A line for every category with the baselines beside it, then the benchmark's own figures."""
    yield f"\n{results['benchmark']}: {results.get('package', '')}"
    own = results.get("results")
    if own is None:
        yield from (f"{name}: {_number(value)}" for name, value in results.get("figures", {}).items())
        return
    others = results.get("baselines", {})
    head = "".join(f"{name:>9s}" for name in others)
    yield f"{'category':28s}{'cases':>6s}{'masked':>8s}{'score':>8s}{'95% interval':>17s}{head}"
    for name, found in own["categories"].items():
        beside = "".join(_share(other["categories"].get(name, {}).get("score"), 9) for other in others.values())
        interval = found["interval"]
        between = "-" if interval is None else f"{interval[0]:.1f} to {interval[1]:.1f}"
        counted = f"{found['cases']:6d}{found['masked']:8d}{_share(found['score'], 8)}"
        yield f"{name:28s}{counted}{between:>17s}{beside}"
    yield from _groups(own.get("groups", {}), others)
    yield from _tool_f1(own.get("tool_f1", {}), others)
    for name, found in own.get("pass_hat", {}).items():
        if len(found) > 1:
            yield f"{name:28s}" + "  ".join(f"{k} {value:.1f}" for k, value in found.items())
    for name, reason in results.get("missing", {}).items():
        if reason != "not asked for":
            yield f"{name:28s}missing: {reason}"
    if own["masked"]:
        yield f"{own['masked']} attempts are masked, and the same command tries them again; why:"
        yield from (f"  {count} x {plain(reason)}" for reason, count in own.get("faults", {}).items())
    for name, other in others.items():
        if other.get("masked"):
            yield f"of baseline {name} {other['masked']} attempts are masked; its score is of the rest"
    if own.get("empty_memories"):
        yield f"{own['empty_memories']} rehearsals left no memory"
    yield "ended: " + ", ".join(f"{reason} {count}" for reason, count in own["ended"].items())
    if own.get("unscored_ended"):
        reasons = ", ".join(f"{reason} {count}" for reason, count in own["unscored_ended"].items())
        yield f"conversations that questions rest on ended: {reasons}"


def _groups(groups: Mapping[str, Any], others: Mapping[str, Any]) -> Iterator[str]:
    for name, group in groups.items():
        beside = "".join(_share(other["groups"][name]["partial"], 9) for other in others.values())
        if group["score"] is not None:
            yield f"[{name}]".ljust(42) + f"{_share(group['score'], 8)}{'':17s}{beside}"
        elif group["partial"] is not None:
            lacks = ", ".join(group["missing"])
            yield f"[{name}]".ljust(42) + f"{_share(group['partial'], 8)}{'of what ran':>17s}{beside}  missing: {lacks}"


def _tool_f1(found: Mapping[str, Any], others: Mapping[str, Any]) -> Iterator[str]:
    for name, row in found.items():
        beside = "".join(_share(other["tool_f1"].get(name, {}).get("f1"), 9) for other in others.values())
        between = f"{row['interval'][0]:.1f} to {row['interval'][1]:.1f}"
        yield f"tool F1, {name}".ljust(42) + f"{_share(row['f1'], 8)}{between:>17s}{beside}"


def _share(value: float | None, width: int) -> str:
    return f"{'-' if value is None else format(value, '.1f'):>{width}s}"


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
