"""Tasks from files or a hub, what was wrong with those that are left out, and the order in which a run sees them.

    JSON lines, JSON lists, Parquet; a path, a folder, a pattern, or the id of a data set on a hub

What a record means is `records.py`'s business. Knows nothing of tokens, policies or environments. Records are read one
by one and their tasks are kept on disk (`task_store.py`), so that a source may be larger than memory; only a `.json`
list is read whole.
`python -m envace_jax.data --path=...` prints what a data set holds (`data_profile.py`).
"""

from __future__ import annotations

import codecs
import collections
import dataclasses
import glob
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from envace_jax import json_values
from envace_jax.records import record_from_task, task_from_record
from envace_jax.task_store import StoredTasks, TaskWriter
from envace_jax.types import Json, Task

SUFFIXES = (".jsonl", ".json", ".parquet")
SHOWN_REASONS = 5  # where a data set is refused
MOST_BAD = 0.05  # share of bad records beyond which a data set is refused, skipped or not
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
KEPT_WHOLE = ("environment", "check")  # members whose nulls mean something

OnBad = Literal["skip", "stop"]
Entry = tuple[str, Json | ValueError]  # where a record stands, and the record or why it cannot be read


@dataclasses.dataclass(frozen=True)
class BadRecord:
    where: str  # "FILE, line 3" or "FILE, record 3"
    reason: str
    index: int = 0  # of the record in the whole source, from 0

    @property
    def kind(self) -> str:
        """The kind of its reason: numbers and quoted names do not tell reasons apart."""
        return re.sub(r"'[^']*'", "'..'", re.sub(r"\d+", "N", self.reason))


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The tasks of a data set, in its order, and the records that are none."""

    tasks: StoredTasks
    bad: tuple[BadRecord, ...]

    def reasons(self) -> list[tuple[str, list[BadRecord]]]:
        """The bad records by the kind of their reason, the most frequent kind first."""
        kinds: dict[str, list[BadRecord]] = collections.defaultdict(list)
        for record in self.bad:
            kinds[record.kind].append(record)
        return sorted(kinds.items(), key=lambda entry: -len(entry[1]))


class TaskStream:
    """An endless, seeded order of tasks in batches.

    Epoch after epoch all tasks in a new order; a batch may span two epochs, so none is short and none is lost.
    `batch_at(step)` depends on nothing but the tasks, the seed and the step: the data cursor of a run is its step.
    """

    def __init__(self, tasks: Sequence[Task], batch_size: int, seed: int):
        if not 1 <= batch_size <= len(tasks):
            raise ValueError(f"batch_size must be from 1 to the number of tasks, {len(tasks)}, not {batch_size}")
        self.tasks = tasks
        self.batch_size = batch_size
        self.seed = seed

    def batch_at(self, step: int) -> list[Task]:
        """The `batch_size` tasks of a step (0, 1, 2, ...)."""
        if step < 0:
            raise ValueError(f"a step is at least 0, not {step}")
        return list(itertools.islice(self.tasks_from(step * self.batch_size), self.batch_size))

    def tasks_from(self, position: int) -> Iterator[Task]:
        """The tasks after the first `position` ones, without end."""
        first, place = divmod(position, len(self.tasks))
        for epoch in itertools.count(first):
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self.tasks))
            yield from (self.tasks[number] for number in order[place:])
            place = 0


def read_tasks(source: str | os.PathLike[str], variant: int = 0, on_bad: OnBad = "stop") -> list[Task]:
    """The tasks of `read_corpus`."""
    return list(read_corpus(source, variant, on_bad).tasks)


def read_corpus(
    source: str | os.PathLike[str], variant: int = 0, on_bad: OnBad = "stop", most_bad: float = MOST_BAD
) -> Corpus:
    """Reads all records of a source (`read_entries`), each with its checklist number `variant`.

    on_bad "stop" raises ValueError for the first bad record, naming where it stands and the reason. "skip" leaves bad
    records out and keeps their reasons, up to a share of `most_bad`; beyond it ValueError says how many there are and
    why. A task id that is taken makes a record bad. Raises FileNotFoundError or ValueError where there is nothing to
    read.
    """
    tasks, taken = TaskWriter(), set[str]()
    bad: list[BadRecord] = []
    for number, (where, record) in enumerate(read_entries(source)):
        try:
            if isinstance(record, ValueError):
                raise record
            task = task_from_record(record, number, variant)
            if task.task_id in taken:
                raise ValueError(f"record {number}: the task id {task.task_id[:80]!r} is already taken")
        except ValueError as error:
            if on_bad == "stop":
                raise ValueError(f"{where}: {error}") from None
            bad.append(BadRecord(where, str(error).removeprefix(f"record {number}: "), number))
            continue
        taken.add(task.task_id)
        tasks.add(task)
    total = len(tasks) + len(bad)
    if not total:
        raise ValueError(f"{source}: no records")
    corpus = Corpus(tasks.finish(), tuple(bad))
    if len(bad) > most_bad * total:
        raise ValueError(f"{source}: {too_many_bad(corpus, most_bad)}")
    return corpus


def too_many_bad(corpus: Corpus, most_bad: float) -> str:
    """One line: how many records are bad, their share, and the most frequent reasons with a record of each."""
    reasons, total = corpus.reasons(), len(corpus.tasks) + len(corpus.bad)
    shown = [f"{len(found)} x {found[0].reason} ({found[0].where})" for _, found in reasons[:SHOWN_REASONS]]
    more = f"; and {len(reasons) - len(shown)} more reasons" * (len(reasons) > len(shown))
    bad = len(corpus.bad)
    return f"{bad} of {total} records ({bad / total:.1%}) are bad, more than {most_bad:.0%}: {'; '.join(shown)}{more}"


def check_disjoint(trained: Sequence[Task], evaluated: Sequence[Task], names: str) -> None:
    """Raises ValueError where a task is both trained on and evaluated. `names` says which sources they are."""
    ids = {task.task_id for task in evaluated}
    if both := sorted({task.task_id for task in trained if task.task_id in ids} if ids else ()):
        raise ValueError(f"{names}: {len(both)} tasks are both trained on and evaluated, among them {both[0]!r}")


# --- records of a source ---


def read_entries(source: str | os.PathLike[str]) -> Iterator[Entry]:
    """The records of a file, a folder's files, the files of a pattern (`data/*.parquet`), or a data set on a hub
    (`owner/name` or `owner/name:split`, the split being train if none is named), one after another as they are read.

    Raises FileNotFoundError where there is no such thing, ValueError for a file of another kind or that is broken.
    """
    text = os.fspath(source)
    if Path(text).is_file():
        files = [Path(text)]
    elif Path(text).is_dir():
        files = sorted(path for path in Path(text).iterdir() if path.suffix in SUFFIXES)
    else:
        files = sorted(map(Path, glob.glob(text, recursive=True)))
    if files:
        for path in files:
            yield from _entries_of_file(path)
    elif HUB_ID.fullmatch(text) and not Path(text).exists() and not text.endswith(SUFFIXES):
        yield from _entries_of_hub(text)
    else:
        raise FileNotFoundError(
            f"there is no task file {text}; expected a file, folder or pattern of {', '.join(SUFFIXES)}, or the id of "
            "a data set on a hub (owner/name:split)"
        )


def _entries_of_file(path: Path) -> Iterator[Entry]:
    if path.suffix == ".parquet":
        yield from _entries_of_parquet(path)
    elif path.suffix == ".json" and _is_list(path):
        try:
            records = json_values.parse(_decoded(path.read_bytes().removeprefix(codecs.BOM_UTF8)))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        yield from ((f"{path}, record {number}", record) for number, record in enumerate(records))
    else:
        yield from _entries_of_lines(path)


def _is_list(path: Path) -> bool:
    """Whether the file is one JSON list; a file of this name may hold JSON lines too."""
    with path.open("rb") as file:
        return file.read(256).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _entries_of_lines(path: Path) -> Iterator[Entry]:
    """One record a line, UTF-8 with or without a byte order mark; empty lines are passed over."""
    with path.open("rb") as lines:  # bytes, so that text in another encoding is an error of its line
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)  # some editors put it there
            if not line.strip():
                continue
            try:
                yield f"{path}, line {number}", json_values.parse(_decoded(line))
            except ValueError as error:
                yield f"{path}, line {number}", error


def _entries_of_parquet(path: Path) -> Iterator[Entry]:
    import datasets  # seconds to import: only where it is needed

    try:
        rows = datasets.load_dataset("parquet", data_files=[str(path)], split="train", streaming=True)
        for number, row in enumerate(rows):
            yield f"{path}, record {number}", without_nulls(row)
    except Exception as error:  # of whatever library reads the file
        raise ValueError(f"{path} cannot be read as Parquet: {_first_line(error)}") from None


def _entries_of_hub(name: str) -> Iterator[Entry]:
    import datasets

    repository, _, split = name.partition(":")
    try:
        rows = datasets.load_dataset(repository, split=split or "train", streaming=True)
        for number, row in enumerate(rows):
            yield f"{name}, record {number}", without_nulls(row)
    except Exception as error:
        raise ValueError(f"{name} cannot be read from the hub: {_first_line(error)}") from None


def without_nulls(value: Json) -> Json:
    """A row without its null members: a table has a column for a member that any of its rows has."""
    if isinstance(value, dict):
        return {
            name: member if name in KEPT_WHOLE else without_nulls(member)
            for name, member in value.items()
            if member is not None
        }
    return [without_nulls(member) for member in value] if isinstance(value, list) else value


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{line[error.start]:02x} at place {error.start}"
        raise ValueError(f"not UTF-8 text ({found}); save the file as UTF-8") from None


def write_tasks(path: str | os.PathLike[str], tasks: Iterable[Task]) -> None:
    """Writes tasks as JSON lines, whole or not at all: the file appears under its name when it is complete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for index, task in enumerate(tasks):
                file.write(json.dumps(record_from_task(task, index), ensure_ascii=False, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


if __name__ == "__main__":
    from envace_jax import data_profile, stopping

    stopping.end_with_reader()
    raise SystemExit(data_profile.main(sys.argv[1:]))
