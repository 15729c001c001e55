"""The device half of the sampler: pure functions over the state of all slots, to be jitted with that state donated.

`prefill` writes prompt tokens into some slots' caches and draws the first token of each finished prompt; `decode`
draws one token a step for every active slot. Knows arrays only: which request sits in which slot, and what a slot
holds, is `sampling.py`'s business. Shape letters as in `types.py`; R prefill rows, C columns of the output buffer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envace_jax.draw import draw
from envace_jax.types import KVCache, Params, Policy

STOP_COLUMNS = 4  # stop ids a row may have; unused columns hold -1
# Columns of a packed prefill row before its tokens. One integer array per call: one transfer to the device.
SLOT, NEW, START, FINAL, BUDGET, KEY, TEMPERATURE, TOP_P, STOP = 0, 1, 2, 3, 4, 5, 7, 8, 9
HEADER = STOP + STOP_COLUMNS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drawing:
    """What each slot draws and has drawn. A slot's last drawn token is in `last` and not yet in its cache."""

    last: jax.Array  # i32[B], the token the next step feeds
    active: jax.Array  # bool[B], is drawing tokens
    count: jax.Array  # i32[B], tokens drawn in this segment
    budget: jax.Array  # i32[B], at most so many
    keys: jax.Array  # u32[B, 2], the segment's key
    temperature: jax.Array  # f32[B]
    top_p: jax.Array  # f32[B]
    stop_ids: jax.Array  # i32[B, STOP_COLUMNS]
    tokens: jax.Array  # i32[B, C], drawn since the host last looked
    logprobs: jax.Array  # f32[B, C]
    filled: jax.Array  # i32[B], how many of them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
    """All slots. The cache has the length of the bucket in use; see `cache_axes` for its layout."""

    cache: KVCache
    drawing: Drawing


def fresh_state(policy: Policy, slots: int, length: int, columns: int, dtype: Any) -> SlotState:
    """Empty slots whose cache has room for `length` positions."""

    def integers(*shape: int) -> jax.Array:
        return jnp.zeros((slots, *shape), jnp.int32)

    drawing = Drawing(
        last=integers(),
        active=jnp.zeros(slots, bool),
        count=integers(),
        budget=integers(),
        keys=jnp.zeros((slots, 2), jnp.uint32),
        temperature=jnp.ones(slots, jnp.float32),
        top_p=jnp.ones(slots, jnp.float32),
        stop_ids=integers(STOP_COLUMNS) - 1,
        tokens=integers(columns),
        logprobs=jnp.zeros((slots, columns), jnp.float32),
        filled=integers(),
    )
    return SlotState(policy.init_cache(slots, length, dtype), drawing)


@dataclasses.dataclass(frozen=True)
class CacheAxes:
    """Where slots, positions and key/value heads lie in the arrays of a policy's cache."""

    slots: int
    length: int
    heads: int


def cache_axes(policy: Policy) -> CacheAxes:
    """Reads the axes off the shapes of small caches, so that the policy may choose its layout.

    It may stack the layers on an axis or keep one array for each; head_dim is last, heads the last of the other axes.
    """

    def shape(slots: int, length: int) -> tuple[int, ...]:
        cache = jax.eval_shape(lambda: policy.init_cache(slots, length, jnp.float32))
        return jax.tree.leaves(cache.k)[0].shape

    base, more_slots, longer = shape(64, 64), shape(128, 64), shape(64, 128)
    slots = next(axis for axis, size in enumerate(base) if more_slots[axis] != size)
    length = next(axis for axis, size in enumerate(base) if longer[axis] != size)
    return CacheAxes(slots, length, max(set(range(len(base) - 1)) - {slots, length}))


def resize(axes: CacheAxes, state: SlotState, length: int) -> SlotState:
    """The same slots with room for `length` positions, at least as many as now."""

    def grow(array: jax.Array) -> jax.Array:
        widths = [(0, 0)] * array.ndim
        widths[axes.length] = (0, length - array.shape[axes.length])
        return jnp.pad(array, widths)

    k, v = jax.tree.map(grow, (state.cache.k, state.cache.v))
    return SlotState(KVCache(k, v, state.cache.lengths), state.drawing)


