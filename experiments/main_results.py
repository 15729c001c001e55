"""The paper's main table as a program: every checkpoint of it on every benchmark, the paper's figure beside ours.

    python experiments/main_results.py --checkpoints=EnvACE-8B=FOLDER,Qwen3-8B=FOLDER [--benchmarks=bfcl,tau2]
        [--out=FOLDER] [--hub] [-- --subset=small --trials=3 --config.user.urls=... ]

A checkpoint is a local folder, or with --hub the id in the table where a hub is reachable. What stands after -- is for
every `python -m envace_jax.evaluate` that is started; each goes on where an earlier start of this program left it. A
cell that could not be filled says why. Writes main_results.md and main_results.json. Whole cells take hours of an
accelerator: about 4,600 conversations for BFCL, 190 for tau2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envace_jax.metrics import write_json_atomic

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ("bfcl", "tau2", "vita", "finmcp")
NOT_GIVEN = "no checkpoint given: --checkpoints=NAME=FOLDER, or --hub for the ids of the table"
NOT_PUBLIC = "no public checkpoint: give one by --checkpoints=NAME=FOLDER"
TITLES = {"bfcl": "BFCL-v4", "tau2": "tau2-bench", "vita": "VitaBench", "finmcp": "FinMCP tool F1"}


@dataclasses.dataclass(frozen=True)
class Row:
    """A checkpoint of the paper's table: its id on the hub ("" where it is not public), and the paper's figures."""

    name: str
    hub: str
    paper: Mapping[str, float]


def _row(name: str, hub: str, bfcl: float | None, tau2: float | None, vita: float | None, **more: float) -> Row:
    figures = {"bfcl": bfcl, "tau2": tau2, "vita": vita, **more}
    return Row(name, hub, {key: value for key, value in figures.items() if value is not None})


ROWS = (
    _row("Qwen3-1.7B", "Qwen/Qwen3-1.7B", 30.89, 10.4, 1.9),
    _row("Qwen3-4B", "Qwen/Qwen3-4B", 41.80, 27.9, 9.6),
    _row("Qwen3-8B", "Qwen/Qwen3-8B", 44.04, 30.0, 11.4),
    _row("Simulator-8B", "", 19.78, 38.5, 1.8),
    _row("TOUCAN-7B", "Agent-Ark/Toucan-Qwen2.5-7B-Instruct-v0.1", 35.33, 22.4, 2.8),
    _row("AWM-8B", "Snowflake/Arctic-AWM-8B", 44.29, 31.2, 10.2),
    _row("AWM-14B", "Snowflake/Arctic-AWM-14B", 47.32, 30.7, 19.6),
    _row("EnvScaler-8B", "XXHStudyHard/EnvScaler-Qwen3-8B", 47.07, 32.9, 15.8),
    _row("ScaleEnv-8B", "", None, 38.5, 15.0),
    _row("EnvACE-1.7B", "Team-ACE/EnvACE-Qwen3-1.7B", 31.81, 15.3, 3.2),
    _row("EnvACE-8B", "Team-ACE/EnvACE-Qwen3-8B", 46.04, 36.7, 16.0, finmcp=46.78),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """What a checkpoint came to on a benchmark. Without a score `note` says why; with one, what it is a score of."""

    score: float | None
    note: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    place = given.index("--") if "--" in given else len(given)
    args = _parser().parse_args(given[:place])
    try:
        paths = _paths(args.checkpoints)
        wanted = [name for name in args.benchmarks.split(",") if name]
        if unknown := [name for name in wanted if name not in BENCHMARKS]:
            raise ValueError(f"--benchmarks: there is no {unknown[0]!r}; there are: {', '.join(BENCHMARKS)}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    cells = {
        row.name: {
            name: cell_of(row, name, paths, args.hub, args.out, given[place + 1 :])
            if name in wanted
            else Cell(None, "not asked for")
            for name in BENCHMARKS
        }
        for row in ROWS
    }
    write(args.out, cells, " ".join(["python experiments/main_results.py", *given]))
    print("\n".join(markdown(cells)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", default="", help="NAME=FOLDER,... with names of the table")
    parser.add_argument("--benchmarks", default="bfcl,tau2")
    parser.add_argument("--hub", action="store_true", help="load the others by their ids")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "main_results")
    return parser


def _paths(text: str) -> dict[str, str]:
    """Name of a row -> its checkpoint. Raises ValueError."""
    found = {}
    for part in filter(None, text.split(",")):
        name, equals, path = part.partition("=")
        if not equals or name not in [row.name for row in ROWS]:
            known = ", ".join(row.name for row in ROWS)
            raise ValueError(f"--checkpoints: {part!r} is not NAME=FOLDER with a NAME of {known}")
        found[name] = path
    return found


def cell_of(row: Row, benchmark: str, paths: Mapping[str, str], hub: bool, out: Path, further: Sequence[str]) -> Cell:
    """Runs the evaluation of a cell, or goes on with it."""
    path = paths.get(row.name) or (row.hub if hub else "")
    if not path:
        return Cell(None, NOT_GIVEN if row.hub else NOT_PUBLIC)
    folder = out / row.name / benchmark
    command = [
        sys.executable, "-m", "envace_jax.evaluate", f"--benchmark={benchmark}", f"--model={path}", f"--out={folder}",
        *further,
    ]  # fmt: skip
    print(f"{row.name}, {benchmark}: {' '.join(command[1:])}", flush=True)
    failed = started(command)
    return Cell(None, failed) if failed else figure(benchmark, json.loads((folder / "results.json").read_text()))


def started(command: Sequence[str]) -> str:
    """Runs an evaluation in a process of its own, so that its memory is free afterwards; why it failed, or "".

    It works where this program was started, so that paths mean the same to both.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)
    if not done.returncode:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")] or done.stderr.splitlines()[-1:]
    return (lines[0].removeprefix("error: ") if lines else f"exit status {done.returncode}")[:300]


