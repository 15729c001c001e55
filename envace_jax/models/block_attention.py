"""Causal attention within packed sequences, block by block: what causality or sequence ids mask out is not computed.

Scores exist for one pair of blocks at a time, forwards and backwards, so memory grows with T and not with T x T. Plain
XLA on every platform, with its own backward pass. Knows arrays only. Shape letters as in `types.py`; N query heads,
G = N / K query heads to a key/value head.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from envace_jax.models.attention import MASKED

BLOCK = 128  # tokens

Arrays = tuple[jax.Array, ...]


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, sequence_ids: jax.Array, last_readers: jax.Array | None = None
) -> jax.Array:
    """Token t reads tokens s <= t of its own sequence id. q [B,T,N,H]; k, v [B,T,K,H] -> [B,T,N,H].

    With last_readers i32[B,T] it reads every earlier token s with sequence_ids[s] <= sequence_ids[t] <=
    last_readers[s], so sequences that follow may continue it. A pair of blocks is left out where in no row of the
    batch a query reads a key: rows with many short sequences cost what the sequences cost. Padding (id 0 in both) is
    read by padding only; what it reads is unspecified and finite.
    """
    rows, time, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    count = -(-time // BLOCK)
    size = -(-time // count)

    def blocks(x: jax.Array, *shape: int) -> jax.Array:
        """[B, T, ..] -> [C, B, size, *shape]: blocks first, so that one of them is one run of memory."""
        padded = jnp.pad(x, ((0, 0), (0, count * size - time), *[(0, 0)] * (x.ndim - 2)))
        return padded.reshape(rows, count, size, *shape).swapaxes(0, 1)

    grouped = blocks(q, kv_heads, heads // kv_heads, head_dim).transpose(0, 1, 3, 4, 2, 5)
    grouped = grouped.reshape(count, rows, kv_heads, -1, head_dim)
    keys, values = (blocks(x, kv_heads, head_dim).swapaxes(2, 3) for x in (k, v))
    ids = blocks(sequence_ids), blocks(sequence_ids if last_readers is None else last_readers)
    out = _attend(grouped, keys, values, ids)
    out = out.reshape(count, rows, kv_heads, heads // kv_heads, size, head_dim).transpose(1, 0, 4, 2, 3, 5)
    return out.reshape(rows, count * size, heads, head_dim)[:, :time]


def meeting_blocks(ids: Arrays) -> jax.Array:
    """bool[C, C]: whether in any row a query of the one block may read a key of the other.

    `ids` are sequence ids and last readers, i32[C, B, size]. Judged by the least and the greatest id that occur in a
    block, so it errs towards True where ids do not ascend along the row.
    """
    count = ids[0].shape[0]
    least = jnp.min(jnp.where(ids[0] == 0, jnp.iinfo(jnp.int32).max, ids[0]), axis=2)  # [C, B]
    greatest, last = (jnp.max(bound, axis=2) for bound in ids)  # 0 in a block of padding alone, which meets none
    meet = jnp.any((least[None] <= greatest[:, None]) & (last[None] >= least[:, None]), axis=2)
    return (meet | jnp.eye(count, dtype=bool)) & jnp.tri(count, dtype=bool)


def _order(ids: Arrays) -> Arrays:
    """How many blocks of keys each block of queries meets, i32[C], and their numbers first, i32[C, C]."""
    meet = meeting_blocks(ids)
    return meet.sum(axis=1, dtype=jnp.int32), jnp.argsort(~meet, axis=1, stable=True)


# Every product below has its left operand's last axis and its right operand's second to last summed over, as they lie
# in memory: any other would first copy a block of scores in another order, which costs more than the product.


@jax.custom_vjp
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: Arrays) -> jax.Array:
    return _forward(q, k, v, ids)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, ids: Arrays) -> tuple[jax.Array, Any]:
    """q [C,B,K,G*size,H]; k, v [C,B,K,size,H]; ids two of i32[C,B,size] -> like q, and what the backward pass needs."""
    counts, order = _order(ids)
    turned, size = k.swapaxes(-1, -2), k.shape[3]

    def queries(block: jax.Array, carry: Arrays) -> Arrays:
        out, log_weights = carry
        one = _take(q, block)

        def keys(number: jax.Array, carry: Arrays) -> Arrays:
            other = order[block, number]
            top, total, mixed = carry
            scores = _product(one, _take(turned, other)) * (one.shape[-1] ** -0.5)
            scores = _heads_apart(scores, 2, size)
            mask = _mask(ids, block, other)[:, None, None]
            scores = jnp.where(mask, scores, MASKED).reshape(*top.shape, size)
            higher = jnp.maximum(top, scores.max(axis=-1))
            scale, weights = jnp.exp(top - higher), jnp.exp(scores - higher[..., None])
            product = _product(weights.astype(v.dtype), _take(v, other))
            return higher, total * scale + weights.sum(axis=-1), mixed * scale[..., None] + product

        shape = one.shape[:-1]
        zeros = jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros(one.shape, jnp.float32)
        top, total, mixed = lax.fori_loop(0, counts[block], keys, zeros)
        here = (mixed / total[..., None]).astype(q.dtype)
        return _put(out, here, block), _put(log_weights, top + jnp.log(total), block)

    out, log_weights = lax.fori_loop(0, q.shape[0], queries, (jnp.zeros_like(q), jnp.zeros(q.shape[:-1], jnp.float32)))
    return out, (q, k, v, ids, counts, order, out, log_weights)


def _backward(residuals: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    q, k, v, ids, counts, order, out, log_weights = residuals
    scale, size = q.shape[-1] ** -0.5, k.shape[3]
    along = jnp.sum(cotangent.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)  # [C,B,K,G*size]
    turned_q, turned_k, turned_cotangent = (x.swapaxes(-1, -2) for x in (q, k, cotangent))

    def queries(block: jax.Array, carry: Arrays) -> Arrays:
        d_q, d_k, d_v = carry
        one, d_one, turned, turned_d = (_take(x, block) for x in (q, cotangent, turned_q, turned_cotangent))
        weighed, along_here = (_heads_apart(_take(x, block)[..., None, :], 3, size) for x in (log_weights, along))
        flat = (*one.shape[:2], size, one.shape[2])

        def keys(number: jax.Array, carry: Arrays) -> Arrays:
            other = order[block, number]
            d_here, d_k, d_v = carry
            # Keys first: [B,K,size,G,size], and [B,K,size,G*size] for the products.
            scores = _heads_apart(_product(_take(k, other), turned) * scale, 3, size)
            mask = _mask(ids, block, other, keys_first=True)[:, None, :, None]
            weights = jnp.exp(jnp.where(mask, scores, MASKED) - weighed)
            d_weights = _heads_apart(_product(_take(v, other), turned_d), 3, size)
            d_scores = (weights * (d_weights - along_here) * scale).astype(q.dtype).reshape(flat)
            d_here += _product(_take(turned_k, other), d_scores)
            d_k = _put(d_k, _take(d_k, other) + _product(d_scores, one), other)
            d_v = _put(d_v, _take(d_v, other) + _product(weights.astype(v.dtype).reshape(flat), d_one), other)
            return d_here, d_k, d_v

        zeros = jnp.zeros(turned.shape, jnp.float32)
        d_here, d_k, d_v = lax.fori_loop(0, counts[block], keys, (zeros, d_k, d_v))
        return _put(d_q, d_here.astype(q.dtype), block), d_k, d_v

    zeros = jnp.zeros_like(turned_q), jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    d_q, d_k, d_v = lax.fori_loop(0, q.shape[0], queries, zeros)
    return d_q.swapaxes(-1, -2), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_attend.defvjp(_forward, _backward)


def _mask(ids: Arrays, block: jax.Array, other: jax.Array, keys_first: bool = False) -> jax.Array:
    """bool[B, size, size]: which queries of a block read which keys of another."""
    query, key = (1, 2) if keys_first else (2, 1)  # the axis that each lacks
    own = jnp.expand_dims(_take(ids[0], block), query)
    first, last = (jnp.expand_dims(_take(bound, other), key) for bound in ids)
    size = ids[0].shape[2]
    at = jnp.arange(size)
    earlier = block * size + jnp.expand_dims(at, query - 1) >= other * size + jnp.expand_dims(at, key - 1)
    return (first <= own) & (own <= last) & earlier


def _heads_apart(array: jax.Array, axis: int, size: int) -> jax.Array:
    """[.., G*size, ..] -> [.., G, size, ..]: so that a loop over its elements need not divide to find their masks."""
    return array.reshape(*array.shape[:axis], -1, size, *array.shape[axis + 1 :])


def _product(one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.matmul(one, other, preferred_element_type=jnp.float32)


def _take(array: jax.Array, block: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(array, block, keepdims=False)


def _put(array: jax.Array, piece: jax.Array, block: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(array, piece, block, 0)
