"""The one place that knows padded shapes: prefill lengths and rows, cache lengths, training rows.

Every jitted function of the library sees only sizes listed here, so the number of compilations is bounded by the
number of buckets. Knows sizes only: nothing of tokens, slots or parameters.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

LONG_ROW = 2048  # tokens from which a training row is padded to a multiple of the next
ROW_BLOCK = 512


def pick(size: int, sizes: Sequence[int], what: str = "size") -> int:
    """The smallest bucket that holds `size`. Raises ValueError beyond the largest."""
    for bucket in sizes:
        if size <= bucket:
            return bucket
    raise ValueError(f"{what} {size} exceeds the largest bucket {sizes[-1]} (buckets: {list(sizes)})")


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Padded sizes of the sampler, each ascending.

    prefill_lengths: tokens a row may add in one prefill call; a longer rest is prefilled in pieces of the largest.
    prefill_rows: rows of one prefill call (per slot shard of the mesh).
    cache_lengths: positions of the working set; it follows the longest sequence that is being decoded. The pool of kept
        caches has the last of them.
    """

    prefill_lengths: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    cache_lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            sizes = getattr(self, field.name)
            if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"Buckets.{field.name} must be ascending positive sizes, got {list(sizes)}")

    def prefill_shapes(self, cache_length: int) -> tuple[tuple[int, int], ...]:
        """(rows, tokens) of every prefill call that can come to a working set of `cache_length` positions."""
        # What is prefilled fits into the working set, so no length beyond the first that holds all of it is picked.
        below = [length for length in self.prefill_lengths if length < cache_length]
        return tuple(itertools.product(self.prefill_rows, self.prefill_lengths[: len(below) + 1]))

    def compile_bound(self) -> int:
        """The most programs a sampler with these buckets may compile."""
        caches = len(self.cache_lengths)
        prefills = sum(len(self.prefill_shapes(length)) for length in self.cache_lengths)
        loads = caches if caches > 1 else 0  # the only length is never left for another
        return prefills + 2 * caches + loads  # decode and fresh state for each length


def row_tokens(length: int) -> int:
    """Tokens of a training row for `batch.row_length`: long rows go to a multiple of `ROW_BLOCK`.

    So the blocks of attention kernels are full, and a mesh's `tensor` axis divides the positions between layers. A
    function of the setting alone, so that rows hold the same on every platform.
    """
    return length if length < LONG_ROW else -(-length // ROW_BLOCK) * ROW_BLOCK


def row_shapes(multiple: int, buckets: Sequence[int]) -> tuple[int, ...]:
    """Rows of the batches that `buckets` (ascending) ask for: each rounded up to a multiple of `multiple`."""
    return tuple(dict.fromkeys(-(-bucket // multiple) * multiple for bucket in buckets))


def train_rows(rows: int, multiple: int, buckets: Sequence[int] = ()) -> int:
    """Rows that a training batch is padded to: the smallest of `row_shapes(multiple, buckets)` that holds them.

    More rows than those hold, and all where there are none, go to a multiple of `multiple` from a list that grows by
    about a quarter: multiple x (1, 2, ..., 8, 10, 12, 14, 16, 20, ...). At most four of its shapes per doubling are
    compiled, and padding beyond the multiple adds less than a quarter of the rows.

    `multiple` is micro-batches x row shards.
    """
    if rows < 0 or multiple < 1:
        raise ValueError(f"train_rows needs rows >= 0 and multiple >= 1, got {rows} and {multiple}")
    for shape in row_shapes(multiple, buckets):
        if rows <= shape:
            return shape
    units = max(1, -(-rows // multiple))
    step = 1
    while units > 8 * step:
        step *= 2
    return -(-units // step) * step * multiple
