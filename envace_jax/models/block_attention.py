"""Causal attention within packed sequences, block by block: what causality or sequence ids mask out is not computed.

Scores exist for one pair of blocks at a time, forwards and backwards, so memory grows with T and not with T x T. Plain
XLA on every platform, with its own backward pass. Knows arrays only. Shape letters as in `types.py`; N query heads,
G = N / K query heads to a key/value head.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from envace_jax.models.attention import MASKED

BLOCK = 128  # tokens

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Settled while tracing: `count` blocks of `size` tokens cover the row."""

    count: int
    size: int


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
    blocks = _Blocks(count, -(-time // count))
    padding = blocks.count * blocks.size - time

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)))

    grouped = padded(q).reshape(rows, time + padding, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    ids = padded(sequence_ids), padded(sequence_ids if last_readers is None else last_readers)
    out = _attend(blocks, grouped, padded(k).swapaxes(1, 2), padded(v).swapaxes(1, 2), ids)
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, time + padding, heads, head_dim)[:, :time]


def meeting_blocks(ids: Arrays, count: int, size: int) -> jax.Array:
    """bool[count, count]: whether in any row a query of the one block may read a key of the other.

    `ids` are sequence ids and last readers, i32[B, T]. Judged by the least and the greatest id that occur in a block, so
    it errs towards True where ids do not ascend along the row.
    """

    def bounds(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        cut = ids.reshape(ids.shape[0], count, size)
        return jnp.min(jnp.where(cut == 0, jnp.iinfo(jnp.int32).max, cut), axis=2), jnp.max(cut, axis=2)

    (least, greatest), (_, last) = map(bounds, ids)  # [B, count]; a block of padding alone meets none
    meet = jnp.any((least[:, None] <= greatest[..., None]) & (last[:, None] >= least[..., None]), axis=0)
    return (meet | jnp.eye(count, dtype=bool)) & jnp.tri(count, dtype=bool)


def _order(ids: Arrays, blocks: _Blocks) -> Arrays:
    """How many blocks of keys each block of queries meets, i32[count], and their numbers first, i32[count, count]."""
    meet = meeting_blocks(ids, blocks.count, blocks.size)
    return meet.sum(axis=1, dtype=jnp.int32), jnp.argsort(~meet, axis=1, stable=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(blocks: _Blocks, q: jax.Array, k: jax.Array, v: jax.Array, ids: Arrays) -> jax.Array:
    return _forward(blocks, q, k, v, ids)[0]


def _forward(blocks: _Blocks, q: jax.Array, k: jax.Array, v: jax.Array, ids: Arrays) -> tuple[jax.Array, Any]:
    """q [B,K,G,T,H]; k, v [B,K,T,H]; ids two of i32[B,T] -> [B,K,G,T,H], and what the backward pass needs."""
    counts, order = _order(ids, blocks)

    def queries(block: jax.Array, carry: Arrays) -> Arrays:
        out, log_weights = carry
        one = _cut(q, block, blocks, 3)

        def keys(number: jax.Array, carry: Arrays) -> Arrays:
            other = order[block, number]
            top, total, mixed = carry
            scores = _scores(one, k, ids, block, other, blocks)
            higher = jnp.maximum(top, scores.max(axis=-1))
            scale, weights = jnp.exp(top - higher), jnp.exp(scores - higher[..., None])
            values = _cut(v, other, blocks, 2)
            product = jnp.einsum(
                "bkgts,bksh->bkgth", weights.astype(v.dtype), values, preferred_element_type=jnp.float32
            )
            return higher, total * scale + weights.sum(axis=-1), mixed * scale[..., None] + product

        shape = one.shape[:-1]
        zeros = jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros(one.shape, jnp.float32)
        top, total, mixed = lax.fori_loop(0, counts[block], keys, zeros)
        here = (mixed / total[..., None]).astype(q.dtype)
        return _paste(out, here, block, blocks, 3), _paste(log_weights, top + jnp.log(total), block, blocks, 3)

    out, log_weights = lax.fori_loop(
        0, blocks.count, queries, (jnp.zeros_like(q), jnp.zeros(q.shape[:-1], jnp.float32))
    )
    return out, (q, k, v, ids, counts, order, out, log_weights)


def _backward(blocks: _Blocks, residuals: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    q, k, v, ids, counts, order, out, log_weights = residuals
    scale = q.shape[-1] ** -0.5
    along = jnp.sum(cotangent.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)  # [B,K,G,T]

    def queries(block: jax.Array, carry: Arrays) -> Arrays:
        d_q, d_k, d_v = carry
        one, d_one = _cut(q, block, blocks, 3), _cut(cotangent, block, blocks, 3)
        weighed, along_here = _cut(log_weights, block, blocks, 3), _cut(along, block, blocks, 3)

        def keys(number: jax.Array, carry: Arrays) -> Arrays:
            other = order[block, number]
            d_here, d_k, d_v = carry
            weights = jnp.exp(_scores(one, k, ids, block, other, blocks) - weighed[..., None])
            d_value = _product("bkgts,bkgth->bksh", weights.astype(v.dtype), d_one)
            d_weights = _product("bkgth,bksh->bkgts", d_one, _cut(v, other, blocks, 2))
            d_scores = (weights * (d_weights - along_here[..., None]) * scale).astype(q.dtype)
            d_here += _product("bkgts,bksh->bkgth", d_scores, _cut(k, other, blocks, 2))
            d_key = _product("bkgts,bkgth->bksh", d_scores, one)
            return d_here, _add(d_k, d_key, other, blocks), _add(d_v, d_value, other, blocks)

        zeros = jnp.zeros(one.shape, jnp.float32)
        d_here, d_k, d_v = lax.fori_loop(0, counts[block], keys, (zeros, d_k, d_v))
        return _paste(d_q, d_here.astype(q.dtype), block, blocks, 3), d_k, d_v

    zeros = jnp.zeros_like(q), jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    d_q, d_k, d_v = lax.fori_loop(0, blocks.count, queries, zeros)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), None


_attend.defvjp(_forward, _backward)


def _scores(
    one: jax.Array, k: jax.Array, ids: Arrays, block: jax.Array, other: jax.Array, blocks: _Blocks
) -> jax.Array:
    """Masked scores f32[B,K,G,size,size] of a block of queries with another block's keys."""
    scores = _product("bkgth,bksh->bkgts", one, _cut(k, other, blocks, 2)) * (one.shape[-1] ** -0.5)
    own = _cut(ids[0], block, blocks, 1)[:, :, None]
    first, last = (_cut(bound, other, blocks, 1)[:, None, :] for bound in ids)
    mask = (first <= own) & (own <= last)
    at = jnp.arange(blocks.size)
    mask &= block * blocks.size + at[:, None] >= other * blocks.size + at[None, :]
    return jnp.where(mask[:, None, None], scores, MASKED)


def _product(subscripts: str, one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, one, other, preferred_element_type=jnp.float32)


def _cut(array: jax.Array, block: jax.Array, blocks: _Blocks, axis: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(array, block * blocks.size, blocks.size, axis)


def _paste(array: jax.Array, piece: jax.Array, block: jax.Array, blocks: _Blocks, axis: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(array, piece, block * blocks.size, axis)


def _add(array: jax.Array, piece: jax.Array, block: jax.Array, blocks: _Blocks) -> jax.Array:
    return _paste(array, _cut(array, block, blocks, 2) + piece, block, blocks, 2)
