"""Trains `configs/tiny.py` in several variants and with several seeds, and compares what came out.

`three_loops.py` and `ablations.py` say which variants; everything else is here. A run is the main command in a folder
of its own: an interrupted one continues where it stopped, a finished one is only read again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import queue
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  the backend has to be chosen first
from tiny_seeds import interval, shown  # noqa: E402

from envace_jax.metrics import write_json_atomic  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
Summary = Mapping[str, float]
SEEDS = [0, 1, 2]
# key of summary.json without `_before` and `_after`, and the column's title
MEASURES = {
    "real_success": "held-out, sampled",
    "real_success_greedy": "held-out, greedy",
    "unseen_domain": "unseen domain, sampled",
    "fidelity": "fidelity",
    "fidelity_without_examples": "fidelity without examples",
}
COSTS = {
    "real_env_calls_in_training": "environment calls",
    "external_tokens": "external tokens",
    "seconds": "seconds",
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to train: its name, the settings that make it, and what it is, in a few words."""

    name: str
    overrides: tuple[str, ...]
    about: str


def run_one(variant: Variant, seed: int, folder: Path, overrides: Sequence[str], core: int | None) -> Summary:
    """The summary of a variant's run with one seed; what the run prints goes to `log.txt` beside its files."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "envace_jax.main", f"--config={ROOT / 'configs' / 'tiny.py'}", f"--workdir={folder}",
        f"--config.seed={seed}", *overrides, *variant.overrides,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    log = folder.with_suffix(".log")
    with log.open("a") as file:
        pin = None if core is None else (lambda: os.sched_setaffinity(0, {core}))
        done = subprocess.run(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment, preexec_fn=pin, check=False
        )
    if done.returncode:
        tail = "\n".join(log.read_text().splitlines()[-5:])
        raise SystemExit(f"{variant.name}, seed {seed} did not finish (exit {done.returncode}); {log} ends:\n{tail}")
    return json.loads((folder / "summary.json").read_text())


def run_all(
    variants: Sequence[Variant], seeds: Sequence[int], runs: Path, overrides: Sequence[str], parallel: int
) -> dict[str, list[Summary]]:
    """Summaries by variant, a seed each. With `parallel` above 1 so many runs go side by side, a core each."""
    cores: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    for core in sorted(os.sched_getaffinity(0))[:parallel] if parallel > 1 else [None]:
        cores.put(core)

    def task(variant: Variant, seed: int) -> Summary:
        core = cores.get()
        try:
            summary = run_one(variant, seed, runs / f"{variant.name}-seed{seed}", overrides, core)
        finally:
            cores.put(core)
        success = summary["real_success_after"]
        print(f"{variant.name:24s} seed {seed}: {summary['seconds']:.0f} s, held-out {success:.3f}", flush=True)
        return summary

    # Seed by seed, so that whatever is there after an interruption compares all variants.
    order = [(variant, seed) for seed in seeds for variant in variants]
    with concurrent.futures.ThreadPoolExecutor(max(1, parallel)) as pool:
        summaries = list(pool.map(lambda entry: task(*entry), order))
    found: dict[str, list[Summary]] = {variant.name: [] for variant in variants}
    for (variant, _), summary in zip(order, summaries, strict=True):
        found[variant.name].append(summary)
    return found


def measured(summaries: Sequence[Summary]) -> dict[str, dict]:
    """Mean and half width of the 95% interval over seeds of every measure after training, its change, and the costs."""
    row: dict[str, dict] = {}
    for key in MEASURES:
        if f"{key}_after" in summaries[0]:
            after = [summary[f"{key}_after"] for summary in summaries]
            change = [summary[f"{key}_after"] - summary[f"{key}_before"] for summary in summaries]
            row[key] = {"after": interval(after), "change": interval(change), "by_seed": after}
    for key in COSTS:
        values = [float(summary.get(key, 0.0)) for summary in summaries]
        row[key] = {"mean": sum(values) / len(values), "by_seed": values}
    return row


def gains_beside(
    found: Mapping[str, Sequence[Summary]], other: str, key: str = "real_success"
) -> dict[str, tuple[float, float | None]]:
    """Each variant's gain less `other`'s of the same seed: mean and half width of the 95% interval over seeds.

    Seeds are compared in pairs, since runs of one seed see the same tasks.
    """

    def gain(summary: Summary) -> float:
        return summary[f"{key}_after"] - summary[f"{key}_before"]

    return {
        name: interval([gain(a) - gain(b) for a, b in zip(summaries, found[other], strict=True)])
        for name, summaries in found.items()
        if name != other
    }


def markdown(variants: Sequence[Variant], rows: Mapping[str, dict]) -> str:
    """The table of a README: a variant a line."""
    first = rows[variants[0].name]
    titles = [MEASURES[key] for key in MEASURES if key in first] + list(COSTS.values())
    lines = ["| | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    for variant in variants:
        row = rows[variant.name]
        cells = [f"{shown(row[key]['after'])} ({row[key]['change'][0]:+.3f})" for key in MEASURES if key in row]
        cells += [f"{row[key]['mean']:,.0f}" for key in COSTS]
        lines.append(f"| {variant.about} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(variants: Sequence[Variant], rows: Mapping[str, dict], path: Path) -> None:
    """Gains of three measures, a bar each with its interval; a dot is a seed's."""
    keys = [key for key in ("real_success", "unseen_domain", "fidelity") if key in rows[variants[0].name]]
    figure, axes = plt.subplots(1, len(keys), figsize=(4 * len(keys) + 2, 0.42 * len(variants) + 1.6), sharey=True)
    for axis, key in zip(axes, keys, strict=True):
        for place, variant in enumerate(variants):
            mean, width = rows[variant.name][key]["change"]
            axis.barh(place, mean, xerr=width, height=0.62, color="#2563eb" if place else "#64748b", capsize=3)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_title(f"change: {MEASURES[key]}", fontsize=10)
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(variants)), [variant.name for variant in variants])
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def command_of(name: str, seeds: Sequence[int], only: Sequence[str], given: Sequence[str]) -> str:
    """The command that makes these results anew; where its files go and how many runs go at once is left out."""
    words = [f"python experiments/{name}.py"]
    words += ["--seeds", *map(str, seeds)] if list(seeds) != SEEDS else []
    words += ["--only", *only] if only else []
    return " ".join([*words, *given])


