"""Padded shapes: picked by size, bounded in number, and never smaller than what they hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envace_jax.buckets import Buckets, pick, row_shapes, row_tokens, train_rows


def test_pick_takes_the_smallest_that_holds():
    assert [pick(n, (4, 16, 64)) for n in (0, 1, 4, 5, 16, 17, 64)] == [4, 4, 4, 16, 16, 64, 64]
    with pytest.raises(ValueError, match=r"prompt 65 exceeds the largest bucket 64 \(buckets: \[4, 16, 64\]\)"):
        pick(65, (4, 16, 64), "prompt")


@pytest.mark.parametrize("sizes", [(), (0, 4), (8, 4), (4, 4)])
def test_buckets_must_ascend(sizes):
    with pytest.raises(ValueError, match="Buckets.prefill_rows must be ascending positive sizes"):
        Buckets((32,), sizes, (64,))


def test_compile_bound_worked_by_hand():
    # 2 lengths x 2 rows x 3 caches = 12 prefills; 3 decodes, 3 loads, 3 fresh states
    assert Buckets((8, 32), (1, 4), (64, 128, 256)).compile_bound() == 21
    assert Buckets((8,), (4,), (64,)).compile_bound() == 3  # nothing to load from another length


def test_a_short_cache_sees_no_prefill_of_a_length_that_it_fills_with_a_shorter_one():
    buckets = Buckets((8, 32, 128), (1, 4), (30, 32, 64))
    assert buckets.prefill_shapes(30) == buckets.prefill_shapes(32) == ((1, 8), (1, 32), (4, 8), (4, 32))
    assert buckets.prefill_shapes(64) == tuple((rows, length) for rows in (1, 4) for length in (8, 32, 128))
    assert buckets.compile_bound() == 4 + 4 + 6 + 9


def test_train_rows_worked_by_hand():
    assert [train_rows(n, 1) for n in (0, 1, 7, 8, 9, 10, 11, 16, 17, 33)] == [1, 1, 7, 8, 10, 10, 12, 16, 20, 40]
    assert [train_rows(n, 8) for n in (1, 8, 9, 70)] == [8, 8, 16, 80]
    with pytest.raises(ValueError, match="multiple >= 1"):
        train_rows(3, 0)


def test_rows_go_to_the_listed_shapes_as_long_as_they_suffice():
    assert row_shapes(4, (4, 6, 8, 30)) == (4, 8, 32) and row_shapes(4, ()) == ()
    assert [train_rows(n, 4, (4, 30)) for n in (0, 4, 5, 30, 32, 33)] == [4, 4, 32, 32, 32, train_rows(33, 4)]


@given(st.integers(0, 20_000), st.integers(1, 64))
def test_train_rows_properties(rows, multiple):
    padded = train_rows(rows, multiple)
    needed = max(1, -(-rows // multiple)) * multiple
    assert padded >= rows and padded % multiple == 0
    assert padded < 1.25 * needed or padded == needed
    assert train_rows(padded, multiple) == padded
    assert train_rows(rows + 1, multiple) >= padded


def test_train_rows_comes_from_a_short_list():
    assert len({train_rows(n, 1) for n in range(513, 1025)}) == 4


def test_long_rows_are_whole_blocks_and_short_ones_stay():
    lengths = [row_tokens(n) for n in (1, 640, 2047, 2048, 16000, 20000, 20480)]
    assert lengths == [1, 640, 2047, 2048, 16384, 20480, 20480]
