"""The output head and a loss that is a sum over tokens, in one pass over the trained tokens.

A chunk's logits are formed once and give log-probabilities, loss and both gradients before they are dropped: three
products with the head, where recomputing them in a backward pass takes four. Tokens that are not trained cost nothing,
and no [B, T, V] array exists. A chunk walks the vocabulary in blocks, so that what is formed from its logits, and the
part of the head that meets them, stay near the processor. Knows hidden states, an output projection and a loss given as
a function; knows nothing of networks, roles or what the loss means.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal
from jax.sharding import Mesh

from envace_jax.logprobs import check_chunking, chunk_logits
from envace_jax.sharding import RULES, axis_size, constrain

Stats = dict[str, jax.Array]
# (logprobs f32[G, C], mask bool[G, C], inputs [G, C], shared) -> (sum over tokens where mask, statistics)
TokenLoss = Callable[[jax.Array, jax.Array, Any, Any], tuple[jax.Array, Stats]]


def head_loss(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    inputs: Any,
    shared: Any,
    token_loss: TokenLoss,
    *,
    temperature: float = 1.0,
    vocab_limit: int | None = None,
    chunk: int = 1024,
    vocab_block: int = 8192,
    groups: int = 1,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, Stats]:
    """`token_loss` of log softmax(hidden @ head / temperature)[targets] where `mask`; has gradients in hidden and head.

    Only the trained tokens meet the head: they are brought to the front, and chunks of them are walked up to the last.
    The gradients are formed in the same walk, and only where they are asked for: a head that is not differentiated
    costs no sum of its size.

    Args:
      hidden: [B, T, D], any float dtype.
      head: [D, V].
      targets: i32[B, T]; the target at t is scored by the hidden state at t (the caller shifts).
      mask: bool[B, T]. What the other arrays hold where it is False, nan and inf included, reaches nothing.
      inputs: a pytree of [B, T] arrays that `token_loss` sees beside the log-probabilities; no gradient.
      shared: a pytree of arrays that it sees whole in every chunk, such as denominators; no gradient.
      token_loss: a sum over the tokens of its mask, so that the chunks' results add up (`add_stats`); it must ignore
        the other places. Which tokens share a chunk, and their order, mean nothing.
      temperature: the one the tokens were sampled at (> 0).
      vocab_limit: ids at or above it (rows that pad the embedding) have probability 0. None: all V are real.
      chunk: how many tokens have their logits in memory at once, all groups together (at least one of each).
      vocab_block: the most ids of a block; a vocabulary that the mesh cuts is one block.
      groups: equal parts of the rows, in order, whose trained tokens are gathered each by itself. Give the number of
        pieces that a mesh cuts the rows into: then no token leaves its device, and the gradient of the head is summed
        over the devices once, not in every chunk. The time is that of the group that trains most.
      mesh: where the arrays lie, if on one.

    Returns:
      The loss f32[] and `token_loss`'s statistics, which carry no gradient.
    """
    check_chunking(temperature, chunk)
    rows, time = targets.shape
    if groups < 1 or rows % groups:
        raise ValueError(f"{rows} rows cannot be cut into {groups} equal groups")
    length = rows // groups * time
    # Rows of the vocabulary first, as a tied embedding is stored: there the two transpositions cancel.
    vocabulary = head.T
    whole = mesh is not None and axis_size(mesh, RULES["vocab"]) > 1  # a block must not lie across devices
    blocks = 1 if whole else -(-vocabulary.shape[0] // vocab_block)
    plan = _Plan(
        token_loss=token_loss,
        temperature=float(temperature),
        limit=vocabulary.shape[0] if vocab_limit is None else vocab_limit,
        width=min(length, max(1, chunk // groups)),
        blocks=blocks,
        block=-(-vocabulary.shape[0] // blocks),
        mesh=mesh,
    )
    hidden, mask, targets, inputs = jax.tree.map(
        lambda x: x.reshape(groups, length, *x.shape[2:]), (hidden, mask, targets, inputs)
    )
    return _fused(plan, hidden, vocabulary, mask, targets, inputs, shared)


def add_stats(total: Stats, part: Stats) -> Stats:
    """Statistics of two parts of a batch as those of both: the maximum of what is named `*_max`, else the sum."""
    return {k: jnp.maximum(v, part[k]) if k.endswith("_max") else v + part[k] for k, v in total.items()}


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is settled while tracing."""

    token_loss: TokenLoss
    temperature: float
    limit: int
    width: int  # tokens of one group in a chunk
    blocks: int  # of the vocabulary
    block: int  # ids in a block; the last one begins early enough to be full
    mesh: Mesh | None


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """One chunk [G, C] of trained tokens; where `mask` is False it holds zeros or some other token's values."""

    hidden: jax.Array  # [G, C, D]
    targets: jax.Array  # i32[G, C]
    mask: jax.Array  # bool[G, C]
    inputs: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(
    plan: _Plan,
    hidden: jax.Array,
    vocabulary: jax.Array,
    mask: jax.Array,
    targets: jax.Array,
    inputs: Any,
    shared: Any,
) -> tuple[jax.Array, Stats]:
    """hidden [G, N, D], vocabulary [V, D], the others [G, N]: loss and statistics alone, without gradients."""
    steps, take = _compacted(plan, hidden, mask, targets, inputs)
    whole = _whole(plan, vocabulary)

    def part(number: jax.Array) -> tuple[jax.Array, Stats]:
        tokens = take(number)
        _, _, logprobs = _score(plan, tokens, whole, None)
        return plan.token_loss(logprobs, tokens.mask, tokens.inputs, shared)

    def body(number: jax.Array, total: tuple[jax.Array, Stats]) -> tuple[jax.Array, Stats]:
        loss, stats = part(number)
        return total[0] + loss, add_stats(total[1], stats)

    return lax.fori_loop(0, steps, body, _zeros_like(part))


