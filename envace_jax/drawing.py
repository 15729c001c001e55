"""What each slot draws and has drawn, on the device: the half of the sampler that knows nothing of caches.

A prefill call's rows as integers, the first draw of a segment, and the loop that draws a token a step for every active
slot. `decoding.py` and `paged_decoding.py` put it together with their caches. Shape letters as in `types.py`; R rows of
a prefill call, C columns of the output buffer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envace_jax.draw import draw, draw_with, random_words
from envace_jax.types import Params, Policy

STOP_COLUMNS = 4  # stop ids a row may have; unused columns hold -1
# Columns of a packed prefill row before its tokens. One integer array per call: one transfer to the device.
SLOT, ROW, SOURCE, NEW, START, FINAL, BUDGET, KEY, TEMPERATURE, TOP_P, STOP = 0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11
HEADER = STOP + STOP_COLUMNS
NOWHERE = -1  # a slot or row of padding: nothing is read from it that counts, nothing is written


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drawing:
    """What each slot draws and has drawn. A slot's last drawn token is in `last` and not yet in its cache."""

    length: jax.Array  # i32[B], tokens in the slot's cache
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


def fresh_drawing(slots: int, columns: int) -> Drawing:
    """Of slots that draw nothing."""

    def integers(*shape: int) -> jax.Array:
        return jnp.zeros((slots, *shape), jnp.int32)

    return Drawing(
        length=integers(),
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


def empty_call(rows: int, length: int) -> np.ndarray:
    """i32[rows, HEADER + length], a prefill call of padding alone, to be filled in."""
    packed = np.zeros((rows, HEADER + length), np.int32)
    packed[:, [SLOT, ROW, SOURCE]] = NOWHERE
    return packed


def pack_row(
    row: np.ndarray,
    slot: int,
    pool_row: int,
    source: int,
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
    row[[SLOT, ROW, SOURCE, NEW]] = slot, pool_row, source, len(tokens)
    row[[START, FINAL, BUDGET]] = start, final, budget
    row[KEY : KEY + 2] = key.view(np.int32)
    row[[TEMPERATURE, TOP_P]] = np.array([temperature, top_p], np.float32).view(np.int32)
    row[STOP : STOP + STOP_COLUMNS] = -1
    row[STOP : STOP + len(stop_ids)] = stop_ids
    row[HEADER : HEADER + len(tokens)] = tokens


# --- by number; with shards, part d of the numbers names only part d of the array ---


def split(array: jax.Array, axis: int, shards: int) -> jax.Array:
    """[..., N, ...] -> [shards, ..., N / shards, ...]: a view of each device's own part."""
    shape = array.shape
    split = array.reshape(*shape[:axis], shards, shape[axis] // shards, *shape[axis + 1 :])
    return jnp.moveaxis(split, axis, 0)


def join(parts: jax.Array, axis: int) -> jax.Array:
    parts = jnp.moveaxis(parts, 0, axis)
    return parts.reshape(*parts.shape[:axis], -1, *parts.shape[axis + 2 :])


def local(numbers: jax.Array, count: int, shards: int) -> jax.Array:
    """i32[shards, N / shards], numbers within each part of `count / shards`; NOWHERE lies behind its end."""
    size = count // shards
    return jnp.where(numbers < 0, size, numbers % size).reshape(shards, -1)


def put_slots(old: jax.Array, slots: jax.Array, new: jax.Array, shards: int) -> jax.Array:
    """A per-slot array [B, ...] with its slots i32[R] replaced by new [R, ...]."""
    if shards == 1:
        return old.at[jnp.where(slots < 0, old.shape[0], slots)].set(new, mode="drop", unique_indices=True)
    numbers = local(slots, old.shape[0], shards)

    def one_part(part: jax.Array, here: jax.Array, values: jax.Array) -> jax.Array:
        return part.at[here].set(values, mode="drop", unique_indices=True)

    return join(jax.vmap(one_part)(split(old, 0, shards), numbers, split(new, 0, shards)), 0)


# --- drawing ---


def begin_drawing(
    policy: Policy,
    vocab_limit: int,
    shards: int,
    params: Params,
    drawing: Drawing,
    hidden: jax.Array,
    packed: jax.Array,
    slots: jax.Array,
    new: jax.Array,
) -> Drawing:
    """The drawing state after a prefill call with hidden states [R, T, D]; slots and new are of `packed`."""
    last_hidden = jnp.take_along_axis(hidden, jnp.maximum(new - 1, 0)[:, None, None], axis=1)[:, 0]
    columns = drawing.tokens.shape[1]
    drawn = _first_draw(policy.logits(params, last_hidden), packed, columns, vocab_limit)
    final = jnp.where(packed[:, FINAL] > 0, slots, NOWHERE)
    return jax.tree.map(lambda old, x: put_slots(old, final, x, shards), drawing, drawn)


def _first_draw(logits: jax.Array, packed: jax.Array, columns: int, vocab_limit: int) -> Drawing:
    """The state of R rows that have just drawn the first token of their segment from logits f32[R, V]."""
    count = packed.shape[0]
    keys = jax.lax.bitcast_convert_type(packed[:, KEY : KEY + 2], jnp.uint32)
    temperature = jax.lax.bitcast_convert_type(packed[:, TEMPERATURE], jnp.float32)
    top_p = jax.lax.bitcast_convert_type(packed[:, TOP_P], jnp.float32)
    budget, stop_ids = packed[:, BUDGET], packed[:, STOP : STOP + STOP_COLUMNS]
    token, logprob = draw(logits, keys, jnp.zeros(count, jnp.int32), temperature, top_p, vocab_limit)
    return Drawing(
        length=packed[:, START] + packed[:, NEW],
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


def draw_steps(
    policy: Policy,
    vocab_limit: int,
    params: Params,
    cache_of: Callable[[Any, Drawing], Any],
    arrays_of: Callable[[Any], Any],
    arrays: Any,
    drawing: Drawing,
    limits: jax.Array,
) -> tuple[jax.Array, Any, Drawing]:
    """The loop of `decode` over the arrays of any cache: `cache_of` makes it one that the policy takes, `arrays_of`
    undoes that. Returns the steps taken, the arrays and the drawing state."""

    def wanted(carry: tuple[jax.Array, Any, Drawing]) -> jax.Array:
        step, _, now = carry
        return (step < limits[0]) & (jnp.sum(now.active) > limits[1])

    def one(carry: tuple[jax.Array, Any, Drawing]) -> tuple[jax.Array, Any, Drawing]:
        step, arrays, now = carry
        valid = now.active[:, None].astype(jnp.int32)
        cache = cache_of(arrays, now)
        hidden, written = policy.apply(params, now.last[:, None], now.length[:, None], valid, cache)
        logits = policy.logits(params, hidden[:, 0])
        here = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, step, keepdims=False), words)
        return step + 1, arrays_of(written), _next_draw(now, logits, here, written.lengths, vocab_limit)

    # The random words of the whole chunk at once: a Threefry block is a loop of small operations, dear in every step.
    ahead = drawing.count + jnp.arange(drawing.tokens.shape[1])[:, None]
    words = jax.vmap(random_words, in_axes=(None, 0))(drawing.keys, ahead)
    return jax.lax.while_loop(wanted, one, (jnp.int32(0), arrays, drawing))


def reported(now: Drawing, step: jax.Array) -> tuple[Drawing, jax.Array]:
    """The state with its output buffer emptied, and what the host reads of it after `step` steps, see `decode`."""
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
    return dataclasses.replace(now, filled=jnp.zeros_like(now.filled)), report


def _next_draw(
    now: Drawing, logits: jax.Array, words: tuple[jax.Array, jax.Array], lengths: jax.Array, vocab_limit: int
) -> Drawing:
    """The state after every active slot has drawn a token from logits f32[B, V]; words are `random_words`."""
    token, logprob = draw_with(logits, words, now.temperature, now.top_p, vocab_limit)
    active, count = now.active, now.count + now.active
    stopped = (token[:, None] == now.stop_ids).any(-1) | (count >= now.budget)
    here = (jnp.arange(now.tokens.shape[1]) == now.filled[:, None]) & active[:, None]
    return dataclasses.replace(
        now,
        length=lengths,
        last=jnp.where(active, token, now.last),
        active=active & ~stopped,
        count=count,
        tokens=jnp.where(here, token[:, None], now.tokens),
        logprobs=jnp.where(here, logprob[:, None], now.logprobs),
        filled=now.filled + active,
    )
