"""Rotary positions, and grouped-query attention with a cache, as functions of arrays.

Keys and values are never repeated over the query heads that share them. Scores, softmax and rotary angles are float32.
Knows no parameters. Shape letters as in `types.py`; N query heads, G = N / K query heads to a key/value head.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from envace_jax.types import KVCache

KeyValue = tuple[jax.Array, jax.Array]
MASKED = -1e30  # finite, so that a row without any allowed key stays finite in value and gradient
QUERY_BLOCK = 128
MAX_QUERY_BLOCKS = 16  # of one row, to bound what is compiled
CACHE_BLOCK = 256


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


Part = tuple[jax.Array, jax.Array, jax.Array]  # largest score, sum of weights, weighted sum of values


def _partial(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> Part:
    """Attention before its division, f32[B,K,Q,1], f32[B,K,Q,1] and f32[B,K,Q,H].

    q [B,K,Q,H]; k [B,K,H,S]; v [B,K,S,H]: as the products read them, so that nothing is copied into another
    order. mask bool, broadcastable to [B,1,Q,S]. Partial results over different keys are put together by `_join`.
    """
    scores = jnp.einsum("bkqh,bkhs->bkqs", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores * (q.shape[-1] ** -0.5), MASKED)
    top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    out = jnp.einsum("bkqs,bksh->bkqh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return top, weights.sum(axis=-1, keepdims=True), out


def _join(one: Part, other: Part) -> Part:
    top = jnp.maximum(one[0], other[0])
    scale, other_scale = jnp.exp(one[0] - top), jnp.exp(other[0] - top)
    return top, one[1] * scale + other[1] * other_scale, one[2] * scale + other[2] * other_scale


def _causal(q: jax.Array, k: jax.Array, v: jax.Array) -> Part:
    """A causal row with itself: q [B,K,G,T,H], k [B,K,H,T], v [B,K,T,H] -> f32[B,K,G,T,1 and H].

    Computed by blocks of queries, each with the keys up to its end.
    """
    rows, heads, group, time, head_dim = q.shape
    size = max(QUERY_BLOCK, -(-time // MAX_QUERY_BLOCKS))
    parts = []
    for start in range(0, time, size):
        end = min(start + size, time)
        mask = jnp.arange(start, end)[:, None] >= jnp.arange(end)[None, :]
        block = q[:, :, :, start:end].reshape(rows, heads, -1, head_dim)
        part = _partial(block, k[..., :end], v[:, :, :end], jnp.tile(mask, (group, 1)))
        parts.append(tuple(x.reshape(rows, heads, group, end - start, -1) for x in part))
    top, weight, out = (jnp.concatenate(pieces, axis=3) for pieces in zip(*parts, strict=True))
    return top, weight, out


def attend_cached(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, slots: int, read: Callable[[jax.Array, int], KeyValue]
) -> jax.Array:
    """Token i of row b reads cached positions below lengths[b], and new tokens up to itself.

    q [B,T,N,H]; k, v [B,T,K,H] of the new tokens; `read(start, size)` gives cached keys [B,K,H,size] and values
    [B,K,size,H] of `slots` positions in all -> [B,T,N,H]. Real tokens are a prefix of the row, so the causal mask alone
    keeps padding out. The cache is read block by block as far as the longest row reaches, so an unused position costs
    nothing.
    """
    rows, time, _, head_dim = q.shape
    heads, size = k.shape[2], min(CACHE_BLOCK, slots)
    grouped = q.reshape(rows, time, heads, -1, head_dim).transpose(0, 2, 3, 1, 4)  # [B, K, G, T, H]
    # The query heads of a key/value head lie one after another: a single product for all of them.
    flat = grouped.reshape(rows, heads, -1, head_dim)

    def add_block(index: jax.Array, part: Part) -> Part:
        start = jnp.minimum(index * size, slots - size)  # the last block may overlap the one before it
        at = start + jnp.arange(size)
        mask = (at[None, :] >= index * size) & (at[None, :] < lengths[:, None])
        keys, values = read(start, size)
        return _join(part, _partial(flat, keys.astype(q.dtype), values.astype(q.dtype), mask[:, None, None]))

    new = _causal(grouped, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3))
    first = tuple(x.reshape(rows, heads, -1, x.shape[-1]) for x in new)
    blocks = (jnp.minimum(lengths.max(), slots) + size - 1) // size
    _, weight, out = jax.lax.fori_loop(0, blocks, add_block, first)
    attended = (out / weight).astype(q.dtype).reshape(grouped.shape)
    return attended.transpose(0, 3, 1, 2, 4).reshape(q.shape)


# --- a cache that is one array for all layers: k, v [L, B, S, K, H] ---


def stacked_reader(cache: KVCache, layer: jax.Array | int) -> Callable[[jax.Array, int], KeyValue]:
    """For `attend_cached`: keys and values of one layer, only read; `write_stacked` writes all layers at once after."""

    def read(start: jax.Array, size: int) -> KeyValue:
        def piece(array: jax.Array) -> jax.Array:
            shape = (1, array.shape[1], size, *array.shape[3:])
            return jax.lax.dynamic_slice(array, (layer, 0, start, 0, 0), shape)[0]

        return piece(cache.k).transpose(0, 2, 3, 1), piece(cache.v).transpose(0, 2, 1, 3)

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
        keys = jax.lax.dynamic_slice_in_dim(k, start, size, axis=3)
        return keys, jax.lax.dynamic_slice_in_dim(v, start, size, axis=2)

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
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    scores = jnp.einsum("bkgh,bkhs->bkgs", grouped, k.astype(q.dtype), preferred_element_type=jnp.float32)
    mask = jnp.arange(v.shape[2])[None, :] <= lengths[:, None]
    scores = jnp.where(mask[:, None, None], scores * (q.shape[-1] ** -0.5), MASKED)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    out = jnp.einsum("bkgs,bksh->bkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    # Divided last: H numbers a head instead of S.
    return (out / weights.sum(axis=-1, keepdims=True)).astype(q.dtype).reshape(q.shape)
