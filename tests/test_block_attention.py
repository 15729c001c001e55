"""Blockwise attention: the dense formula and its gradients for any packing, and no work for what is masked out."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax.models import block_attention
from envace_jax.models.block_attention import attend, meeting_blocks

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def dense(q, k, v, sequence_ids, last_readers=None):
    """All scores at once."""
    time = q.shape[1]
    k, v = (jnp.repeat(x.astype(jnp.float32), HEADS // KV_HEADS, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), k) * HEAD_DIM**-0.5
    last = sequence_ids if last_readers is None else last_readers
    mask = (sequence_ids[:, None, :] <= sequence_ids[:, :, None]) & (sequence_ids[:, :, None] <= last[:, None, :])
    mask &= np.tri(time, dtype=bool)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30)), v)


def row_of(lengths, time, readers=0):
    """Sequence ids and last readers of one row: sequences of these lengths; with `readers` the first tokens of each are
    read by so many after it, and those behind them by fewer and fewer."""
    ids, last = np.zeros(time, np.int32), np.zeros(time, np.int32)
    start = 0
    for number, length in enumerate(lengths, start=1):
        ids[start : start + length] = number
        later = np.linspace(readers, 0, length).round().astype(np.int32)
        last[start : start + length] = np.minimum(number + later, len(lengths))
        start += length
    return ids, last


def problem(rows, time, dtype=jnp.float32, readers=0):
    """(q, k, v, weight) with weight 0 at padding, sequence ids, last readers or None."""
    pairs = [row_of(lengths, time, readers) for lengths in rows]
    ids, last = (np.stack(column) for column in zip(*pairs, strict=True))
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(len(rows), time, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, weight = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))
    return q, k, v, jnp.where(ids[..., None, None] != 0, weight, 0), ids, last if readers else None


@functools.cache
def gradients(of):
    def loss(q, k, v, weight, ids, last):
        out = of(q, k, v, ids, last)
        return jnp.sum(out.astype(jnp.float32) * weight.astype(jnp.float32)), out

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))


def assert_same(arguments, tolerance=2e-6):
    (got, out), (want, expected) = gradients(attend)(*arguments), gradients(dense)(*arguments)
    real = np.asarray(arguments[4])[..., None, None] != 0
    assert out.dtype == arguments[0].dtype and np.isfinite(out.astype(jnp.float32)).all()
    np.testing.assert_allclose(np.where(real, out, 0), np.where(real, expected, 0), atol=tolerance)
    for one, other in zip(got, want, strict=True):
        size = max(float(np.abs(other.astype(jnp.float32)).max()), 1.0)
        np.testing.assert_allclose(
            one.astype(jnp.float32) / size, other.astype(jnp.float32) / size, atol=10 * tolerance
        )


@pytest.mark.parametrize("readers", [0, 2])
@pytest.mark.parametrize("time", [1, 7, 128, 129, 300])
def test_any_packing_gives_the_dense_formula_and_its_gradients(time, readers):
    each = max(1, time // 5)
    rows = [[time], [each] * 4, [1, each, time - 2 * each - 1, each] if time > 5 else [1]]
    assert_same(problem(rows, time, readers=readers))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(1, 60), max_size=9), min_size=2, max_size=2), st.sampled_from([0, 1, 3]))
def test_random_packings_give_the_dense_formula(rows, readers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_attention, "BLOCK", 16)
        rows = [lengths[: np.searchsorted(np.cumsum(lengths), 150, side="right")] for lengths in rows]
        assert_same(problem(rows, 150, readers=readers))


def test_ids_in_any_order_give_the_dense_formula():
    q, k, v, weight, ids, _ = problem([[40] * 5, [100, 100]], 200)
    ids = np.array([[3, 1, 0, 2, 7, 5]])[0][ids]  # what was padding too is a sequence, and one sequence is padding
    assert_same((q, k, v, jnp.where(ids[..., None, None] != 0, weight, 0), ids, None))


def test_bfloat16_stays_close_and_keeps_its_dtype():
    assert_same(problem([[150, 150], [300]], 300, jnp.bfloat16), tolerance=2e-2)


def test_blocks_meet_where_a_sequence_or_its_beginning_reaches():
    ids, last = row_of([20, 20, 20, 20, 40], 128, readers=3)
    cut, cut_last = (x.reshape(8, 1, 16) for x in (ids, last))
    blocks = np.asarray(meeting_blocks((cut, cut)))
    np.testing.assert_array_equal(blocks, exact(ids, ids))
    shared = np.asarray(meeting_blocks((cut, cut_last)))
    np.testing.assert_array_equal(shared, exact(ids, last))
    assert blocks.sum() < shared.sum() < 36


def exact(ids, last):
    mask = (ids <= ids[:, None]) & (ids[:, None] <= last) & (ids != 0)
    mask &= np.tri(len(ids), dtype=bool)
    return mask.reshape(8, 16, 8, 16).any(axis=(1, 3)) | np.eye(8, dtype=bool)


def test_many_short_sequences_meet_few_blocks():
    """Pairs of blocks grow with the row where sequences do not."""
    counts = []
    for time in (1024, 2048):
        ids, _ = row_of([64] * (time // 64), time)
        cut = ids.reshape(-1, 1, 64)
        counts.append(int(meeting_blocks((cut, cut)).sum()))
    assert counts == [16, 32]


def test_what_no_query_may_read_is_never_touched():
    """Each sequence's own block of values and keys poisoned in turn: 0 x nan would spoil what it is multiplied into."""
    q, k, v, weight, ids, _ = problem([[128] * 4], 512)
    clean = gradients(attend)(q, k, v, weight, ids, None)
    for number in range(4):
        own = (ids == number + 1)[..., None, None]
        bad = [jnp.where(own, jnp.nan, x) for x in (k, v)]
        others = ~own
        (d_q, d_k, d_v), out = gradients(attend)(q, *bad, jnp.where(own, 0, weight), ids, None)
        for got, want in zip((d_q, d_k, d_v, out), (*clean[0], clean[1]), strict=True):
            np.testing.assert_array_equal(np.where(others, got, 0), np.where(others, want, 0))


def test_memory_grows_with_the_row_and_not_with_its_square():
    def temporary(time):
        shapes = [
            jax.ShapeDtypeStruct((1, time, heads, HEAD_DIM), jnp.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        ids = jax.ShapeDtypeStruct((1, time), jnp.int32)
        gradient = jax.grad(lambda q, k, v, ids: jnp.sum(attend(q, k, v, ids)), (0, 1, 2))
        return jax.jit(gradient).lower(*shapes, ids).compile().memory_analysis().temp_size_in_bytes

    assert temporary(8192) < 2.2 * temporary(4096) < HEADS * 4096 * 4096 * 4 / 4