def _forward(plan: _Plan, *arguments: Any) -> tuple[tuple[jax.Array, Stats], tuple[jax.Array, jax.Array | None]]:
    """Loss and statistics, and the gradients of the loss in hidden [G, N, D] and vocabulary [V, D].

    `arguments` are those of `_fused`, each array with whether a gradient in it is asked for.
    """
    trained = arguments[1].perturbed
    hidden, vocabulary, mask, targets, inputs, shared = jax.tree.map(
        lambda x: x.value, arguments, is_leaf=lambda x: isinstance(x, CustomVJPPrimal)
    )
    steps, take = _compacted(plan, hidden, mask, targets, inputs)
    groups, length, width = hidden.shape
    whole = _whole(plan, vocabulary)

    def part(number: jax.Array, kept: jax.Array, sums: jax.Array | None) -> Any:
        tokens = take(number)
        logits, normalizers, logprobs = _score(plan, tokens, whole, kept)
        assert logits is not None

        def loss_of(logprobs: jax.Array) -> tuple[jax.Array, Stats]:
            return plan.token_loss(logprobs, tokens.mask, tokens.inputs, shared)

        loss, pull, stats = jax.vjp(loss_of, logprobs, has_aux=True)
        weight = jnp.where(tokens.mask, pull(jnp.ones_like(loss))[0], 0.0) / plan.temperature
        d_states, sums = _gradients(plan, tokens, whole, logits, normalizers, weight, sums)
        return loss, stats, d_states.astype(hidden.dtype), logits, sums

    def body(number: jax.Array, total: Any) -> Any:
        loss, stats, d_states, kept, sums = part(number, *total[3:])
        in_front = lax.dynamic_update_slice_in_dim(total[2], d_states, number * plan.width, 1)
        return total[0] + loss, add_stats(total[1], stats), in_front, kept, sums

    in_front = jnp.zeros((groups, length + -length % plan.width, width), hidden.dtype)
    kept = jnp.zeros((plan.blocks, groups, plan.width, plan.block), jnp.float32)
    kept = constrain(kept, plan.mesh, None, "batch", None, "vocab")
    # A sum for each group, so that devices add theirs up without a word to each other until the end.
    sums = None
    if trained:
        sums = constrain(jnp.zeros((groups, *vocabulary.shape), jnp.float32), plan.mesh, "batch", "vocab", None)
    loss, stats = _zeros_like(lambda number: part(number, kept, sums)[:2])
    loss, stats, in_front, _, sums = lax.fori_loop(0, steps, body, (loss, stats, in_front, kept, sums))

    place = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    d_hidden = jnp.where(mask[..., None], _take(in_front, place), 0)
    if sums is None:
        return (loss, stats), (d_hidden, None)
    d_vocabulary = constrain(jnp.sum(sums, axis=0), plan.mesh, "vocab", "embed")
    return (loss, stats), (d_hidden, d_vocabulary.astype(vocabulary.dtype))


def _backward(plan: _Plan, gradients: tuple[jax.Array, jax.Array | None], cotangents: tuple[jax.Array, Any]) -> tuple:
    scaled = jax.tree.map(lambda g: (g.astype(jnp.float32) * cotangents[0]).astype(g.dtype), gradients)
    return *scaled, None, None, None, None


_fused.defvjp(_forward, _backward, symbolic_zeros=True)


