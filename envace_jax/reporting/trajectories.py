"""The trajectories of a work folder as data for the viewer, chosen so that they fit a page.

Dumps of whole steps (`dumps.py`) take the place of the samples in trajectories.jsonl where a step has one. Knows files
and sizes; what is kept of a trajectory is in `compact.py`, how it is shown in viewer.js.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from envace_jax.metrics import TRAJECTORIES_FILE, json_line
from envace_jax.reporting.compact import UNREADABLE, Compact, Tables, compact
from envace_jax.types import Json

FORMAT = 1  # of what `viewer_data` gives; viewer.js says so where it is another
ONE_STEP = 0.25  # of the space: what a step may take before others have had theirs
SPARE = 2048  # bytes for what stands around the trajectories
MISSES = 40  # so many groups in a row that do not fit: the space is used up
MOST_NOTES = 10
LARGEST_STEP = 2**53  # up to which a browser counts
LEVEL = 6  # of gzip
_STEP = re.compile(rb'\s*\{\s*"step"\s*:\s*(\d+)\s*[,}]')

Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Step:
    """Where a step's trajectories lie. `count` is None where only reading them tells how many they are."""

    count: int | None
    read: Callable[[], list[Record]]


def viewer_data(workdir: Path, most_bytes: int) -> dict[str, Json]:
    """The trajectories of a run's folder as JSON values, at most `most_bytes` after gzip and base64.

    Where not all fit, whole groups are left out: the newest and the oldest steps come first, by turns, and within a
    step the groups with a failed trajectory, then those with one that was not trained. "left_out" counts the others and
    says so in a sentence; "notes" has one line for each thing that could not be read. A folder without trajectories
    gives none. "columns" has a list for each entry of `Compact.row` and "bodies" the bodies, in the order of steps.
    """
    notes: list[str] = []
    steps = _steps(Path(workdir), notes)
    room = _Room(most_bytes - SPARE, notes)
    chosen, unread = _choose(steps, room)
    lost = sum(steps[step].count or 0 for step in unread)
    unknown = [step for step in unread if steps[step].count is None]
    while True:
        kept = sorted((one for group in chosen for one in group), key=_place)
        data = {
            "format": FORMAT,
            "tasks": room.tables.tasks,
            "messages": room.tables.messages,
            "columns": {name: [one.row[name] for one in kept] for name in (kept[0].row if kept else ())},
            "bodies": [one.body for one in kept],
            "notes": notes,
            "left_out": _left_out(room.seen - len(kept) + lost, unknown, most_bytes),
        }
        if not chosen or packed_size(data) <= most_bytes:
            return data
        del chosen[-max(1, len(chosen) // 20) :]  # what was added up on the way is nearly, not quite, the whole's size


def packed_size(data: Json) -> int:
    """Bytes of a value as JSON, in ASCII, after gzip and base64."""
    return -(-len(gzip.compress(_ascii(data), LEVEL)) // 3) * 4


def _ascii(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class _Room:
    """The space that is left, by what each group adds to a compressed stream of those before it."""

    def __init__(self, size: int, notes: list[str]) -> None:
        self.tables = Tables()
        self.seen = 0  # trajectories that were read
        self._notes = notes
        self.left = size
        self._misses = 0
        self._stream = zlib.compressobj(LEVEL)

    @property
    def full(self) -> bool:
        return self._misses >= MISSES

    def take(self, records: list[Record], most: float) -> list[Compact] | None:
        """The group, if it takes no more than `most` bytes and those that are left. Unreadable records are removed."""
        before = self.tables.sizes()
        group = [one for record in list(records) if (one := self._compact(record, records)) is not None]
        added = [self.tables.tasks[before[0] :], self.tables.messages[before[1] :]]
        stream = self._stream.copy()
        written = stream.compress(_ascii([added, [[list(one.row.values()), one.body] for one in group]]))
        needed = (len(written) + len(stream.flush(zlib.Z_SYNC_FLUSH))) * 4 // 3 + 1
        if needed > min(self.left, most):
            self.tables.cut(before)
            self._misses += needed > self.left
            return None
        self._stream, self._misses = stream, 0
        self.left -= needed
        return group

    def _compact(self, record: Record, records: list[Record]) -> Compact | None:
        try:
            return compact(record, self.tables)
        except UNREADABLE as error:
            _note(self._notes, f"step {record['step']}: a trajectory was left out, {_why(error)}")
            records.remove(record)
            self.seen -= 1
            return None


def _choose(steps: Mapping[int, Step], room: _Room) -> tuple[list[list[Compact]], list[int]]:
    """The groups that are shown, the first choice first, and the steps that were not even read."""
    chosen: list[list[Compact]] = []
    later: list[list[Record]] = []
    unread = []
    share = room.left * max(ONE_STEP, 1 / max(len(steps), 1))
    for step in _by_turns(sorted(steps)):
        if room.full:
            unread.append(step)
            continue
        start = room.left
        read = steps[step].read()
        room.seen += len(read)
        for records in _groups(read):
            taken = room.take(records, share - (start - room.left))
            if taken is None:
                later.append(records)
            else:
                chosen.append(taken)
    for records in later:
        taken = None if room.full else room.take(records, room.left)
        if taken is not None:
            chosen.append(taken)
    return chosen, unread


def _by_turns(steps: Sequence[int]) -> Iterator[int]:
    """The last, the first, the last but one, the second, ..."""
    first, last = 0, len(steps) - 1
    while first <= last:
        yield steps[last]
        if first < last:
            yield steps[first]
        first, last = first + 1, last - 1


def _groups(records: Sequence[Record]) -> list[list[Record]]:
    """The records of a step by group, those that say most of what went wrong first."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        group = record.get("group_id")
        name = f"task {record.get('task_id')}" if group is None else f"group {group}"
        groups.setdefault(name, []).append(record)

    def sound(group: Sequence[Record]) -> tuple[bool, bool]:
        try:
            untrained = any(part.get("trained") is False for record in group for part in record["segments"])
            return all(record["status"] == "ok" for record in group), not untrained
        except UNREADABLE:  # which `take` will say
            return False, False

    return sorted(groups.values(), key=sound)


def _steps(workdir: Path, notes: list[str]) -> dict[int, Step]:
    """The steps that the folder has trajectories of: whole dumped ones, and samples of the others."""
    steps = _sampled(workdir / TRAJECTORIES_FILE, notes)
    from envace_jax import dumps  # brings jax, which takes a second to import

    def read(step: int) -> list[Record]:
        try:
            records = dumps.records(dumps.file_of(workdir, step))
        except ValueError as error:  # UserError, one line
            _note(notes, str(error))
            return steps[step].read() if step in steps else []
        return [json.loads(json_line(record)) for record in records]  # numpy's values become Python's

    return steps | {step: Step(None, functools.partial(read, step)) for step in dumps.steps(workdir)}


def _sampled(path: Path, notes: list[str]) -> dict[int, Step]:
    """The steps of a JSONL file. It may be larger than what is shown of it, so only the places of lines are kept."""
    places: dict[int, list[tuple[int, int]]] = {}
    if not os.path.isfile(path):
        return {}
    try:
        file = open(path, "rb")
    except OSError as error:
        _note(notes, f"{path.name}: cannot be read: {error.strerror}")
        return {}
    with file:
        start = 0
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):  # else it was cut off by a kill
                step = _step_of(line)
                if step is None:
                    _note(notes, f"{path.name}, line {number}: left out, not a trajectory of this program")
                else:
                    places.setdefault(step, []).append((start, len(line)))
            start += len(line)
    return {step: Step(len(found), functools.partial(_lines, path, found, notes)) for step, found in places.items()}


def _lines(path: Path, places: Sequence[tuple[int, int]], notes: list[str]) -> list[Record]:
    records: list[Record] = []
    try:
        file = open(path, "rb")
    except OSError as error:  # it was there a moment ago
        _note(notes, f"{path.name}: cannot be read: {error.strerror}")
        return records
    with file:
        for start, length in places:
            file.seek(start)
            try:
                records.append(json.loads(file.read(length)))
            except (ValueError, RecursionError) as error:
                _note(notes, f"{path.name}, byte {start}: a trajectory was left out, {_why(error)}")
    return records


def _step_of(line: bytes) -> int | None:
    found = _STEP.match(line)  # as this program writes it
    try:
        step = int(found.group(1)) if found else json.loads(line)["step"]
    except UNREADABLE:
        return None
    return step if type(step) is int and 0 <= step <= LARGEST_STEP else None


def _place(one: Compact) -> tuple[int, int, int]:
    group = one.row["group"]
    return one.row["step"], one.row["task"] if group is None else group, one.row["attempt"]


def _left_out(count: int, unknown: Sequence[int], most_bytes: int) -> dict[str, Json]:
    what = [f"{count:,} trajectories"] if count else []
    what += [f"all of {len(unknown):,} dumped steps"] if unknown else []
    text = f"Left out, to stay within {most_bytes / 1e6:.1f} MB: {' and '.join(what)}." if what else ""
    return {"trajectories": count, "steps": len(unknown), "text": text}


def _note(notes: list[str], line: str) -> None:
    if len(notes) < MOST_NOTES:
        notes.append(line)
    elif len(notes) == MOST_NOTES:
        notes.append("More could not be read; only the first are named.")


def _why(error: BaseException) -> str:
    return f"no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"[:200]