def figure(benchmark: str, results: Mapping[str, Any]) -> Cell:
    """The cell's figure out of results.json, with what it leaves out."""
    if benchmark == "vita":
        cross = {name.removeprefix("judged "): value for name, value in results["figures"].items() if "judged" in name}
        return _mean(cross, ("delivery", "instore", "ota"))
    own = results["results"]
    note = "" if results["subset"]["name"] == "all" else f"subset {results['subset']['name']}"
    if benchmark == "bfcl":
        overall = own["groups"]["overall"]
        if overall["score"] is not None:
            return Cell(overall["score"], note)
        lacking = [name for group in own["groups"].values() for name in group["missing"]]
        leaves = sorted({name for name in lacking if name not in own["groups"]})
        return Cell(overall["partial"], "; ".join(filter(None, [note, f"without {', '.join(leaves)}"])))
    if benchmark == "finmcp":
        if "all" not in own["tool_f1"]:
            return Cell(None, "; ".join(filter(None, [note, "every sample has a masked message"])))
        return Cell(own["tool_f1"]["all"]["f1"], note)
    scores = {name: found["score"] for name, found in own["categories"].items()}
    found = _mean(scores, ("airline", "retail"))
    return dataclasses.replace(found, note="; ".join(filter(None, [note, found.note])))


def _mean(scores: Mapping[str, float | None], names: Sequence[str]) -> Cell:
    """The plain mean of the parts that a benchmark's cell is made of, here as far as they ran."""
    known = [scores[name] for name in names if scores.get(name) is not None]
    others = {name: value for name, value in scores.items() if name not in names and value is not None}
    lacking = [name for name in names if scores.get(name) is None]
    notes = [f"without {', '.join(lacking)}"] if lacking else []
    notes += [f"{name} {value:.1f}" for name, value in others.items()]
    mean = sum(value or 0.0 for value in known) / len(known) if known else None
    return Cell(mean, "; ".join(notes))


def write(folder: Path, cells: Mapping[str, Mapping[str, Cell]], command: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "name": row.name, "hub": row.hub, "paper": dict(row.paper),
            "here": {name: dataclasses.asdict(cell) for name, cell in cells[row.name].items()},
        }
        for row in ROWS
    ]  # fmt: skip
    write_json_atomic(folder / "main_results.json", {"command": command, "rows": rows})
    (folder / "main_results.md").write_text("\n".join(markdown(cells)) + "\n", encoding="utf-8")


def markdown(cells: Mapping[str, Mapping[str, Cell]]) -> list[str]:
    """The table, each cell "here (paper)", and below it a line for every note."""
    lines = ["| checkpoint | " + " | ".join(TITLES[name] for name in BENCHMARKS) + " |", "|---" * 5 + "|"]
    notes: list[str] = []
    for row in ROWS:
        shown = []
        for name in BENCHMARKS:
            cell, paper = cells[row.name][name], row.paper.get(name)
            mark = ""
            if cell.note and cell.note != "not asked for":
                if cell.note not in notes:
                    notes.append(cell.note)
                mark = f" [{notes.index(cell.note) + 1}]"
            here = "-" if cell.score is None else f"{cell.score:.2f}"
            shown.append(f"{here}{mark} ({'-' if paper is None else paper})")
        lines.append(f"| {row.name} | " + " | ".join(shown) + " |")
    lines += ["", "Ours, and in brackets the paper's."]
    return lines + [f"[{number}] {note}" for number, note in enumerate(notes, start=1)]


if __name__ == "__main__":
    raise SystemExit(main())