def pack_row(
    row: np.ndarray,
    slot: int,
    tokens: np.ndarray,
    start: int,
    final: bool,
    budget: int,
    key: np.ndarray,
    temperature: float,
    top_p: float,
    stop_ids: tuple[int, ...],
) -> None:
    """Fills one row i32[HEADER + T] of a prefill call; floats and unsigned words travel as their bits."""
    row[[SLOT, NEW, START, FINAL, BUDGET]] = slot, len(tokens), start, final, budget
    row[KEY : KEY + 2] = key.view(np.int32)
    row[[TEMPERATURE, TOP_P]] = np.array([temperature, top_p], np.float32).view(np.int32)
    row[STOP : STOP + STOP_COLUMNS] = -1
    row[STOP : STOP + len(stop_ids)] = stop_ids
    row[HEADER : HEADER + len(tokens)] = tokens


def _take(array: jax.Array, axis: int, slots: jax.Array, shards: int) -> jax.Array:
    """Rows `slots` i32[R] of an array whose slots lie on `axis`.

    With shards, row group d reads only slot group d, so that no device reads another's slots.
    """
    before = (slice(None),) * axis
    if shards == 1:
        return array[(*before, slots)]
    shape, per_shard = array.shape, array.shape[axis] // shards
    split = array.reshape(*shape[:axis], shards, per_shard, *shape[axis + 1 :])
    local = slots.reshape(shards, -1) % per_shard
    rows = jax.vmap(lambda part, index: part[(*before, index)], in_axes=(axis, 0), out_axes=axis)(split, local)
    return rows.reshape(*shape[:axis], -1, *shape[axis + 1 :])


def _put(array: jax.Array, axis: int, slots: jax.Array, rows: jax.Array, shards: int) -> jax.Array:
    """The inverse of `_take`: the array with its rows `slots` replaced."""
    before = (slice(None),) * axis
    if shards == 1:
        return array.at[(*before, slots)].set(rows, unique_indices=True)
    shape, per_shard = array.shape, array.shape[axis] // shards
    split = array.reshape(*shape[:axis], shards, per_shard, *shape[axis + 1 :])
    local = slots.reshape(shards, -1) % per_shard
    parts = rows.reshape(*shape[:axis], shards, -1, *shape[axis + 1 :])

    def put(part: jax.Array, index: jax.Array, new: jax.Array) -> jax.Array:
        return part.at[(*before, index)].set(new, unique_indices=True)

    return jax.vmap(put, in_axes=(axis, 0, axis), out_axes=axis)(split, local, parts).reshape(shape)


def prefill(
    policy: Policy,
    vocab_limit: int,
    axes: CacheAxes,
    shards: int,
    params: Params,
    state: SlotState,
    packed: jax.Array,
) -> SlotState:
    """Appends each row's tokens to its slot's cache, cut to `START` positions first; final rows draw a token.

    `packed` is i32[R, HEADER + T] (see `pack_row`). Slots of a call are distinct; rows without tokens (NEW = 0) are
    padding and name a slot that must stay as it is. With R = B, row b is slot b and the whole cache is worked on in
    place.
    """
    slots, new, tokens = packed[:, SLOT], packed[:, NEW], packed[:, HEADER:]
    everything = packed.shape[0] == state.drawing.last.shape[0]

    def take(array: jax.Array, axis: int = 0) -> jax.Array:
        return array if everything else _take(array, axis, slots, shards)

    def put(array: jax.Array, rows: jax.Array, axis: int = 0) -> jax.Array:
        return rows if everything else _put(array, axis, slots, rows, shards)

    start = jnp.where(new > 0, packed[:, START], take(state.cache.lengths))
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    cached = (state.cache.k, state.cache.v)
    k, v = jax.tree.map(lambda array: take(array, axes.slots), cached)
    valid = (steps < new[:, None]).astype(jnp.int32)
    hidden, rows = policy.apply(params, tokens, start[:, None] + steps, valid, KVCache(k, v, start))
    assert rows is not None
    k, v = jax.tree.map(lambda array, written: put(array, written, axes.slots), cached, (rows.k, rows.v))
    cache = KVCache(k, v, put(state.cache.lengths, rows.lengths))

    last_hidden = jnp.take_along_axis(hidden, jnp.maximum(new - 1, 0)[:, None, None], axis=1)[:, 0]
    columns = state.drawing.tokens.shape[1]
    drawn = _first_draw(policy.logits(params, last_hidden), packed, columns, vocab_limit)
    final = packed[:, FINAL] > 0

    def put_final(old: jax.Array, rows: jax.Array) -> jax.Array:
        chosen = final.reshape(-1, *(1,) * (rows.ndim - 1))
        return put(old, jnp.where(chosen, rows, take(old)))

    return SlotState(cache, jax.tree.map(put_final, state.drawing, drawn))


