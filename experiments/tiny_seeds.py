"""Trains `configs/tiny.py` with several seeds and prints what training changed: `python experiments/tiny_seeds.py`.

Every seed is the main command in its own folder: an interrupted one continues, a finished one is only read again, and
one that was made with other settings is refused.
Writes `tiny_seeds.json` and `tiny_seeds.png` beside the table. About 10 minutes a seed on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  the backend has to be chosen first

from envace_jax.metrics import write_json_atomic  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
MEASURES = {
    "real_success": "held-out real success, sampled",
    "real_success_greedy": "held-out real success, greedy",
    "unseen_domain": "unseen domain, sampled",
    "unseen_domain_greedy": "unseen domain, greedy",
    "fidelity": "fidelity of rehearsal",
    "fidelity_without_examples": "fidelity without examples",
}
# Two-sided 97.5% quantiles of Student's t for 1, 2, ... degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def run_seed(seed: int, folder: Path, overrides: list[str]) -> dict:
    """The summary of one seed. The main command decides what is still to be done."""
    command = [
        sys.executable, "-m", "envace_jax.main", f"--config={ROOT / 'configs' / 'tiny.py'}",
        f"--workdir={folder}", f"--config.seed={seed}", *overrides,
    ]  # fmt: skip
    if subprocess.run(command, cwd=ROOT).returncode:
        raise SystemExit(f"seed {seed} did not finish; see above")
    return json.loads((folder / "summary.json").read_text())


def interval(values: list[float]) -> tuple[float, float | None]:
    """Mean and half width of the 95% interval over seeds (None for a single seed)."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None
    return mean, STUDENT[len(values) - 2] * statistics.stdev(values) / len(values) ** 0.5


def shown(value: tuple[float, float | None]) -> str:
    return f"{value[0]:.3f}" + ("" if value[1] is None else f" ± {value[1]:.3f}")


def table(summaries: list[dict]) -> list[dict]:
    rows = []
    for key, label in MEASURES.items():
        if f"{key}_before" not in summaries[0]:
            continue
        before = [summary[f"{key}_before"] for summary in summaries]
        after = [summary[f"{key}_after"] for summary in summaries]
        change = [b - a for a, b in zip(before, after, strict=True)]
        rows.append({
            "measure": label, "before": interval(before), "after": interval(after), "change": interval(change),
            "before_by_seed": before, "after_by_seed": after,
        })  # fmt: skip
    return rows


def draw(rows: list[dict], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(8, 4))
    for offset, (name, color) in enumerate((("before", "#9aa5b1"), ("after", "#2563eb"))):
        places = [index + 0.38 * offset for index in range(len(rows))]
        means, widths = zip(*(row[name] for row in rows), strict=True)
        axis.barh(places, means, height=0.36, color=color, label=f"{name} training")
        for place, row in zip(places, rows, strict=True):
            axis.plot(row[f"{name}_by_seed"], [place] * len(row[f"{name}_by_seed"]), "k.", markersize=4)
    axis.set_yticks([index + 0.19 for index in range(len(rows))], [row["measure"] for row in rows])
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.set_xlabel("share; a dot is a seed")
    axis.legend(loc="upper center", bbox_to_anchor=(0.4, 1.14), ncols=2, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs") / "tiny_seeds", help="where the runs go")
    parser.add_argument("--out", type=Path, default=ROOT / "experiments" / "results")
    args, overrides = parser.parse_known_args()

    summaries = [run_seed(seed, args.runs.resolve() / f"seed{seed}", overrides) for seed in args.seeds]
    rows = table(summaries)
    print(f"\n{len(summaries)} seeds {args.seeds}; mean ± half width of the 95% interval over seeds")
    for row in rows:
        cells = (shown(row[name]) for name in ("before", "after", "change"))
        print("{:34s} {} -> {}   change {}".format(row["measure"], *cells))
    for key in ("seconds", "real_env_calls_in_training"):
        print(f"{key}: {[round(summary[key], 1) for summary in summaries]}")
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = ["--seeds", *map(str, args.seeds)] if args.seeds != [0, 1, 2] else []
    command = " ".join(["python experiments/tiny_seeds.py", *chosen, *overrides])  # wherever its files went
    result = {"command": command, "seeds": args.seeds, "rows": rows, "summaries": summaries}
    write_json_atomic(args.out / "tiny_seeds.json", result)
    draw(rows, args.out / "tiny_seeds.png")


if __name__ == "__main__":
    main()
