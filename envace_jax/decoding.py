"""The device half of the sampler: pure functions over its whole state, to be jitted with that state donated.

A pool keeps the key-value caches of many streams, one a row; the working set holds those of the streams that draw
now, one a slot. `prefill` extends a stream by prompt tokens, in the pool and in its slot, and draws the first token of
each finished prompt; `decode` draws one token a step for every active slot and writes what it cached back to the pool;
`load` fills a working set of another length from the pool. Knows arrays only: which stream lies in which row, and which
request in which slot, is `sampling.py`'s business. Shape letters as in `types.py`; P rows of the pool, R rows of a
prefill call, C columns of the output buffer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from envace_jax.drawing import (
    HEADER,
    NEW,
    ROW,
    SLOT,
    SOURCE,
    START,
    Drawing,
    begin_drawing,
    draw_steps,
    fresh_drawing,
    join,
    local,
    reported,
    split,
)
from envace_jax.types import KVCache, Params, Policy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerState:
    """Everything the sampler keeps on the device. Pool and working set have the policy's layout of a cache."""

    pool: Any  # (k, v) of P rows, full length
    working: Any  # (k, v) of B slots, of the length in use
    drawing: Drawing
    by_position: Any  # the policy's, for all positions of the pool


@dataclasses.dataclass(frozen=True)
class Axes:
    """Where sequences, positions and key/value heads lie in one array of a policy's cache."""

    rows: int
    length: int
    heads: int


def cache_axes(policy: Policy) -> Any:
    """A tree like (k, v) of `Axes`, read off the shapes of small caches, so that the policy may choose its layout."""

    def shapes(rows: int, length: int) -> Any:
        cache = jax.eval_shape(lambda: policy.init_cache(rows, length, jnp.float32))
        return cache.k, cache.v

    def axes(base: Any, more_rows: Any, longer: Any) -> Axes:
        rows = next(axis for axis, size in enumerate(base.shape) if more_rows.shape[axis] != size)
        length = next(axis for axis, size in enumerate(base.shape) if longer.shape[axis] != size)
        # Heads come before head_dim and after layers, whichever of those are there.
        return Axes(rows, length, [axis for axis in range(len(base.shape)) if axis not in (rows, length)][-2])

    return jax.tree.map(axes, shapes(64, 64), shapes(128, 64), shapes(64, 128))


def fresh_state(
    policy: Policy, rows: int, slots: int, columns: int, dtype: Any, max_length: int, length: int
) -> SamplerState:
    """An empty pool of `rows` rows for `max_length` positions, and empty slots for `length`."""

    drawing = fresh_drawing(slots, columns)
    pool, working = policy.init_cache(rows, max_length, dtype), policy.init_cache(slots, length, dtype)
    return SamplerState((pool.k, pool.v), (working.k, working.v), drawing, pool.by_position)


# --- rows by number; with shards, part d of the numbers names only part d of the array ---


def take(array: jax.Array, axes: Axes, rows: jax.Array, length: int, shards: int) -> jax.Array:
    """The first `length` positions of rows i32[N] of a cache array."""
    if shards == 1:
        return _take_rows(array, axes, rows, length)

    def one_part(part: jax.Array, here: jax.Array) -> jax.Array:
        sizes = list(part.shape)
        sizes[axes.rows], sizes[axes.length] = 1, length
        kept = tuple(axis for axis in range(part.ndim) if axis != axes.rows)
        numbering = jax.lax.GatherDimensionNumbers(kept, (axes.rows,), (axes.rows,))
        return jax.lax.gather(part, here[:, None], numbering, tuple(sizes), mode="clip")

    numbers = local(rows, array.shape[axes.rows], shards)
    return join(jax.vmap(one_part)(split(array, axes.rows, shards), numbers), axes.rows)


