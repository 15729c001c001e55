"""Which pages of the key-value cache hold the tokens of which stream, and which are free.

Host bookkeeping in plain integers: no device, no tokens, no requests. Rows and pages are dealt to equal parts, one for
each shard of the slots; a row's pages lie in its part and are numbered within it. Rows share pages whose positions
agree: a page is written by a row only where that row alone has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

NOWHERE = -1


@dataclasses.dataclass
class _Row:
    pages: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0  # positions that its pages hold
    copied: int = NOWHERE  # a page of another row whose beginning its next page is to get; held until that is done


class Pages:
    """The pages of every row, and how many rows have each."""

    def __init__(self, rows: int, pages: int, parts: int, page_size: int):
        self.page_size = page_size
        self._part = [row * parts // rows for row in range(rows)]
        self._rows = [_Row() for _ in range(rows)]
        self._users = np.zeros((parts, pages // parts), np.int64)
        # The lowest number is given first, so that what is given depends on the history alone.
        self._free = [list(range(pages // parts - 1, -1, -1)) for _ in range(parts)]

    def cached(self, row: int) -> int:
        return self._rows[row].cached

    def free(self, part: int) -> int:
        return len(self._free[part])

    def alone(self, row: int) -> bool:
        """Whether any page would be free without the row."""
        held, users = self._rows[row], self._users[self._part[row]]
        return any(users[page] == 1 for page in [*held.pages, *([held.copied] if held.copied >= 0 else [])])

    def distinct(self, rows: Iterable[int]) -> int:
        """Pages that rows of one part have between them."""
        held = [self._rows[row] for row in rows]
        return len({page for row in held for page in [*row.pages, row.copied] if page >= 0})

    def begin(self, row: int, source: int, shared: int) -> int:
        """The row is to begin with the first `shared` positions of `source` (of the same part, perhaps the row itself).

        It shares the whole pages among them. One that is needed in part stays the row's where that alone has it; else
        `head` names it, to be copied from. Returns how many positions there are: fewer than asked for where the source
        has lost its pages since.
        """
        mine, theirs, part = self._rows[row], self._rows[source], self._part[row]
        assert self._part[source] == part, "rows of two parts"
        shared = min(shared, theirs.cached)
        whole, rest = divmod(shared, self.page_size)
        kept = theirs.pages[:whole]
        copied = theirs.pages[whole] if rest else NOWHERE
        in_place = source == row and rest > 0 and self._users[part, copied] == 1
        if in_place:
            kept, copied = [*kept, copied], NOWHERE
        for page in [*kept, *([copied] if copied >= 0 else [])]:
            self._users[part, page] += 1
        self.drop(row)
        mine.pages, mine.copied, mine.cached = kept, copied, shared
        return shared

    def missing(self, row: int, positions: int) -> int:
        """Pages that the row has still to be given to hold so many positions."""
        return max(0, -(-positions // self.page_size) - len(self._rows[row].pages))

    def reserve(self, row: int, positions: int) -> bool:
        """Gives the row free pages to hold so many positions; nothing is given, and False returned, if too few are."""
        free, part = self._free[self._part[row]], self._part[row]
        count = self.missing(row, positions)
        if count > len(free):
            return False
        for _ in range(count):
            page = free.pop()
            self._users[part, page] = 1
            self._rows[row].pages.append(page)
        return True

    def head(self, row: int) -> int:
        """The page that holds the beginning of the first page that the row writes next; NOWHERE where it has none."""
        held = self._rows[row]
        if held.copied >= 0:
            return held.copied
        index = held.cached // self.page_size
        return held.pages[index] if index < len(held.pages) else NOWHERE

    def written(self, row: int, cached: int) -> None:
        """The row's pages hold `cached` positions now, and whatever was to be copied is."""
        held = self._rows[row]
        held.cached = cached
        if held.copied >= 0:
            self._release(self._part[row], [held.copied])
            held.copied = NOWHERE

    def drop(self, row: int) -> None:
        """Takes the row's pages away."""
        held = self._rows[row]
        self._release(self._part[row], [*held.pages, *([held.copied] if held.copied >= 0 else [])])
        held.pages, held.cached, held.copied = [], 0, NOWHERE

    def numbers(self, row: int, width: int) -> np.ndarray:
        """i32[width], the row's pages in order and NOWHERE behind them."""
        out = np.full(width, NOWHERE, np.int32)
        pages = self._rows[row].pages
        out[: len(pages)] = pages
        return out

    def _release(self, part: int, pages: list[int]) -> None:
        for page in pages:
            self._users[part, page] -= 1
            if self._users[part, page] == 0:
                self._free[part].append(page)