def _compacted(
    plan: _Plan, hidden: jax.Array, mask: jax.Array, targets: jax.Array, inputs: Any
) -> tuple[jax.Array, Callable[[jax.Array], _Tokens]]:
    """How many chunks hold a trained token of some group, i32[], and a function that gives the chunk of a number."""
    counts = jnp.sum(mask, axis=1, dtype=jnp.int32)
    order = jnp.argsort(~mask, axis=1, stable=True)  # trained tokens first, each in its turn
    order = jnp.pad(order, ((0, 0), (0, -order.shape[1] % plan.width)))

    def take(number: jax.Array) -> _Tokens:
        start = number * plan.width
        place = lax.dynamic_slice_in_dim(order, start, plan.width, 1)
        trained = start + jnp.arange(plan.width) < counts[:, None]
        return _Tokens(
            # A state that is not trained may be inf or nan, and 0 times that would spoil the gradient of the head.
            hidden=jnp.where(trained[..., None], _take(hidden, place), 0),
            targets=_take(targets, place),
            mask=trained,
            inputs=jax.tree.map(lambda x: _take(x, place), inputs),
        )

    return -(-jnp.max(counts) // plan.width), take


def _whole(plan: _Plan, vocabulary: jax.Array) -> jax.Array:
    """vocabulary [V, D] with all D on every device that needs its ids: gathered once, not in every chunk."""
    return constrain(vocabulary, plan.mesh, "vocab", None)


def _take(array: jax.Array, place: jax.Array) -> jax.Array:
    """array [G, N] or [G, N, D] at place i32[G, C] of each group."""
    index = place if array.ndim == 2 else place[..., None]
    return jnp.take_along_axis(array, index, axis=1, mode="promise_in_bounds")


def _score(
    plan: _Plan, tokens: _Tokens, vocabulary: jax.Array, kept: jax.Array | None
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """`kept` f32[blocks, G, C, block] with the chunk's logits, their log-sum-exp and log-probabilities f32[G, C]."""

    def body(number: jax.Array, carry: Any) -> Any:
        kept, top, total, picked = carry
        first, part = _block(plan, vocabulary, number, 0)
        ids, new = _ids(plan, first, number)
        logits = chunk_logits(tokens.hidden, part.T, plan.temperature, plan.block)
        if plan.limit < vocabulary.shape[0] or plan.blocks * plan.block > vocabulary.shape[0]:
            logits = jnp.where(new & (ids < plan.limit), logits, -jnp.inf)
        higher = jnp.maximum(top, jnp.max(logits, axis=-1))
        total = total * jnp.exp(top - higher) + jnp.sum(jnp.exp(logits - higher[..., None]), axis=-1)
        place = tokens.targets - first
        here = jnp.take_along_axis(logits, jnp.clip(place, 0, plan.block - 1)[..., None], axis=-1)[..., 0]
        own = (tokens.targets >= number * plan.block) & (place < plan.block)
        if kept is not None:
            kept = lax.dynamic_update_index_in_dim(kept, logits, number, 0)
        return kept, higher, total, jnp.where(own, here, picked)

    zeros = jnp.zeros(tokens.targets.shape, jnp.float32)
    lowest = jnp.full_like(zeros, jnp.finfo(jnp.float32).min)  # finite: a block may hold no id below the limit
    kept, top, total, picked = lax.fori_loop(0, plan.blocks, body, (kept, lowest, zeros, zeros))
    normalizers = top + jnp.log(total)
    return kept, normalizers, picked - normalizers


def _gradients(
    plan: _Plan,
    tokens: _Tokens,
    vocabulary: jax.Array,
    kept: jax.Array,
    normalizers: jax.Array,
    weight: jax.Array,
    sums: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Gradients of the sum of weight f32[G, C] x log-probability: in the states f32[G, C, D], and `sums`
    f32[G, V, D] with those in the vocabulary added, unless it is None."""

    def body(number: jax.Array, carry: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array | None]:
        d_states, sums = carry
        first, part = _block(plan, vocabulary, number, 0)
        ids, new = _ids(plan, first, number)
        logits = lax.dynamic_index_in_dim(kept, number, 0, keepdims=False)
        target = (ids == tokens.targets[..., None]) & new
        d_logits = weight[..., None] * (target - jnp.exp(logits - normalizers[..., None]))
        d_states += jnp.einsum("gcv,vd->gcd", d_logits, part.astype(jnp.float32))
        if sums is None:
            return d_states, None
        d_part = jnp.einsum("gcv,gcd->gvd", d_logits, tokens.hidden.astype(jnp.float32))
        if plan.blocks == 1:
            return d_states, sums + d_part
        _, old = _block(plan, sums, number, 1)
        return d_states, lax.dynamic_update_slice_in_dim(sums, old + d_part, first, 1)

    zeros = jnp.zeros(tokens.hidden.shape, jnp.float32)
    return lax.fori_loop(0, plan.blocks, body, (zeros, sums))


def _block(plan: _Plan, array: jax.Array, number: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """The first id of a block, and the block of an array with the vocabulary on `axis`."""
    if plan.blocks == 1:
        return jnp.zeros_like(number), array
    first = jnp.minimum(number * plan.block, array.shape[axis] - plan.block)
    return first, lax.dynamic_slice_in_dim(array, first, plan.block, axis)


def _ids(plan: _Plan, first: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The ids of a block, i32[block], and which of them, bool[block], were not in the block before it already."""
    ids = first + jnp.arange(plan.block)
    return ids, ids >= number * plan.block


def _zeros_like(part: Callable[[jax.Array], Any]) -> Any:
    """Zeros in the shape of what `part` gives for a chunk; every statistic is at least 0, so maxima begin there too."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(part, jnp.zeros((), jnp.int32)))
