"""Tasks in a temporary file instead of memory: a sequence whose tasks are read back when they are asked for.

What it costs in memory is 16 bytes a task, and the tasks' ids once they are asked for. The file has no name, so nothing
is left behind, however the process ends.
Knows nothing of records, sources or batches.
"""

from __future__ import annotations

import array
import functools
import os
import pickle
import tempfile
import zlib
from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from envace_jax.types import Task


class TaskWriter:
    """Takes tasks one after another. Raises ValueError where the folder for temporary files is full."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="envace_tasks_")
        self._ends = array.array("q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, task: Task) -> None:
        data = zlib.compress(pickle.dumps(task, protocol=pickle.HIGHEST_PROTOCOL), 1)
        try:
            self._file.write(data)
        except OSError as error:
            raise ValueError(self._refusal(error)) from error
        self._ends.append(self._ends[-1] + len(data))

    def finish(self) -> StoredTasks:
        """All tasks, in the order in which they came."""
        try:
            self._file.flush()
        except OSError as error:
            raise ValueError(self._refusal(error)) from error
        ends = np.array(self._ends, np.int64)
        return StoredTasks(self._file, ends[:-1], ends[1:])

    def _refusal(self, error: OSError) -> str:
        folder = tempfile.gettempdir()
        return f"the tasks cannot be kept in {folder} ({error.strerror}); set TMPDIR to a folder with more room"


class StoredTasks(Sequence[Task]):
    """Tasks of a `TaskWriter`. A slice, or `chosen`, is another such sequence on the same file."""

    def __init__(self, file: Any, starts: np.ndarray, ends: np.ndarray):  # starts and ends i64[tasks], in bytes
        self._file, self._starts, self._ends = file, starts, ends

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, place: int) -> Task: ...

    @overload
    def __getitem__(self, place: slice) -> StoredTasks: ...

    def __getitem__(self, place: int | slice) -> Task | StoredTasks:
        if isinstance(place, slice):
            return StoredTasks(self._file, self._starts[place], self._ends[place])
        start, end = int(self._starts[place]), int(self._ends[place])
        # At a place of its own, not from a cursor: two threads may read at once.
        return pickle.loads(zlib.decompress(os.pread(self._file.fileno(), end - start, start)))

    @functools.cached_property
    def ids(self) -> tuple[str, ...]:
        """The tasks' ids, in order; read once, for what looks at all tasks in every step."""
        return tuple(task.task_id for task in self)

    def chosen(self, places: Sequence[int]) -> StoredTasks:
        """The tasks at these places, in that order."""
        picked = np.asarray(places, np.int64)
        return StoredTasks(self._file, self._starts[picked], self._ends[picked])