def put(array: jax.Array, axes: Axes, rows: jax.Array, starts: jax.Array, values: jax.Array, shards: int) -> jax.Array:
    """The array with values [.., N rows, .., positions, ..] at rows i32[N], each from position starts i32[N] on."""
    if shards == 1:
        return _put_rows(array, axes, rows, starts, values.astype(array.dtype))

    def one_part(part: jax.Array, here: jax.Array, begin: jax.Array, new: jax.Array) -> jax.Array:
        kept = tuple(axis for axis in range(part.ndim) if axis != axes.rows)
        numbering = jax.lax.ScatterDimensionNumbers(kept, (axes.rows,), (axes.rows, axes.length))
        places = jnp.stack([here, begin], axis=-1)
        return jax.lax.scatter(
            part,
            places,
            new.astype(part.dtype),
            numbering,
            unique_indices=True,
            mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
        )

    numbers = local(rows, array.shape[axes.rows], shards)
    parts = jax.vmap(one_part)(
        split(array, axes.rows, shards), numbers, starts.reshape(shards, -1), split(values, axes.rows, shards)
    )
    return join(parts, axes.rows)


# A device that holds all rows copies them one by one: each is a run of memory, and the array is changed in its place,
# where a scatter over a view of parts costs a copy of the whole pool.


def _corner(array: jax.Array, axes: Axes, row: Any, start: Any) -> list[Any]:
    corner: list[Any] = [0] * array.ndim
    corner[axes.rows], corner[axes.length] = row, start
    return corner


