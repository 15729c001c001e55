"""The table "What was planned" in docs/tpu.md: every topology that a config names in its head comment.

    python experiments/plan_table.py [--only=PART_OF_A_NAME] [--write]

A config's "Planned:" lines name topologies and what else is to be given on each. Each is planned by `envace_jax.plan`
in a process of its own and kept in experiments/results/plans/, where the next call finds it unless the settings have
changed. --write puts the table into docs/tpu.md. It takes some minutes for each topology and needs libtpu in this
interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results" / "plans"
PAGE = ROOT / "docs" / "tpu.md"
SECTION = "## What was planned\n"
GIB = 2**30


def planned(config: Path) -> Iterator[tuple[str, list[str]]]:
    """(topology, further flags) of each "Planned:" entry in a config's head comment."""
    text = config.read_text().split('"""')[1]
    block = re.search(r"^Planned:(.*(?:\n +.*)*)", text, re.MULTILINE)
    found: list[tuple[str, list[str]]] = []
    for word in (block[1] if block else "").split():
        if re.fullmatch(r"v\w+:\d+(x\d+)+", word):
            found.append((word, []))
        elif word.startswith("--"):
            found[-1][1].append(word)
    yield from found


def entries(only: str = "") -> Iterator[tuple[str, Path, str, list[str]]]:
    """(name, config, topology, flags) of all that is to be planned."""
    for config in sorted((ROOT / "configs").glob("*.py")):
        for topology, flags in planned(config):
            name = f"{config.stem}_{topology.replace(':', '_')}"
            if only in name:
                yield name, config, topology, flags


def command(config: Path, topology: str, flags: list[str]) -> list[str]:
    return [f"--config={config.relative_to(ROOT)}", f"--topology={topology}", *flags]


def known(name: str, arguments: list[str]) -> dict[str, Any] | None:
    """The kept result, where it is one of these settings."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        return None
    from envace_jax import plan
    from envace_jax.config import to_json

    found = json.loads(file.read_text())
    return found if found["config"] == to_json(plan.read_flags(["plan", *arguments]).config) else None


def run(name: str, arguments: list[str]) -> dict[str, Any]:
    """Plans in a process of its own, which says on stderr what it does. Raises RuntimeError where it has no result."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / f"{name}.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    whole = [sys.executable, "-m", "envace_jax.plan", *arguments, f"--json={file}"]
    done = subprocess.run(whole, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{name}: no result, exit code {done.returncode}")
    return json.loads(file.read_text())


def row(name: str, found: dict[str, Any], flags: list[str]) -> str:
    """One line of the table."""
    hbm = found["chip"]["hbm_bytes"]
    most = {phase["name"]: 0 for phase in found["phases"]}
    for phase in found["phases"]:
        most[phase["name"]] = max(most[phase["name"]], phase["bytes"])
    parts = {part: size["device"] / GIB for part, size in found["parts"].items()}
    host = sum(size["host"] for size in found["parts"].values()) / GIB
    state = parts["parameters"] + parts["optimizer"] + parts.get("frozen base", 0.0)
    step = next(program for program in found["programs"] if program["name"].startswith("train"))
    sent = sum(total["bytes"] for total in (step["traffic"] or {}).values())
    seen = found["rows"] * found["work"]["row_length"] / found["chips"]
    mesh, seconds = found["config"]["mesh"], found["time"]["seconds"] if found["time"] else None
    times = "-" if seconds is None else f"{seconds['train']:.0f} + {seconds['prefill'] + seconds['decode']:.0f}"
    cells = [
        found["config_file"].split("/")[-1].removesuffix(".py").removeprefix("qwen3_"),
        found["topology"],
        f"{mesh['fsdp']} x {mesh['tensor']}",
        f"{hbm / GIB:.2f}",
        *(f"{most[phase] / GIB:.2f}" for phase in ("train", "reshard", "rollout")),
        f"{state:.2f}" + (f" (+ {host:.2f} on the host)" if host else ""),
        f"{step['temporaries'] / GIB:.2f}",
        f"{parts.get('decoding parameters', 0.0):.2f}",
        f"{parts.get('key-value cache', 0.0):.2f}",
        "unread" if step["traffic"] is None else f"{sent / seen / 1000:.0f}",
        times,
        "yes" if found["fits"] else "**no**",
    ]
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "config | topology | fsdp x tensor | HBM | train | reshard | rollout | state | temporaries of the train step | "
    "decoding parameters | caches | sent, kB a token and chip | seconds: train + rollout | fits"
)


def table(results: list[str]) -> str:
    lines = [f"| {HEAD} |", "|" + "---|" * len(HEAD.split(" | ")), *results]
    return "\n".join(lines) + "\n"


def section(rows: list[str], versions: dict[str, str | None], assumptions: list[str]) -> str:
    """The section of the page: the table, and what its figures are."""
    made = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"""{SECTION}
Made by `python experiments/plan_table.py --write` with {made}. Each line is `python -m envace_jax.plan` of a config;
what else is to be given on a topology is in the config's head comment. Memory is in GiB a chip, as the compiler lays
the run's own programs out for their largest shapes: `train`, `reshard` and `rollout` are the most that a phase needs,
what stays on the chip beside its programs included, and must stay below `HBM`, what a program may use. `state` is
parameters and optimizer, on the chip and where said on the host. Bytes sent are those of one chip in a train step,
for each token of its rows.

{table(rows)}
Seconds are a roofline's and not measured. A step is taken to be a full training row for each trajectory, half of it
sampled; {"; ".join(assumptions)}.
"""


def write(text: str) -> None:
    """Puts the section in its place in docs/tpu.md, or at its end."""
    page = PAGE.read_text() if PAGE.exists() else "# On TPUs\n"
    before, found, rest = page.partition(SECTION)
    after = rest[rest.index("\n## ") + 1 :] if "\n## " in rest else ""
    PAGE.write_text((before if found else f"{page}\n") + text + (f"\n{after}" if after else ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    rows, fits, last = [], True, None
    for name, config, topology, flags in entries(given.only):
        arguments = command(config, topology, flags)
        found = known(name, arguments)
        try:
            found = run(name, arguments) if found is None else found
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            fits = False
            continue
        fits, last = fits and found["fits"], found
        rows.append(row(name, found, flags))
        print(rows[-1], flush=True)
    if given.write and last is not None:
        write(section(rows, last["versions"], last["assumptions"]))
    return 0 if fits and rows else 1


if __name__ == "__main__":
    sys.exit(main())