def main(name: str, about: str, variants: Sequence[Variant], beside: str, defaults: Sequence[str] = ()) -> None:
    """The command of a study: runs what is missing, prints the table, writes NAME.json and NAME.png."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--only", nargs="+", default=[], choices=[variant.name for variant in variants])
    parser.add_argument("--parallel", type=int, default=1, help="runs side by side, a core each")
    parser.add_argument("--runs", type=Path, default=Path("runs") / name, help="where the runs go")
    parser.add_argument("--out", type=Path, default=ROOT / "experiments" / "results")
    args, given = parser.parse_known_args()
    if unknown := [argument for argument in given if not argument.startswith("--config.")]:
        parser.error(f"unknown argument {unknown[0]}; settings of all runs are given as --config.KEY=VALUE")

    chosen = [variant for variant in variants if not args.only or variant.name in args.only]
    found = run_all(chosen, args.seeds, args.runs.resolve(), [*defaults, *given], args.parallel)
    rows = {variant.name: measured(found[variant.name]) for variant in chosen}
    differences = gains_beside(found, beside) if beside in found else {}
    print(f"\n{len(args.seeds)} seeds {args.seeds}; after training: mean ± half width of the 95% interval (change)\n")
    print(markdown(chosen, rows))
    for other, difference in differences.items():
        print(f"gain of {other} less that of {beside}, held-out sampled, by seed: {shown(difference)}")
    args.out.mkdir(parents=True, exist_ok=True)
    result = {
        "command": command_of(name, args.seeds, args.only, given),
        "settings_of_all_runs": [*defaults, *given],
        "variants": {variant.name: {"about": variant.about, "settings": variant.overrides} for variant in chosen},
        "seeds": args.seeds,
        "rows": rows,
        f"gain_less_{beside}": differences,
        "summaries": found,
    }
    write_json_atomic(args.out / f"{name}.json", result)
    draw(chosen, rows, args.out / f"{name}.png")
