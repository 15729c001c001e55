"""Where the time of the benchmark's cells goes: `python experiments/profile_cells.py --size S --cells decode train`.

Runs each cell (`bench_cells.py`) twice, the second time under JAX's profiler, and prints the seconds that each kind of
operation took, and with --top those of the longest operations. XLA names an operation by what it fused; on a CPU
several run at once, so the seconds of all kinds may exceed the cell's. --keep leaves the trace to look at in Perfetto.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported

import bench
import bench_cells
import jax

KINDS = (  # the first that matches an operation's name
    ("products and reductions", r"ynn_fusion|^dot|gemm|convolution|^wrapped_reduce"),
    ("reads and writes at an index", r"scatter|gather|dynamic"),
    ("copies and transpositions", r"copy|transpose|concatenate|slice|broadcast$|pad"),
    ("elementwise", r"fusion|^wrapped_|^(add|multiply|select|exponential)"),
)
Totals = dict[str, tuple[float, int]]  # seconds and number of operations, by name
NOT_OPERATIONS = re.compile(r"^\$|^end: |Execute|^Pjit|Pool|^while|^cond|^call|::|shard_args|ParseArguments|\(")


def kind_of(name: str) -> str | None:
    """The kind of an operation, None for what is none (the host's functions, loops that hold operations)."""
    if NOT_OPERATIONS.search(name):
        return None
    base = re.sub(r"(\.\d+)+$", "", name)
    return next((kind for kind, pattern in KINDS if re.search(pattern, base)), None)


def total_up(events: Iterable[dict[str, Any]], key: Callable[[str], str]) -> Totals:
    """Operations of a trace (durations in microseconds), added up by `key` of their names; the longest first."""
    seconds: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for event in events:
        if event.get("ph") == "X" and kind_of(event["name"]):
            name = key(event["name"])
            seconds[name] += event["dur"] / 1e6
            counts[name] += 1
    return {name: (seconds[name], counts[name]) for name, _ in seconds.most_common()}


def profile(cell: bench_cells.Cell, folder: Path) -> tuple[float, list[dict[str, Any]]]:
    """Seconds of one repetition after one that compiles, and the events of its trace."""
    cell.run(0)
    with jax.profiler.trace(str(folder)):
        seconds = cell.run(1)
    newest = max(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    with gzip.open(newest) as file:
        return seconds, json.load(file)["traceEvents"]


def main(given: Sequence[str]) -> int:
    parser = bench.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="S", help=f"{', '.join(bench.SIZES)}, or as in bench.py")
    parser.add_argument("--cells", nargs="+", choices=("decode", "prefill", "train"), default=["decode", "train"])
    parser.add_argument("--top", type=int, default=0, help="so many of the longest operations too")
    parser.add_argument("--keep", type=Path, help="folder for the traces")
    args = parser.parse_args(given)
    try:
        config = bench.parse_size(args.size)
    except ValueError as error:
        parser.error(str(error))
    shapes = bench_cells.TINY_SHAPES if args.size == "tiny" else bench_cells.Shapes()
    for cell in bench_cells.make_cells(bench_cells.make_model(config), shapes, args.cells, []):
        with tempfile.TemporaryDirectory() as folder:
            seconds, events = profile(cell, args.keep or Path(folder))
        kinds = total_up(events, lambda name: str(kind_of(name)))
        total = sum(taken for taken, _ in kinds.values())
        print(f"{cell.name} at {args.size}: {seconds:.3f} s with the profiler on, operations {total:.3f} s")
        for kind, (taken, count) in kinds.items():
            print(f"  {taken:8.3f} s  {taken / total:6.1%}  {count:7d} x  {kind}")
        for name, (taken, count) in list(total_up(events, str).items())[: args.top]:
            print(f"  {taken:8.3f} s  {taken / total:6.1%}  {count:7d} x {1e3 * taken / count:8.2f} ms  {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
