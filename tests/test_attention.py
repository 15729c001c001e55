"""Attention over a cache against its formula in float64, one query head and one token at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.models import attention
from envace_jax.types import KVCache

SLOTS = 2 * attention.CACHE_BLOCK + 44  # the last block of the cache overlaps the one before it
LENGTHS = [0, 1, attention.CACHE_BLOCK, attention.CACHE_BLOCK + 1, SLOTS - 1]


def make_arrays(rows: int, time: int, kv_heads: int = 2, group: int = 2, head_dim: int = 4):
    """q [B,T,N,H], new k and v [B,T,K,H], and cached k and v [B,S,K,H] in which every position holds something."""
    rng = np.random.default_rng(0)
    sizes = (time, kv_heads * group), (time, kv_heads), (time, kv_heads), (SLOTS, kv_heads), (SLOTS, kv_heads)
    return [3 * rng.normal(size=(rows, *size, head_dim)).astype(np.float32) for size in sizes]


def by_formula(q, k, v, old_k, old_v, lengths) -> np.ndarray:
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[2]
    for row, time, head in np.ndindex(q.shape[:3]):
        shared = head // group
        keys = np.concatenate([old_k[row, : lengths[row], shared], k[row, : time + 1, shared]]).astype(np.float64)
        values = np.concatenate([old_v[row, : lengths[row], shared], v[row, : time + 1, shared]])
        scores = keys @ q[row, time, head] / np.sqrt(q.shape[3])
        weights = np.exp(scores - scores.max())
        out[row, time, head] = weights / weights.sum() @ values
    return out


def attend(layout: str, q, k, v, old_k, old_v, lengths) -> np.ndarray:
    lengths = jnp.array(lengths)
    if layout == "stacked":
        other = np.full_like(old_k, np.nan)
        cache = KVCache(jnp.stack([other, old_k]), jnp.stack([other, old_v]), lengths)
        read = attention.stacked_reader(cache, 1)
    else:
        read = attention.layer_reader(jnp.array(old_k.transpose(0, 2, 3, 1)), jnp.array(old_v.transpose(0, 2, 1, 3)))
    return np.asarray(jax.jit(lambda *new: attention.attend_cached(*new, lengths, SLOTS, read))(q, k, v))


@pytest.mark.parametrize("layout", ["stacked", "apart"])
@pytest.mark.parametrize("time", [1, 5, attention.QUERY_BLOCK + 3])
def test_rows_of_very_different_lengths_read_each_its_own(layout, time):
    arrays = make_arrays(len(LENGTHS), time)
    got = attend(layout, *arrays, LENGTHS)
    np.testing.assert_allclose(got, by_formula(*arrays, LENGTHS), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("layout", ["stacked", "apart"])
def test_what_lies_beyond_every_length_is_not_even_read(layout):
    """A block that no row reaches costs nothing: not a number there would spoil the sums."""
    q, k, v, old_k, old_v = make_arrays(2, 3)
    spoiled_k, spoiled_v = old_k.copy(), old_v.copy()
    spoiled_k[:, attention.CACHE_BLOCK :] = spoiled_v[:, attention.CACHE_BLOCK :] = np.nan
    lengths = [attention.CACHE_BLOCK, 7]
    got = attend(layout, q, k, v, spoiled_k, spoiled_v, lengths)
    np.testing.assert_allclose(got, by_formula(q, k, v, old_k, old_v, lengths), rtol=2e-4, atol=2e-5)


def test_a_single_token_reads_what_its_row_holds():
    lengths = [length for length in LENGTHS if length < SLOTS]
    q, k, v, old_k, old_v = make_arrays(len(lengths), 1)
    keys, values = old_k.transpose(0, 2, 3, 1), old_v.transpose(0, 2, 1, 3)
    valid = jnp.ones((len(lengths), 1), bool)
    keys, values = attention.write_layer(jnp.array(keys), jnp.array(values), k, v, jnp.array(lengths), valid)
    got = attention.attend_one(q, keys, values, jnp.array(lengths))
    np.testing.assert_allclose(got, by_formula(q, k, v, old_k, old_v, lengths), rtol=2e-4, atol=2e-5)
