"""Short hashes of what a run reads, by which a resumed run knows that it reads the same.

Cheap on purpose: of large weights only the beginning and samples are read. It guards against a changed file, not
against somebody who means to fool it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envace_jax.models.hf import INDEX_FILE, TOKENIZER_FILES
from envace_jax.types import Task

SMALL_FILES = (
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    INDEX_FILE,
    *TOKENIZER_FILES,
)  # hashed whole
BEGINNING = 1 << 20  # bytes; the header of a safetensors file is there
SAMPLES, SAMPLE = 64, 1 << 12  # pieces of the rest, and bytes in each


def of_tasks(tasks: Sequence[Task]) -> str:
    """A hash of everything in the tasks, and of their order, which decides the batches."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(json.dumps(task, default=_members, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def _members(value: Any) -> dict[str, Any]:
    """Those that say what a task is. A note is none of them: no task that is trained on has one."""
    return {name: member for name, member in vars(value).items() if name not in ("note", "note_place")}


def of_file(path: Path) -> str:
    """A hash of a whole file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def of_model(folder: Path) -> dict[str, str]:
    """File name -> hash, for the files of a model folder that a run reads."""
    files = [folder / name for name in SMALL_FILES if (folder / name).is_file()]
    hashes = {path.name: of_file(path) for path in files}
    return hashes | {path.name: _of_weights(path) for path in sorted(folder.glob("*.safetensors"))}


def _of_weights(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(BEGINNING))
        for number in range(SAMPLES):
            file.seek(size * number // SAMPLES)
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:16]