def _take_rows(array: jax.Array, axes: Axes, rows: jax.Array, length: int) -> jax.Array:
    shape = list(array.shape)
    shape[axes.rows], shape[axes.length] = 1, length

    def one(index: jax.Array, out: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_slice(array, _corner(array, axes, jnp.maximum(rows[index], 0), 0), shape)
        return jax.lax.dynamic_update_slice(out, row, _corner(out, axes, index, 0))

    count = rows.shape[0]
    out = jnp.zeros([count if axis == axes.rows else size for axis, size in enumerate(shape)], array.dtype)
    return jax.lax.fori_loop(0, count, one, out)


def _put_rows(array: jax.Array, axes: Axes, rows: jax.Array, starts: jax.Array, values: jax.Array) -> jax.Array:
    def one(index: jax.Array, out: jax.Array) -> jax.Array:
        corner = _corner(out, axes, jnp.maximum(rows[index], 0), starts[index])
        new = jax.lax.dynamic_slice_in_dim(values, index, 1, axes.rows)
        old = jax.lax.dynamic_slice(out, corner, new.shape)
        return jax.lax.dynamic_update_slice(out, jnp.where(rows[index] < 0, old, new), corner)

    return jax.lax.fori_loop(0, rows.shape[0], one, array)


# --- the three programs ---


def load(axes: Any, shards: int, state: SamplerState, rows: jax.Array, length: int) -> SamplerState:
    """The same state with a working set of `length` positions: slot b gets the pool's row rows[b].

    The old working set is not read and may be None.
    """
    working = jax.tree.map(lambda array, at: take(array, at, rows, length, shards), state.pool, axes)
    return dataclasses.replace(state, working=working)


def prefill(
    policy: Policy,
    vocab_limit: int,
    axes: Any,
    shards: int,
    params: Params,
    state: SamplerState,
    packed: jax.Array,
) -> SamplerState:
    """Extends streams by prompt tokens; rows with FINAL draw the first token of their segment.

    `packed` is i32[R, HEADER + T] (see `pack_row`). A stream's first START positions come from the pool's row SOURCE,
    the whole goes to row ROW and to slot SLOT. Rows and slots written by a call are distinct; padding names NOWHERE.
    """
    slots, new, tokens = packed[:, SLOT], packed[:, NEW], packed[:, HEADER:]
    start = packed[:, START]
    leaf, at = jax.tree.leaves(state.working)[0], jax.tree.leaves(axes)[0]
    length = leaf.shape[at.length]

    def kept(pool: Any) -> Any:
        return jax.tree.map(lambda array, at: take(array, at, packed[:, SOURCE], length, shards), pool, axes)

    def empty(pool: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(kept, pool))

    k, v = jax.lax.cond(jnp.any(start > 0), kept, empty, state.pool)
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    valid = (steps < new[:, None]).astype(jnp.int32)
    hidden, cache = policy.apply(params, tokens, start[:, None] + steps, valid, KVCache(k, v, start, state.by_position))
    assert cache is not None
    beginning = jnp.zeros_like(start)
    pool = jax.tree.map(lambda old, at, x: _keep(old, at, packed, x, shards), state.pool, axes, (cache.k, cache.v))
    working = jax.tree.map(
        lambda old, at, x: put(old, at, slots, beginning, x, shards), state.working, axes, (cache.k, cache.v)
    )
    drawing = begin_drawing(policy, vocab_limit, shards, params, state.drawing, hidden, packed, slots, new)
    return SamplerState(pool, working, drawing, state.by_position)


def _keep(pool: jax.Array, axes: Axes, packed: jax.Array, values: jax.Array, shards: int) -> jax.Array:
    """The pool with the rows of a prefill call. On one device only rows that were copied from another are written
    whole, and of the others what the call may have added from START on."""
    rows, start, added = packed[:, ROW], packed[:, START], packed.shape[1] - HEADER
    if shards > 1 or added >= values.shape[axes.length]:
        return put(pool, axes, rows, jnp.zeros_like(start), values, shards)
    begin = jnp.minimum(start, values.shape[axes.length] - added)
    pool = _put_rows(pool, axes, rows, begin, _window(values, axes, begin, added).astype(pool.dtype))
    copied = (packed[:, SOURCE] != rows) & (start > 0)
    first = jnp.argsort(~copied, stable=True)

    def whole(index: jax.Array, pool: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_slice_in_dim(values, first[index], 1, axes.rows).astype(pool.dtype)
        return jax.lax.dynamic_update_slice(pool, row, _corner(pool, axes, rows[first[index]], 0))

    return jax.lax.fori_loop(0, copied.sum(), whole, pool)


def _window(array: jax.Array, axes: Axes, starts: jax.Array, size: int) -> jax.Array:
    """`size` positions of every row, from its own start on."""
    return jax.vmap(
        lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, size, axes.length - (axes.rows < axes.length)),
        in_axes=(axes.rows, 0),
        out_axes=axes.rows,
    )(array, starts)


def decode(
    policy: Policy,
    vocab_limit: int,
    axes: Any,
    shards: int,
    params: Params,
    state: SamplerState,
    rows: jax.Array,
    limits: jax.Array,
) -> tuple[SamplerState, jax.Array]:
    """Draws up to `limits[0]` tokens for every active slot, until at most `limits[1]` slots are active.

    Slot b's stream is the pool's row rows[b] (NOWHERE for an idle slot). Returns the state and what the host reads,
    i32[B, 2 C + 3]: tokens, the bits of their log-probabilities, how many, whether the slot is still active, and (in
    every row) the number of steps taken. Idle slots have sequence id 0: they write nothing. One that was drawing and
    has no row any longer stops.
    """

    def cache(arrays: Any, now: Drawing) -> KVCache:
        k, v = arrays
        return KVCache(k, v, now.length, state.by_position)

    begun = dataclasses.replace(state.drawing, active=state.drawing.active & (rows >= 0))
    step, working, now = draw_steps(
        policy, vocab_limit, params, cache, lambda written: (written.k, written.v), state.working, begun, limits
    )
    pool = jax.tree.map(
        lambda old, at, new: _write_back(old, at, rows, begun.length, new, now.tokens.shape[1], shards),
        state.pool,
        axes,
        working,
    )
    drawing, report = reported(now, step)
    return SamplerState(pool, working, drawing, state.by_position), report


def _write_back(
    pool: jax.Array, axes: Axes, rows: jax.Array, begun: jax.Array, working: jax.Array, width: int, shards: int
) -> jax.Array:
    """Copies the `width` positions from `begun` on, all that a call of `decode` can have cached, to the pool."""
    size = min(width, working.shape[axes.length])
    starts = jnp.minimum(begun, working.shape[axes.length] - size)
    return put(pool, axes, rows, starts, _window(working, axes, starts, size), shards)
