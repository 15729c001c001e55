"""Which row a prompt goes to: what a placement promises is in the pool, whatever came before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax.streams import LEAST_SHARED, Placement, Streams, common_prefix


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def prompt(*parts: tuple[int, int]) -> np.ndarray:
    """Tokens by (value, how many)."""
    return np.concatenate([np.full(count, value, np.int32) for value, count in parts])


class Pool:
    """What a device would hold: prefills done as late as allowed, sources read only then."""

    def __init__(self, streams: Streams, rows: int):
        self.streams = streams
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self.waiting: list[tuple[Placement, np.ndarray]] = []

    def place(self, prompts: list[np.ndarray]) -> list[Placement]:
        placements = self.streams.place(prompts)
        self.waiting += [(placement, prompts[placement.index]) for placement in placements]
        return placements

    def prefill(self, order: list[int]) -> None:
        """All that waits, those whose source does not wait first, in the given order where that leaves a choice."""
        while self.waiting:
            unready = {placement.row for placement, _ in self.waiting}
            ready = [
                (rank, item)
                for rank, item in zip(order, self.waiting, strict=False)
                if item[0].source == item[0].row or item[0].source not in unready
            ]
            assert ready, "placements wait for each other"
            placement, tokens = item = min(ready, key=lambda pair: pair[0])[1]
            taken = self.rows[placement.source][: placement.shared]
            assert taken == tokens[: placement.shared].tolist()
            self.rows[placement.row] = tokens.tolist()
            self.streams.prefilled(placement.row)
            self.waiting = [other for other in self.waiting if other is not item]

    def finish(self, row: int, prompt_length: int, drawn: list[int]) -> None:
        self.rows[row] = self.rows[row][:prompt_length] + drawn
        self.streams.finish(row, prompt_length, np.array(drawn, np.int32))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_source_holds_what_was_promised_at_any_time(data):
    """Any arrivals, ends, row counts and prefill orders; prompts from two tokens, so that they share prefixes a lot."""
    shards = data.draw(st.sampled_from([1, 2]))
    slots = shards * data.draw(st.integers(1, 4))
    rows = slots + shards * data.draw(st.integers(0, 4))
    pool = Pool(Streams(rows, slots, shards, 80), rows)
    running: dict[int, int] = {}  # prompt length by row
    kept: list[list[int]] = [[]]
    for _ in range(data.draw(st.integers(1, 8))):
        count = data.draw(st.integers(0, slots - len(running)))
        prompts = []
        for _ in range(count):
            start = data.draw(st.sampled_from(kept))
            cut = data.draw(st.integers(0, len(start)))
            added = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=15))
            prompts.append(np.array((start[:cut] + added)[:60], np.int32))
        placements = pool.place(prompts)
        assert sorted(placement.index for placement in placements) == list(range(count))
        for placement in placements:
            length = len(prompts[placement.index])
            assert placement.row not in running and 0 <= placement.shared < length
            assert placement.row * shards // rows == placement.source * shards // rows
            running[placement.row] = length
            kept.append(prompts[placement.index].tolist())
        for shard in range(shards):
            used = sum(row * shards // rows == shard for row in running)
            assert used <= slots // shards
        if data.draw(st.booleans()):
            pool.prefill(data.draw(st.permutations(range(len(pool.waiting)))))
            for row in data.draw(st.lists(st.sampled_from(sorted(running)), unique=True)) if running else []:
                drawn = data.draw(st.lists(st.integers(1, 2), max_size=8))
                pool.finish(row, running.pop(row), drawn)
                kept.append(pool.rows[row])
    pool.prefill(list(range(len(pool.waiting))))


def test_attempts_of_a_group_share_one_prefill():
    streams = Streams(8, 4, 1, 100)
    question = prompt((1, 30), (2, 5))
    first, *others = streams.place([question] * 4)
    assert (first.source, first.shared) == (first.row, 0)
    assert [(other.source, other.shared) for other in others] == [(first.row, 34)] * 3


def test_streams_are_continued_and_the_least_recently_used_dropped():
    streams = Streams(4, 2, 1, 100)
    kept = [prompt((token, 20)) for token in (1, 2, 3, 4)]
    rows = []
    for tokens in kept:
        (placement,) = streams.place([tokens])
        streams.prefilled(placement.row)
        streams.finish(placement.row, 20, ints(9, 9))
        rows.append(placement.row)
    assert sorted(rows) == [0, 1, 2, 3]
    (again,) = streams.place([np.concatenate([kept[0], ints(9, 9, 5)])])
    assert again == Placement(0, rows[0], rows[0], 22)
    streams.prefilled(again.row)
    streams.finish(again.row, 23, ints())
    (new,) = streams.place([prompt((7, 10))])
    assert new == Placement(0, rows[1], rows[1], 0)  # the oldest that is left


def test_a_short_shared_prefix_is_copied_and_its_stream_kept():
    streams = Streams(4, 2, 1, 100)
    (long,) = streams.place([prompt((1, 10), (2, 50))])
    streams.prefilled(long.row)
    streams.finish(long.row, 60, ints())
    (short,) = streams.place([prompt((1, 10), (3, 5))])
    assert short.row != long.row and (short.source, short.shared) == (long.row, 10)
    (kept,) = streams.place([prompt((1, 10), (2, 50), (4, 1))])
    assert kept == Placement(0, long.row, long.row, 60) or kept.shared == 60


def test_what_waits_is_copied_only_for_half_a_prompt():
    streams = Streams(8, 4, 1, 100)
    first, second = streams.place([prompt((1, 20), (2, 30)), prompt((1, 20), (3, 30))])
    assert (first.shared, second.shared) == (0, 0)
    streams.prefilled(first.row), streams.prefilled(second.row)
    (third,) = streams.place([prompt((1, 20), (4, 30))])
    assert third.shared == 20
    (fourth,) = streams.place([prompt((5, LEAST_SHARED - 1), (1, 3))])
    assert fourth.shared == 0


def test_parts_fill_evenly():
    streams = Streams(8, 8, 4, 100)
    placements = streams.place([prompt((token, 10)) for token in range(1, 5)])
    assert sorted(streams.part(placement.row) for placement in placements) == [0, 1, 2, 3]


@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=20),
    st.lists(st.lists(st.integers(0, 1), min_size=12, max_size=12), min_size=1, max_size=5),
    st.integers(0, 12),
)
def test_common_prefix_equals_brute_force(tokens, held, length):
    def brute(row: list[int]) -> int:
        pairs = zip(tokens, row[:length], strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), length))

    got = common_prefix(np.array(tokens), np.array(held), np.full(len(held), length))
    assert got.tolist() == [brute(row) for row in held]


def test_common_prefix_over_several_pieces():
    held = np.zeros((4, 1000), np.int32)
    held[1, 255], held[2, 256], held[3, 999] = 1, 1, 1
    full = np.full(4, 1000)
    assert common_prefix(np.zeros(1000, np.int32), held, full).tolist() == [1000, 255, 256, 999]
    assert common_prefix(np.zeros(300, np.int32), held, np.array([1000, 100, 299, 0])).tolist() == [300, 100, 256, 0]


@pytest.mark.parametrize("count", [1, 3])
def test_a_full_pool_without_spare_rows_still_serves(count):
    """As many rows as slots: every prompt finds a row, and nothing is copied from a row that could be taken."""
    streams = Streams(3, 3, 1, 100)
    for round_ in range(4):
        placements = streams.place([prompt((1, 20), (round_ + 2, 10 + i)) for i in range(count)])
        assert len({placement.row for placement in placements}) == count
        for placement in placements:
            streams.prefilled(placement.row)
            streams.finish(placement.row, 30, ints())
