"""Rotary positions, and grouped-query attention with a cache, as functions of arrays.

Keys and values are never repeated over the query heads that share them. Scores, softmax and rotary angles are float32.
Knows no parameters. Shape letters as in `types.py`; N query heads, G = N / K query heads to a key/value head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from envace_jax.types import KVCache

KeyValue = tuple[jax.Array, jax.Array]
MASKED = -1e30  # finite, so that a row without any allowed key stays finite in value and gradient
QUERY_BLOCK = 128
MAX_QUERY_BLOCKS = 16  # of one row, to bound what is compiled
CACHE_BLOCK = 128


def rotary_angles(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin, f32[B, T, 1, head_dim / 2], of positions i32[B, T]."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def looked_up_angles(table: tuple[jax.Array, jax.Array], positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`rotary_angles` of positions i32[B, T], out of those of 0, 1, 2, ...: two f32[S, head_dim / 2].

    XLA on a CPU computes a cosine anew in all that reads it, for each head of each layer.
    """
    cos, sin = (jnp.take(angles, positions, axis=0, mode="clip")[:, :, None] for angles in table)
    return cos, sin


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates [B, T, heads, head_dim] by pairs (i, i + head_dim / 2), in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _group(q: jax.Array, kv_heads: int) -> jax.Array:
    rows, time, heads, head_dim = q.shape
    return q.reshape(rows, time, kv_heads, heads // kv_heads, head_dim)


def _partial(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention before its division: the largest score, the sum of weights and the weighted sum of values.

    q [B,T,K,G,H]; k, v [B,S,K,H]; mask bool, broadcastable to [B,1,1,T,S] -> f32[B,K,G,T,1], f32[B,K,G,T,1],
    f32[B,K,G,T,H]. Partial results over different keys are put together by `_join`.
    """
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * (q.shape[-1] ** -0.5)
    scores = jnp.where(mask, scores, MASKED)
    top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    out = jnp.einsum("bkgts,bskh->bkgth", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return top, weights.sum(axis=-1, keepdims=True), out


def _join(
    one: tuple[jax.Array, jax.Array, jax.Array], other: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    top = jnp.maximum(one[0], other[0])
    scale, other_scale = jnp.exp(one[0] - top), jnp.exp(other[0] - top)
    return top, one[1] * scale + other[1] * other_scale, one[2] * scale + other[2] * other_scale


def _finish(part: tuple[jax.Array, jax.Array, jax.Array], q: jax.Array) -> jax.Array:
    """[B, T, N, H] in q's dtype from a partial result."""
    return (part[2] / part[1]).astype(q.dtype).transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _causal_blocks(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    """Yields partial results for consecutive blocks of queries of one causal row, each with the keys up to its end."""
    time = q.shape[1]
    size = max(QUERY_BLOCK, -(-time // MAX_QUERY_BLOCKS))
    for start in range(0, time, size):
        end = min(start + size, time)
        mask = (jnp.arange(start, end)[:, None] >= jnp.arange(end)[None, :])[None]
        yield _partial(_group(q[:, start:end], k.shape[2]), k[:, :end], v[:, :end], mask[:, None, None])


def attend_cached(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, slots: int, read: Callable[[jax.Array, int], KeyValue]
) -> jax.Array:
    """Token i of row b reads cached positions below lengths[b], and new tokens up to itself.

    q [B,T,N,H]; k, v [B,T,K,H] of the new tokens; `read(start, size)` gives cached keys and values [B,size,K,H] of
    `slots` positions in all -> [B,T,N,H]. Real tokens are a prefix of the row, so the causal mask alone keeps padding
    out. The cache is read block by block as far as the longest row reaches, so an unused position costs nothing.
    """
    size = min(CACHE_BLOCK, slots)
    grouped = _group(q, k.shape[2])

    def add_block(index: jax.Array, part: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
        start = jnp.minimum(index * size, slots - size)  # the last block may overlap the one before it
        at = start + jnp.arange(size)
        mask = (at[None, :] >= index * size) & (at[None, :] < lengths[:, None])
        keys, values = read(start, size)
        block = _partial(grouped, keys.astype(q.dtype), values.astype(q.dtype), mask[:, None, None, None])
        return _join(part, block)

    new = jax.tree.map(lambda *pieces: jnp.concatenate(pieces, axis=3), *_causal_blocks(q, k, v))
    blocks = (jnp.minimum(lengths.max(), slots) + size - 1) // size
    return _finish(jax.lax.fori_loop(0, blocks, add_block, new), q)


# --- a cache that is one array for all layers: k, v [L, B, S, K, H] ---


def stacked_reader(cache: KVCache, layer: jax.Array | int) -> Callable[[jax.Array, int], KeyValue]:
    """For `attend_cached`: keys and values of one layer, only read; `write_stacked` writes all layers at once after."""

    def read(start: jax.Array, size: int) -> KeyValue:
        def piece(array: jax.Array) -> jax.Array:
            shape = (1, array.shape[1], size, *array.shape[3:])
            return jax.lax.dynamic_slice(array, (layer, 0, start, 0, 0), shape)[0]

        return piece(cache.k), piece(cache.v)

    return read


def write_stacked(cache: KVCache, k: jax.Array, v: jax.Array, valid: jax.Array) -> KVCache:
    """Writes new keys and values [L, B, T, K, H] where valid bool[B, T], at lengths[b] + i; lengths grow by the valid.

    Padded tokens, and tokens beyond the last position, are dropped.
    """
    rows, places = _places(cache.lengths, valid, cache.k.shape[2])
    return KVCache(
        k=cache.k.at[:, rows, places].set(k.astype(cache.k.dtype), mode="drop"),
        v=cache.v.at[:, rows, places].set(v.astype(cache.v.dtype), mode="drop"),
        lengths=cache.lengths + valid.sum(axis=1, dtype=cache.lengths.dtype),
        by_position=cache.by_position,
    )


def _places(lengths: jax.Array, valid: jax.Array, slots: int) -> tuple[jax.Array, jax.Array]:
    rows = jnp.arange(valid.shape[0])[:, None]
    places = lengths[:, None] + jnp.arange(valid.shape[1])[None, :]
    return rows, jnp.where(valid, places, slots)  # out of bounds: dropped


# --- a cache of an array for each layer: k [B, K, H, S] and v [B, K, S, H], as a single query's products want them ---


def layer_reader(k: jax.Array, v: jax.Array) -> Callable[[jax.Array, int], KeyValue]:
    """For `attend_cached`: keys and values of a layer's own arrays."""

    def read(start: jax.Array, size: int) -> KeyValue:
        keys = jax.lax.dynamic_slice_in_dim(k, start, size, axis=3).transpose(0, 3, 1, 2)
        return keys, jax.lax.dynamic_slice_in_dim(v, start, size, axis=2).transpose(0, 2, 1, 3)

    return read


def write_layer(
    k: jax.Array, v: jax.Array, new_k: jax.Array, new_v: jax.Array, lengths: jax.Array, valid: jax.Array
) -> KeyValue:
    """A layer's arrays with new keys and values [B, T, K, H] at lengths[b] + i where valid; the rest is dropped."""
    rows, places = _places(lengths, valid, v.shape[2])
    return (
        k.at[rows, :, :, places].set(new_k.astype(k.dtype), mode="drop"),
        v.at[rows, :, places].set(new_v.astype(v.dtype), mode="drop"),
    )


def attend_one(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    """One new token a row, whose key and value are written already: it reads positions up to lengths[b].

    q [B,1,N,H]; k [B,K,H,S], v [B,K,S,H] -> [B,1,N,H].
    """
    grouped = _group(q, k.shape[1])[:, 0]
    scores = jnp.einsum("bkgh,bkhs->bkgs", grouped, k.astype(q.dtype), preferred_element_type=jnp.float32)
    mask = jnp.arange(v.shape[2])[None, :] <= lengths[:, None]
    scores = jnp.where(mask[:, None, None], scores * (q.shape[-1] ** -0.5), MASKED)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    out = jnp.einsum("bkgs,bksh->bkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    # Divided last: H numbers a head instead of S.
    return (out / weights.sum(axis=-1, keepdims=True)).astype(q.dtype).reshape(q.shape)
