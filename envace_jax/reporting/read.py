"""What stands in a run's work folder, read as tolerantly as can be: the run may go on, or have been killed mid-line.

What cannot be read is left out and said in a note; a field that another version lacks or adds is no fault. Only a
folder that holds nothing of a run is refused. Nothing is written, and no device is asked for.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envace_jax.config import UserError
from envace_jax.environment import ENVIRONMENT_FILE
from envace_jax.json_values import check_depth
from envace_jax.metrics import METRICS_FILE, TRAJECTORIES_FILE
from envace_jax.workfolder import CONFIG_FILE, OUR_GROUPS, SUMMARY_FILE

WATCHED = (METRICS_FILE, TRAJECTORIES_FILE, CONFIG_FILE, ENVIRONMENT_FILE, SUMMARY_FILE)
LARGEST = 1e300  # beyond it a number is no measurement, and may not fit into a float


@dataclasses.dataclass(frozen=True)
class Run:
    """One work folder's content, as JSON values."""

    name: str
    folder: str
    steps: tuple[int, ...]  # ascending; of training and of evaluations
    metrics: Mapping[str, tuple[float | None, ...]]  # by name, a value for each of `steps`
    config: Mapping[str, Any] | None
    starts: tuple[Mapping[str, Any], ...]  # see environment.describe
    summary: Mapping[str, Any] | None  # of a finished run
    written: float | None  # when the metrics last grew, in seconds since 1970
    notes: tuple[str, ...]  # what could not be read


def read_runs(workdirs: Sequence[Path]) -> list[Run]:
    """The runs in these folders, in order, with names that differ. Raises UserError with one line for the first that
    is no work folder, and where one is named twice."""
    folders = [Path(os.path.realpath(workdir)) for workdir in workdirs]  # which no loop of links stops
    for number, folder in enumerate(folders):
        if folder in folders[:number]:
            raise UserError(f"{workdirs[number]}: named twice")
    return [read_run(workdir, name) for workdir, name in zip(workdirs, names(folders), strict=True)]


def names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as many of their parents' as it takes to tell all apart."""
    deepest = max((len(folder.parts) for folder in folders), default=1)
    found: list[str] = []
    for count in range(1, deepest + 1):
        found = [str(Path(*folder.parts[-count:])) for folder in folders]
        if len(set(found)) == len(found):
            break
    return found


def read_run(workdir: Path, name: str = "") -> Run:
    """The run in a folder. Raises UserError, one line, where there is none."""
    _check_folder(workdir)
    path = workdir / METRICS_FILE
    notes: list[str] = []
    config = _object(workdir / CONFIG_FILE, notes)
    if config is not None and not all(isinstance(config.get(group), dict) for group in OUR_GROUPS):
        notes.append(f"{CONFIG_FILE}: not the settings of a run, so none are shown")
        config = None
    if not os.path.isfile(path) and config is None:
        raise UserError(f"{workdir}: not a run's work folder: it has neither {METRICS_FILE} nor a run's {CONFIG_FILE}")
    rows = _rows(path, notes)
    if not rows and config is None and _bytes(path, []):
        raise UserError(f"{path}: no line of it is a step's record, so the folder is not a run's")
    steps = tuple(sorted(rows))
    known = dict.fromkeys(name for row in rows.values() for name in row)  # in the order of the file
    return Run(
        name=name or os.path.basename(os.path.realpath(workdir)),
        folder=str(workdir),
        steps=steps,
        metrics={metric: tuple(rows[step].get(metric) for step in steps) for metric in known},
        config=config,
        starts=tuple(_starts(workdir / ENVIRONMENT_FILE, notes)),
        summary=_object(workdir / SUMMARY_FILE, notes),
        written=os.path.getmtime(path) if os.path.isfile(path) else None,
        notes=tuple(notes),
    )


def _check_folder(workdir: Path) -> None:
    """Raises UserError where there is no folder that can be read."""
    problem = ""
    try:
        if not stat.S_ISDIR(os.stat(workdir).st_mode):
            problem = "not a folder"
        elif not os.access(workdir, os.R_OK | os.X_OK):
            problem = f"cannot be read: {os.strerror(errno.EACCES)}"
    except FileNotFoundError:
        problem = "no such folder"
    except OSError as error:  # a loop of links, a name that is too long, a folder above that is closed
        problem = f"cannot be read: {error.strerror}"
    if problem:
        raise UserError(f"{workdir}: {problem}; a run's --workdir is wanted")


def _rows(path: Path, notes: list[str]) -> dict[int, dict[str, float]]:
    """The numbers of each step; an evaluation's join those of the training step that it follows."""
    rows: dict[int, dict[str, float]] = {}
    unreadable = []
    lines = _bytes(path, notes).split(b"\n")
    for number, line in enumerate(lines, 1):
        record = _parsed(line)
        step = record.get("step") if isinstance(record, dict) else None
        if type(step) is int and 0 <= step < LARGEST:
            row = rows.setdefault(step, {})
            row |= {key: float(value) for key, value in record.items() if key != "step" and _is_number(value)}
        elif line.strip() and number < len(lines):  # the last one may be half written
            unreadable.append(number)
    if unreadable:
        more = f" and {len(unreadable) - 1} more" if len(unreadable) > 1 else ""
        notes.append(f"{path.name}: line {unreadable[0]}{more} could not be read and is left out")
    return rows


def _starts(path: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    if not os.path.isfile(path):
        return []
    starts = _parsed(_bytes(path, notes))
    if isinstance(starts, list) and all(isinstance(start, dict) for start in starts) and _is_shallow(starts):
        return starts
    notes.append(f"{path.name}: not a list of starts, so none are shown")
    return []


def _object(path: Path, notes: list[str]) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no such file, or, with a note, no such thing in it."""
    if not os.path.isfile(path):
        return None
    found = _parsed(_bytes(path, notes))
    if isinstance(found, dict) and _is_shallow(found):
        return found
    notes.append(f"{path.name}: not a JSON object, so it is left out")
    return None


def _bytes(path: Path, notes: list[str]) -> bytes:
    if not os.path.isfile(path):  # a run that has only begun; or a pipe, which would never end
        return b""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        notes.append(f"{path.name}: cannot be read: {error.strerror}")
        return b""


def _parsed(text: bytes) -> Any:
    """The JSON value of a text; None for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_shallow(value: Any) -> bool:
    """Whether nothing is nested so deeply that what copies or writes it would fail."""
    try:
        check_depth(value)
    except ValueError:
        return False
    return True


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and (abs(value) < LARGEST) and math.isfinite(value)
