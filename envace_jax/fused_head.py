"""The output head and a loss that is a sum over tokens, in one pass over the trained tokens.

A chunk's logits are formed once and give log-probabilities, loss and both gradients before they are dropped: three
products with the head, where recomputing them in a backward pass takes four. Tokens that are not trained cost nothing,
and no [B, T, V] array exists. Knows hidden states, an output projection and a loss given as a function; knows nothing
of networks, roles or what the loss means.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from envace_jax.logprobs import check_chunking, chunk_logits
from envace_jax.sharding import constrain

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
    groups: int = 1,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, Stats]:
    """`token_loss` of log softmax(hidden @ head / temperature)[targets] where `mask`; has gradients in hidden and head.

    Only the trained tokens meet the head: they are brought to the front, and chunks of them are walked up to the last.
    The gradients are formed in the same walk, and only where they are asked for.

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
    plan = _Plan(
        token_loss=token_loss,
        temperature=float(temperature),
        limit=vocabulary.shape[0] if vocab_limit is None else vocab_limit,
        width=min(length, max(1, chunk // groups)),
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
        _, _, logprobs = _score(plan, tokens, whole)
        return plan.token_loss(logprobs, tokens.mask, tokens.inputs, shared)

    def body(number: jax.Array, total: tuple[jax.Array, Stats]) -> tuple[jax.Array, Stats]:
        loss, stats = part(number)
        return total[0] + loss, add_stats(total[1], stats)

    return lax.fori_loop(0, steps, body, _zeros_like(part))


def _forward(
    plan: _Plan,
    hidden: jax.Array,
    vocabulary: jax.Array,
    mask: jax.Array,
    targets: jax.Array,
    inputs: Any,
    shared: Any,
) -> tuple[tuple[jax.Array, Stats], tuple[jax.Array, jax.Array]]:
    """Loss and statistics, and the gradients of the loss in hidden [G, N, D] and vocabulary [V, D]."""
    steps, take = _compacted(plan, hidden, mask, targets, inputs)
    groups, length, width = hidden.shape
    whole = _whole(plan, vocabulary)

    def part(number: jax.Array) -> tuple[jax.Array, Stats, jax.Array, jax.Array]:
        tokens = take(number)
        logits, normalizers, logprobs = _score(plan, tokens, whole)

        def loss_of(logprobs: jax.Array) -> tuple[jax.Array, Stats]:
            return plan.token_loss(logprobs, tokens.mask, tokens.inputs, shared)

        loss, pull, stats = jax.vjp(loss_of, logprobs, has_aux=True)
        weight = jnp.where(tokens.mask, pull(jnp.ones_like(loss))[0], 0.0) / plan.temperature
        target = jnp.arange(logits.shape[-1]) == tokens.targets[..., None]
        d_logits = weight[..., None] * (target - jnp.exp(logits - normalizers[..., None]))
        d_states = jnp.einsum("gcv,vd->gcd", d_logits, whole.astype(jnp.float32))
        d_vocabulary = jnp.einsum("gcv,gcd->gvd", d_logits, tokens.hidden.astype(jnp.float32))
        return loss, stats, d_states.astype(hidden.dtype), d_vocabulary

    def body(number: jax.Array, total: Any) -> Any:
        loss, stats, d_states, d_vocabulary = part(number)
        in_front = lax.dynamic_update_slice_in_dim(total[2], d_states, number * plan.width, 1)
        return total[0] + loss, add_stats(total[1], stats), in_front, total[3] + d_vocabulary

    loss, stats = _zeros_like(lambda number: part(number)[:2])
    in_front = jnp.zeros((groups, length + -length % plan.width, width), hidden.dtype)
    # A sum for each group, so that devices add theirs up without a word to each other until the end.
    sums = constrain(jnp.zeros((groups, *vocabulary.shape), jnp.float32), plan.mesh, "batch", "vocab", None)
    loss, stats, in_front, sums = lax.fori_loop(0, steps, body, (loss, stats, in_front, sums))

    place = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    d_hidden = jnp.where(mask[..., None], _take(in_front, place), 0)
    d_vocabulary = constrain(jnp.sum(sums, axis=0), plan.mesh, "vocab", "embed")
    return (loss, stats), (d_hidden, d_vocabulary.astype(vocabulary.dtype))


def _backward(plan: _Plan, gradients: tuple[jax.Array, jax.Array], cotangents: tuple[jax.Array, Any]) -> tuple:
    d_hidden, d_vocabulary = ((g.astype(jnp.float32) * cotangents[0]).astype(g.dtype) for g in gradients)
    return d_hidden, d_vocabulary, None, None, None, None


_fused.defvjp(_forward, _backward)


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


def _score(plan: _Plan, tokens: _Tokens, vocabulary: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits f32[G, C, V], their log-sum-exp and the targets' log-probabilities f32[G, C]."""
    logits = chunk_logits(tokens.hidden, vocabulary.T, plan.temperature, plan.limit)
    normalizers = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, tokens.targets[..., None], axis=-1)[..., 0]
    return logits, normalizers, picked - normalizers


def _zeros_like(part: Callable[[jax.Array], Any]) -> Any:
    """Zeros in the shape of what `part` gives for a chunk; every statistic is at least 0, so maxima begin there too."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(part, jnp.zeros((), jnp.int32)))
