"""Reading and writing safetensors files one tensor, or one slice of a tensor, at a time.

The format is a JSON header and raw bytes, so a memory map gives slices without reading the rest, and a writer needs one
tensor in memory. Knows files, names, shapes and dtypes; knows no model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
HEADER_LIMIT = 100_000_000  # bytes, the limit of the reference implementation


class TensorFile:
    """One open safetensors file. `shapes` maps each tensor's name to its shape.

    Raises ValueError naming the file (and the tensor, where one is at fault) when the file is truncated or malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header, self._start = _read_header(path)
        size = path.stat().st_size - self._start
        self._entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            try:
                kind, shape, begin, end = _read_entry(entry)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: tensor {name}: malformed header entry {entry!r}") from error
            if end > size:
                raise ValueError(
                    f"{path}: truncated at tensor {name}: it ends at byte {self._start + end}, the file has "
                    f"{self._start + size} bytes; copy the file again"
                )
            if kind in DTYPES and end - begin != math.prod(shape) * DTYPES[kind].itemsize:
                raise ValueError(f"{path}: tensor {name}: {end - begin} bytes do not fit {kind} of shape {list(shape)}")
            self._entries[name] = (kind, shape, begin)
        self.shapes: Mapping[str, tuple[int, ...]] = {name: entry[1] for name, entry in self._entries.items()}

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A read-only view of the tensor, or of a slice of it; bytes are read when it is copied."""
        kind, shape, begin = self._entries[name]
        if kind not in DTYPES:
            raise ValueError(f"{self.path}: tensor {name} has dtype {kind}; accepted are {', '.join(DTYPES)}")
        if math.prod(shape) == 0:
            return np.empty(shape, DTYPES[kind])[index]
        return np.memmap(self.path, DTYPES[kind], "r", self._start + begin, shape)[index]


def _read_entry(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Dtype, shape, and where the bytes begin and end after the header. Raises what unpacking raises, or ValueError."""
    kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    # A negative offset would take bytes of the header for weights; a float or a boolean is no place at all.
    sizes_are_counts = all(type(size) is int and size >= 0 for size in (*shape, begin, end))
    if not isinstance(kind, str) or not isinstance(shape, list) or not sizes_are_counts or begin > end:
        raise ValueError
    return kind, tuple(shape), begin, end


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > HEADER_LIMIT:
            raise ValueError(f"{path}: not a safetensors file (no valid header length in its first 8 bytes)")
        text = file.read(length)
    if len(text) < length:
        raise ValueError(f"{path}: truncated inside its header ({len(text)} of {length} bytes); copy it again")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a safetensors file (its header is no JSON)") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: not a safetensors file (its header is no JSON object)")
    return header, 8 + length


def write(
    path: Path, plan: Sequence[tuple[str, tuple[int, ...]]], dtype: np.dtype, tensors: Iterable[np.ndarray]
) -> None:
    """Writes `tensors`, which come one at a time in the order of `plan` (name, shape), all of one dtype."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    end = 0
    for name, shape in plan:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for (name, shape), tensor in zip(plan, tensors, strict=True):
            if tensor.shape != shape or tensor.dtype != dtype:
                got, planned = f"{tensor.dtype}{list(tensor.shape)}", f"{dtype}{list(shape)}"
                raise ValueError(f"{path}: tensor {name}: got {got}, planned {planned}")
            file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