def _first_draw(logits: jax.Array, packed: jax.Array, columns: int, vocab_limit: int) -> Drawing:
    """The state of R rows that have just drawn the first token of their segment from logits f32[R, V]."""
    count = packed.shape[0]
    keys = jax.lax.bitcast_convert_type(packed[:, KEY : KEY + 2], jnp.uint32)
    temperature = jax.lax.bitcast_convert_type(packed[:, TEMPERATURE], jnp.float32)
    top_p = jax.lax.bitcast_convert_type(packed[:, TOP_P], jnp.float32)
    budget, stop_ids = packed[:, BUDGET], packed[:, STOP : STOP + STOP_COLUMNS]
    token, logprob = draw(logits, keys, jnp.zeros(count, jnp.int32), temperature, top_p, vocab_limit)
    return Drawing(
        last=token,
        active=~((token[:, None] == stop_ids).any(-1) | (budget <= 1)),
        count=jnp.ones(count, jnp.int32),
        budget=budget,
        keys=keys,
        temperature=temperature,
        top_p=top_p,
        stop_ids=stop_ids,
        tokens=jnp.zeros((count, columns), jnp.int32).at[:, 0].set(token),
        logprobs=jnp.zeros((count, columns), jnp.float32).at[:, 0].set(logprob),
        filled=jnp.ones(count, jnp.int32),
    )


def decode(
    policy: Policy, vocab_limit: int, params: Params, state: SlotState, limits: jax.Array
) -> tuple[SlotState, jax.Array]:
    """Draws up to `limits[0]` tokens for every active slot, until at most `limits[1]` slots are active.

    Returns the state and what the host reads, i32[B, 2 C + 3]: tokens, the bits of their log-probabilities, how
    many, whether the slot is still active, and (in every row) the number of steps taken. Idle slots have sequence id
    0: they write nothing.
    """

    def wanted(carry: tuple[jax.Array, SlotState]) -> jax.Array:
        step, state = carry
        return (step < limits[0]) & (jnp.sum(state.drawing.active) > limits[1])

    def one(carry: tuple[jax.Array, SlotState]) -> tuple[jax.Array, SlotState]:
        step, state = carry
        cache, now = state.cache, state.drawing
        active = now.active
        valid = active[:, None].astype(jnp.int32)
        hidden, written = policy.apply(params, now.last[:, None], cache.lengths[:, None], valid, cache)
        assert written is not None
        logits = policy.logits(params, hidden[:, 0])
        token, logprob = draw(logits, now.keys, now.count, now.temperature, now.top_p, vocab_limit)
        count = now.count + active
        stopped = (token[:, None] == now.stop_ids).any(-1) | (count >= now.budget)
        here = (jnp.arange(now.tokens.shape[1]) == now.filled[:, None]) & active[:, None]
        now = dataclasses.replace(
            now,
            last=jnp.where(active, token, now.last),
            active=active & ~stopped,
            count=count,
            tokens=jnp.where(here, token[:, None], now.tokens),
            logprobs=jnp.where(here, logprob[:, None], now.logprobs),
            filled=now.filled + active,
        )
        return step + 1, SlotState(written, now)

    step, state = jax.lax.while_loop(wanted, one, (jnp.int32(0), state))
    now = state.drawing
    report = jnp.concatenate(
        [
            now.tokens,
            jax.lax.bitcast_convert_type(now.logprobs, jnp.int32),
            now.filled[:, None],
            now.active[:, None].astype(jnp.int32),
            jnp.broadcast_to(step, (now.last.shape[0], 1)),
        ],
        axis=1,
    )
    return SlotState(state.cache, dataclasses.replace(now, filled=jnp.zeros_like(now.filled))), report
