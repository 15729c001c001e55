"""`decoding.py` for a cache in pages: no pool of whole rows, no working set, nothing to load.

The host says which pages a stream has (`pages.py`) with every call, so sharing and giving them up moves nothing here.
Shape letters as in `decoding.py`; M pages a stream may have.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from envace_jax.drawing import (
    HEADER,
    NEW,
    SLOT,
    SOURCE,
    START,
    Drawing,
    begin_drawing,
    draw_steps,
    fresh_drawing,
    reported,
)
from envace_jax.types import PagedCache, Params, Policy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedState:
    """Everything that a sampler with pages keeps on the device."""

    pages: jax.Array
    drawing: Drawing
    by_position: Any  # the policy's, for all positions of a stream


def fresh_state(
    policy: Policy, pages: int, page_size: int, slots: int, columns: int, dtype: Any, length: int
) -> PagedState:
    """Empty pages for streams of up to `length` positions, and slots that draw nothing."""
    arrays, by_position = policy.init_pages(pages, page_size, length, dtype)
    return PagedState(arrays, fresh_drawing(slots, columns), by_position)


def prefill(
    policy: Policy,
    vocab_limit: int,
    shards: int,
    width: int,
    params: Params,
    state: PagedState,
    packed: jax.Array,
) -> PagedState:
    """Extends streams by prompt tokens; rows with FINAL draw the first token of their segment.

    `packed` is i32[R, HEADER + T + M] (see `pack_row`; the stream's pages come last, M is `width`). A stream's pages
    hold its first START positions, except that those in the page it writes first are found in page SOURCE.
    """
    tokens, table = packed[:, HEADER:-width], packed[:, -width:]
    slots, start, new = packed[:, SLOT], packed[:, START], packed[:, NEW]
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    valid = (steps < new[:, None]).astype(jnp.int32)
    cache = PagedCache(state.pages, table, packed[:, SOURCE], start, state.by_position)
    hidden, cache = policy.apply(params, tokens, start[:, None] + steps, valid, cache)
    drawing = begin_drawing(policy, vocab_limit, shards, params, state.drawing, hidden, packed, slots, new)
    return PagedState(cache.pages, drawing, state.by_position)


def decode(
    policy: Policy,
    vocab_limit: int,
    params: Params,
    state: PagedState,
    table: jax.Array,
    limits: jax.Array,
) -> tuple[PagedState, jax.Array]:
    """`decoding.decode` for slots whose streams have the pages table i32[B, M].

    A slot without pages draws nothing, and what it was drawing stays as it is.
    """
    held = table[:, 0] >= 0

    def cache(pages: jax.Array, now: Drawing) -> PagedCache:
        return PagedCache(pages, table, table[:, 0], now.length, state.by_position)

    begun = dataclasses.replace(state.drawing, active=state.drawing.active & held)
    step, pages, now = draw_steps(
        policy, vocab_limit, params, cache, lambda written: written.pages, state.pages, begun, limits
    )
    now = dataclasses.replace(now, active=jnp.where(held, now.active, state.drawing.active))
    drawing, report = reported(now, step)
    return PagedState(pages, drawing, state.by_position), report
