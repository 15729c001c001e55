"""Which row of the cache pool a prompt goes to, and what it can take over from the streams kept there.

Host bookkeeping of the sampler: token ids and row numbers, no device, no requests. Every decision follows from the
prompts placed and finished so far, so that all hosts of a run decide alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

LEAST_SHARED = 8  # tokens; copying a shorter prefix saves nothing


@dataclasses.dataclass(frozen=True)
class Placement:
    """Prompt `index` goes to `row`. Its first `shared` tokens are those of row `source`: `row` itself, or one to copy
    from as soon as its own prompt is prefilled."""

    index: int
    row: int
    source: int
    shared: int


def common_prefix(prompt: np.ndarray, held: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Leading tokens that prompt i32[P] shares with each row of held i32[N, S], of which lengths i32[N] are valid."""
    size = min(len(prompt), held.shape[1])
    shared = np.zeros(len(held), np.int64)
    alive = np.arange(len(held))
    for begin in range(0, size, 256):  # most rows part early: look at the rest in pieces
        end = min(begin + 256, size)
        same = held[alive, begin:end] == prompt[begin:end]
        whole = same.all(axis=1)
        shared[alive] = np.where(whole, end, begin + same.argmin(axis=1))
        alive = alive[whole & (lengths[alive] >= end)]
        if not len(alive):
            break
    return np.minimum(shared, lengths)


class Streams:
    """The rows of the pool: the tokens each holds, and whether a slot draws from it.

    Rows and slots are dealt to `shards` equal parts; a prompt's row, source and slot lie in one part.
    """

    def __init__(self, rows: int, slots: int, shards: int, max_length: int):
        self._held = np.zeros((rows, max_length), np.int32)
        self._length = np.zeros(rows, np.int64)  # tokens held; of a row in use, those of its prompt
        self._last_used = np.zeros(rows, np.int64)
        self._in_use = np.zeros(rows, bool)
        self._source: dict[int, int] = {}  # by row whose prompt is not yet prefilled
        self._free = np.full(shards, slots // shards, np.int64)  # slots
        self._part = np.arange(rows) * shards // rows
        self._clock = 0

    def place(self, prompts: Sequence[np.ndarray]) -> list[Placement]:
        """Takes a row for every prompt (at most as many as slots are free); each now counts as holding its prompt.

        Kept streams are continued first, longest common prefixes first. A stream is given up for a prefix only when
        that is at least half of it: a shared system prompt must not cost another trajectory its cache. All others take
        the least recently used row, and copy what any stream shares with them.
        """
        continued = self._continued(prompts)
        placements = []
        for index, (row, shared) in continued.items():
            placements.append(Placement(index, row, row, shared))
            self._take(row, row, prompts[index])
        for index, prompt in enumerate(prompts):
            if index not in continued:
                placements.append(self._copied_or_new(index, prompt))
        return placements

    def begun(self, row: int) -> None:
        """The row needs its source no longer, but is not prefilled yet."""
        self._source[row] = row

    def prefilled(self, row: int) -> None:
        """The row's prompt is in the pool: what copies from it may follow, and its own source is free again."""
        self._source.pop(row, None)

    def finish(self, row: int, prompt_length: int, tokens: np.ndarray) -> None:
        """The row's slot is free; the row keeps its prompt and `tokens`."""
        end = prompt_length + len(tokens)
        self._held[row, prompt_length:end] = tokens
        self._length[row] = end
        self._clock += 1
        self._last_used[row] = self._clock
        self._in_use[row] = False
        self._free[self._part[row]] += 1

    def forget(self, row: int) -> None:
        """What the row holds is gone."""
        self._length[row] = 0

    def again(self, row: int, tokens: np.ndarray) -> Placement:
        """The row of a slot has lost what it held and is to hold these tokens: what it can take over from others.

        None that is not prefilled itself, so that no two wait for each other. `prefilled` is to be told as after
        `place`.
        """
        self._length[row] = 0
        source, shared = self._copy_source(row, tokens, waits=False)
        self._held[row, : len(tokens)] = tokens
        self._length[row] = len(tokens)
        self._source[row] = source
        return Placement(0, row, source, shared)

    def kept(self) -> list[int]:
        """Rows without a slot, least recently used first."""
        idle = np.flatnonzero(~self._in_use)
        return [int(row) for row in idle[np.argsort(self._last_used[idle], kind="stable")]]

    def part(self, row: int) -> int:
        return int(self._part[row])

    def _take(self, row: int, source: int, prompt: np.ndarray) -> None:
        self._held[row, : len(prompt)] = prompt
        self._length[row] = len(prompt)
        self._in_use[row] = True
        self._source[row] = source
        self._free[self._part[row]] -= 1

    def _idle(self) -> np.ndarray:
        """bool[rows]: neither in use nor about to be copied from."""
        idle = ~self._in_use
        idle[list(self._source.values())] = False
        return idle & (self._free[self._part] > 0)

    def _continued(self, prompts: Sequence[np.ndarray]) -> dict[int, tuple[int, int]]:
        """(row, shared tokens) by prompt index, for prompts that continue a kept stream."""
        rows = np.flatnonzero(self._idle())
        held, lengths = self._held[rows], self._length[rows]
        # The last prompt token is always prefilled: its logits draw the first token.
        shares = [np.minimum(common_prefix(prompt, held, lengths), len(prompt) - 1) for prompt in prompts]
        shared = np.array(shares, np.int64).reshape(len(prompts), len(rows))
        which, columns = np.nonzero((2 * shared >= lengths) & (shared > 0))
        order = np.lexsort((self._last_used[rows[columns]], which, -shared[which, columns]))
        chosen: dict[int, tuple[int, int]] = {}
        taken: set[int] = set()
        free = self._free.copy()
        for index, column in zip(which[order].tolist(), columns[order].tolist(), strict=True):
            row = int(rows[column])
            if index not in chosen and row not in taken and free[self._part[row]] > 0:
                chosen[index] = (row, int(shared[index, column]))
                taken.add(row)
                free[self._part[row]] -= 1
        return chosen

    def _copied_or_new(self, index: int, prompt: np.ndarray) -> Placement:
        idle = np.flatnonzero(self._idle())
        # The least recently used row, in the part with most free slots, so that the parts fill evenly.
        row = int(idle[np.lexsort((self._last_used[idle], -self._free[self._part[idle]]))[0]])
        source, shared = self._copy_source(row, prompt)
        self._take(row, source, prompt)
        return Placement(index, row, source, shared)

    def _copy_source(self, row: int, prompt: np.ndarray, waits: bool = True) -> tuple[int, int]:
        """The row, in the same part, that shares most with the prompt, and how much."""
        part = self._part[row]
        shared = np.minimum(common_prefix(prompt, self._held, self._length), len(prompt) - 1)
        unready = np.zeros(len(shared), bool)
        unready[list(self._source)] = True
        # Waiting for another's prefill must be worth it.
        usable = (self._part == part) & (
            shared >= np.where(unready, np.maximum(LEAST_SHARED, len(prompt) // 2), LEAST_SHARED)
        )
        if not waits:
            usable &= ~unready
        spare = np.count_nonzero(self._idle() & (self._part == part)) - self._free[part]
        if spare < 1:  # an idle row that waits to be copied from could be missing for a coming prompt
            usable &= self._in_use
        usable[row] = True  # what it shares itself stays where it is
        best = row if usable.sum() == 1 else int(np.argmax(np.where(usable, shared, -1)))
        return (row, int(shared[row])) if shared[best] <= shared[row] else (best, int(shared[best]))
