"""Measures decode, prefill, the train step and the multi-turn workload on this machine: `python experiments/bench.py`.

    python experiments/bench.py                                            all cells at size S, multi-turn at size small
    python experiments/bench.py --size M --cells decode train --logprob-chunk 256
    python experiments/bench.py --cells none --sweep slots context         the sweeps alone
    python experiments/bench.py --size V=4096,D=256,L=4,H=4,K=2,hd=64,F=768 --out results.json

Cells take turns within a repetition, as do the multi-turn modes, after one repetition that compiles and is not counted;
the machine's limits are measured in the same rounds. Figures are medians; fractions are of the best 2048^3 float32
matrix product and of the best copy seen. Keep the machine otherwise idle and compare only figures of one run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported; another platform has to be asked for

import bench_cells
import jax
import multiturn
import multiturn_modes as modes
from bench_cells import Cell, Shapes
from bench_limits import Limits, Work, measure_limits

from envace_jax.models.qwen import QwenConfig
from envace_jax.progress import Progress

CELLS = ("decode", "prefill", "train", "multiturn")
SWEEPS = ("slots", "context")
SIZE_KEYS = {"V": "vocab_size", "D": "width", "L": "layers", "F": "ffn"}
SIZE_KEYS |= {"H": "heads", "K": "kv_heads", "hd": "head_dim"}
SIZES = {  # S and M are the peers', see bench_adapter.py
    "tiny": "V=96,D=32,L=1,H=2,K=1,hd=16,F=48",
    "small": "V=512,D=64,L=2,H=2,K=1,hd=32,F=192",
    "S": "V=4096,D=256,L=4,H=4,K=2,hd=64,F=768",
    "M": "V=151936,D=512,L=8,H=8,K=4,hd=64,F=1536",
}
TINY_LIMITS = {"gemm_size": 256, "copy_floats": 1 << 20, "tries": 1}  # so that a look at size tiny takes seconds
# What the multi-turn modes are held to: how many times more lockstep-fresh costs, and shares of ours.
RATIO_BARS = {"wall": 3.0, "prefilled": 4.0, "row_tokens": 2.5}
SHARE_BARS = {"busy": 0.85, "fill": 0.92}


def parse_size(text: str) -> QwenConfig:
    """A name in SIZES or "V=..,D=..,L=..,H=..,K=..,hd=..,F=.." as a configuration. Raises ValueError."""
    pairs = [part.partition("=") for part in SIZES.get(text, text).split(",")]
    sizes = {key: value for key, _, value in pairs}
    if sorted(sizes) != sorted(SIZE_KEYS) or not all(value.isdigit() for value in sizes.values()):
        raise ValueError(f"size {text!r}; accepted are {', '.join(SIZES)} or all of V,D,L,H,K,hd,F as in {SIZES['S']}")
    fields: dict[str, Any] = {SIZE_KEYS[key]: int(value) for key, value in sizes.items()}
    return QwenConfig(**fields)


# --- rounds ---


@dataclasses.dataclass
class Measured:
    """What the rounds gave so far, a list entry per counted repetition."""

    limits: Limits
    seconds: dict[str, list[float]]  # by cell
    compiled: dict[str, int]  # by cell, after the warm-up
    modes: dict[str, list[dict[str, float]]]
    work: dict[str, tuple[Work, Work]]  # by mode: of its rollout, of its training


def run_rounds(
    cells: Sequence[Cell],
    setup: modes.Setup | None,
    chosen: Sequence[str],
    reps: int,
    limit_sizes: dict[str, int],
    progress: Progress,
) -> Measured:
    """`reps` repetitions of everything in turn, after one that compiles."""
    result = Measured(Limits(0.0, 0.0), {cell.name: [] for cell in cells}, {}, {}, {})
    done = 0
    for repetition in range(reps + 1):
        note = "" if repetition else " (warm-up)"
        result.limits = result.limits.best(measure_limits(**limit_sizes))
        for cell in cells:
            seconds = cell.run(repetition)
            if repetition:
                result.seconds[cell.name].append(seconds)
            else:
                result.compiled[cell.name] = cell.compiled()
            done += 1
            progress.step(done, f"{cell.name}{note}")
        for mode in chosen if setup is not None else ():
            rollout = modes.play(setup, mode, progress.within)
            progress.within(f"{mode}: train step")
            training = modes.train(setup, mode, rollout.trajectories, warm_up=not repetition)
            if repetition:
                result.modes.setdefault(mode, []).append(modes.figures(rollout, training, setup.settings.slots))
                result.work[mode] = modes.nominal_work(setup, rollout, training)
            done += 1
            progress.step(done, f"{mode}{note}")
    progress.close()
    return result


def cell_row(cell: Cell, seconds: list[float], compiled: int, limits: Limits) -> dict[str, Any]:
    median = statistics.median(seconds)
    gemm, copy = limits.fractions(cell.work, median)
    return {
        "cell": cell.name,
        "seconds": seconds,
        "median_s": median,
        "ms_per_step": 1e3 * median / cell.steps,
        "tokens_per_s": cell.tokens / median,
        "gemm_fraction": gemm,
        "copy_fraction": copy,
        "compiled": compiled,
    }


def mode_row(mode: str, results: list[dict[str, float]], work: tuple[Work, Work], limits: Limits) -> dict[str, Any]:
    """Medians over repetitions; programs compiled are added up."""
    row: dict[str, Any] = {name: statistics.median(result[name] for result in results) for name in results[0]}
    row["compiled"] = sum(result["compiled"] for result in results)
    row["repetitions"] = [{key: result[key] for key in ("rollout_s", "train_s", "total_s")} for result in results]
    for name, part in zip(("rollout", "train"), work, strict=True):
        row[f"{name}_gemm_fraction"], row[f"{name}_copy_fraction"] = limits.fractions(part, row[f"{name}_s"])
    return {"mode": mode, **row}


def judge(rows: dict[str, dict[str, Any]]) -> tuple[dict[str, dict[str, float]], list[str]]:
    """The ratios of every other mode to ours, and a line for each bar that says whether it is met."""
    ratios = modes.ratios(rows)
    fresh = ratios["lockstep-fresh"]
    checks = [(f"lockstep-fresh / ours, {name}", fresh[name], bar) for name, bar in RATIO_BARS.items()]
    checks += [(f"ours, {name}", rows["ours"][name], bar) for name, bar in SHARE_BARS.items()]
    lines = [f"{what:34s} {value:7.3f}  bar {bar:4.2f}  {_verdict(value >= bar)}" for what, value, bar in checks]
    return ratios, lines


def _verdict(met: bool) -> str:
    return "met" if met else "MISSED"


# --- output ---


def table(rows: Sequence[dict[str, Any]], columns: Sequence[tuple[str, str, str]]) -> list[str]:
    """Lines of a text table; a column is (key, heading, format)."""
    cells = [[heading for _, heading, _ in columns]]
    cells += [[format(row[key], style) for key, _, style in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in cells]


CELL_COLUMNS = (
    ("cell", "cell", "s"),
    ("median_s", "seconds", ".4f"),
    ("ms_per_step", "ms/step", ".3f"),
    ("tokens_per_s", "tokens/s", ".0f"),
    ("gemm_fraction", "of GEMM", ".1%"),
    ("copy_fraction", "of copy", ".1%"),
    ("compiled", "compiled", "d"),
)
MODE_COLUMNS = (
    ("mode", "mode", "s"),
    ("rollout_s", "rollout s", ".2f"),
    ("train_s", "batch+step s", ".2f"),
    ("total_s", "total s", ".2f"),
    ("prefilled_tokens", "prefilled", ".0f"),
    ("reused_tokens", "reused", ".0f"),
    ("row_tokens", "row tokens", ".0f"),
    ("sequence_tokens", "without padding", ".0f"),
    ("fill", "fill", ".1%"),
    ("busy", "slots busy", ".1%"),
    ("tokens_per_s", "sampled/s", ".0f"),
    ("rollout_gemm_fraction", "rollout of GEMM", ".1%"),
    ("rollout_copy_fraction", "of copy", ".1%"),
    ("train_gemm_fraction", "train of GEMM", ".1%"),
    ("train_copy_fraction", "of copy", ".1%"),
    ("compiled", "compiled", "d"),
)


def report(args: argparse.Namespace, cells: Sequence[Cell], measured: Measured) -> dict[str, Any]:
    """Prints the tables and returns everything as JSON values."""
    limits = measured.limits
    print(f"\nlimits: {limits.gemm / 1e9:.1f} GFLOP/s in a float32 GEMM, {limits.copy / 1e9:.1f} GB/s in a copy")
    result: dict[str, Any] = {
        "command": " ".join(["python experiments/bench.py", *args.given]),
        "jax": jax.__version__,
        "devices": [str(device) for device in jax.devices()],
        "cpus": os.cpu_count(),
        "repetitions": args.reps,
        "size": dataclasses.asdict(args.size),
        "shapes": dataclasses.asdict(args.shapes),
        "limits": dataclasses.asdict(limits),
    }
    if cells:
        rows = [
            cell_row(cell, measured.seconds[cell.name], cell.compiled() - measured.compiled[cell.name], limits)
            for cell in cells
        ]
        result["cells"] = rows
        print("\n".join(table(rows, CELL_COLUMNS)))
    if measured.modes:
        by_mode = {mode: mode_row(mode, runs, measured.work[mode], limits) for mode, runs in measured.modes.items()}
        ratios, lines = judge(by_mode)
        result["multiturn"] = {
            "size": dataclasses.asdict(args.multiturn_size),
            "tasks": args.tasks,
            "attempts": args.attempts,
            "seed": args.seed,
            "settings": dataclasses.asdict(args.settings),
            "modes": by_mode,
            "others_over_ours": ratios,
        }
        print("\n".join(["", *table(list(by_mode.values()), MODE_COLUMNS), ""]))
        for mode, values in ratios.items():
            print(f"{mode} / ours: " + "  ".join(f"{name} {value:.2f}" for name, value in values.items()))
        print("\n".join(lines))
    return result


# --- command line ---


class Parser(argparse.ArgumentParser):
    """One line for a bad argument."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parse_arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", default="S", help=f"of cells and sweeps: {', '.join(SIZES)}, or V=..,D=..,L=..,H=..,K=..,hd=..,F=..")
    add("--cells", nargs="+", choices=(*CELLS, "none"), default=list(CELLS))
    add("--sweep", nargs="+", choices=SWEEPS, default=[])
    add("--reps", type=int, default=3, help="counted repetitions")
    add("--out", type=Path, help="JSON file")
    add("--slots", type=int, help="of the decode and prefill cells, and of the multi-turn sampler")
    add("--decode-chunk", type=int, help="tokens drawn between two looks of the host")
    add("--micro-batch-rows", type=int, help="training rows whose activations are alive at once")
    add("--logprob-chunk", type=int, help="tokens whose logits are alive at once")
    add("--multiturn-size", default="small", help="as --size")
    add("--modes", nargs="+", choices=modes.MODES, default=list(modes.MODES), help="of the multi-turn workload")
    add("--tasks", type=int, default=32, help="of the multi-turn workload")
    add("--attempts", type=int, default=4, help="at each task")
    add("--cache-rows", type=int, default=0, help="streams that the multi-turn sampler may keep; 0: all")
    add("--row-length", type=int, default=0, help="of a multi-turn row of several streams; 0: chosen")
    add("--seed", type=int, default=0, help="of the multi-turn script")
    args = parser.parse_args(given)
    args.given = list(given)
    try:
        settle(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def settle(args: argparse.Namespace) -> None:
    """Turns what was typed into configurations and settings. Raises ValueError for what cannot work."""
    needed = {"ours", "lockstep-fresh"} - set(args.modes)
    if needed:
        raise ValueError(f"--modes needs {' and '.join(sorted(needed))} too: its bars compare those two")
    numbers = {"reps": 1, "tasks": 1, "attempts": 1, "slots": 1, "decode_chunk": 1, "micro_batch_rows": 1}
    numbers |= {"logprob_chunk": 1, "cache_rows": 0, "row_length": 0, "seed": 0}
    for name, least in numbers.items():
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; must be at least {least}")
    if args.out is not None and not args.out.parent.is_dir():
        raise ValueError(f"--out: {args.out.parent}: no such folder")
    if set(args.cells) == {"none"} and not args.sweep:
        raise ValueError("--cells none needs a --sweep")
    tiny = args.size == "tiny"
    args.size, args.multiturn_size = parse_size(args.size), parse_size(args.multiturn_size)
    changes = {name: getattr(args, name) for name in ("slots", "decode_chunk", "micro_batch_rows", "logprob_chunk")}
    changes = {name: value for name, value in changes.items() if value is not None}
    args.shapes = dataclasses.replace(bench_cells.TINY_SHAPES if tiny else Shapes(), **changes)
    args.settings = modes.Settings(**changes, cache_rows=args.cache_rows, row_length=args.row_length)
    if args.shapes.rows % min(args.shapes.micro_batch_rows, args.shapes.rows):
        raise ValueError(f"--micro-batch-rows must divide {args.shapes.rows}, the rows of the train cell")
    args.limit_sizes = TINY_LIMITS if tiny else {}


def make_multiturn(args: argparse.Namespace) -> modes.Setup:
    script = multiturn.make_script(
        args.seed, vocab_size=args.multiturn_size.vocab_size, tasks=args.tasks, attempts=args.attempts
    )
    return modes.make_setup(args.multiturn_size, script, args.settings, args.seed)


def main(given: Sequence[str]) -> int:
    args = parse_arguments(given)
    cells: list[Cell] = []
    if args.sweep or set(args.cells) - {"multiturn", "none"}:
        cells = bench_cells.make_cells(bench_cells.make_model(args.size), args.shapes, args.cells, args.sweep)
    try:
        setup = make_multiturn(args) if "multiturn" in args.cells else None
    except ValueError as error:  # a script that does not fit the settings
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    turns = (args.reps + 1) * (len(cells) + (len(args.modes) if setup else 0))
    measured = run_rounds(cells, setup, args.modes, args.reps, args.limit_sizes, Progress(turns, stream=sys.stderr))
    result = report(args, cells, measured)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
