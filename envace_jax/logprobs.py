"""Log-probabilities of given tokens from hidden states, a chunk of positions at a time.

No [B, T, V] array exists, forwards or backwards: a chunk's logits are formed, used and dropped, and formed again
in the backward pass. Knows a hidden state and an output projection; knows nothing of networks, roles or losses.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from envace_jax.sharding import moved


def token_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    temperature: float = 1.0,
    vocab_limit: int | None = None,
    chunk: int = 1024,
    mesh: Mesh | None = None,
) -> jax.Array:
    """log softmax(hidden @ head / temperature)[targets], in float32, differentiable in hidden and head.

    Args:
      hidden: [B, T, D], any float dtype.
      head: [D, V].
      targets: i32[B, T]; the target at t is scored by the hidden state at t (the caller shifts).
      temperature: the one the tokens were sampled at (> 0).
      vocab_limit: ids at or above it (rows that pad the embedding) have probability 0. None: all V are real.
      chunk: how many of the B * T tokens have their logits in memory at once, all rows and devices together (at
        least one position of every row). Chunks run along T so that rows stay where the mesh put them.
      mesh: where the arrays lie, if on one: the logits are cut over the vocabulary, as the head is.

    Returns:
      f32[B, T].
    """
    check_chunking(temperature, chunk)
    rows, time = targets.shape
    width = min(time, max(1, chunk // rows))
    padding = -time % width
    if padding:
        hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
        targets = jnp.pad(targets, ((0, 0), (0, padding)))
    limit = head.shape[1] if vocab_limit is None else vocab_limit
    if mesh is not None:  # all of the width at once, and not in every chunk
        head = moved(head, mesh, (None, "vocab"), ("embed", "vocab"))
    return _chunked(hidden, head, targets, float(temperature), limit, width)[:, :time]


def check_chunking(temperature: float, chunk: int) -> None:
    """Raises ValueError for settings under which there are no log-probabilities, or no chunks."""
    if temperature <= 0.0:
        raise ValueError(f"temperature must be > 0 for log-probabilities, not {temperature}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, not {chunk}")


def chunk_logits(hidden: jax.Array, head: jax.Array, temperature: float, limit: int) -> jax.Array:
    """f32[B, C, V], by the same product as `Policy.logits`, so that sampler and trainer round alike."""
    logits = jnp.einsum("btd,dv->btv", hidden.astype(jnp.float32), head.astype(jnp.float32))
    if temperature != 1.0:
        logits = logits / temperature
    if limit < head.shape[1]:
        logits = jnp.where(jnp.arange(head.shape[1]) < limit, logits, -jnp.inf)
    return logits


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _chunked(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: float, limit: int, width: int
) -> jax.Array:
    logprobs, _ = _scored(hidden, head, targets, temperature, limit, width)
    return logprobs


def _scored(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: float, limit: int, width: int
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and normalizers f32[B, T]."""

    def body(carry: tuple[jax.Array, jax.Array], start: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        picked, log_normalizers = carry
        logits = chunk_logits(lax.dynamic_slice_in_dim(hidden, start, width, 1), head, temperature, limit)
        target = lax.dynamic_slice_in_dim(targets, start, width, 1)
        picked_here = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        normalizers_here = jax.nn.logsumexp(logits, axis=-1)
        picked = lax.dynamic_update_slice_in_dim(picked, picked_here, start, 1)
        return (picked, lax.dynamic_update_slice_in_dim(log_normalizers, normalizers_here, start, 1)), None

    zeros = jnp.zeros(targets.shape, jnp.float32)
    starts = jnp.arange(0, targets.shape[1], width)
    (picked, log_normalizers), _ = lax.scan(body, (zeros, zeros), starts)
    return picked - log_normalizers, log_normalizers


def _forward(hidden: Any, head: Any, targets: Any, temperature: float, limit: int, width: int) -> tuple[jax.Array, Any]:
    """The arrays come with whether a gradient in them is asked for."""
    arrays = hidden.value, head.value, targets.value
    logprobs, log_normalizers = _scored(*arrays, temperature, limit, width)
    # The normalizers [B, T] are kept so that the backward pass forms the probabilities in one exp(). That the head is
    # trained is told by the tree's structure, the only thing that passes without becoming an array.
    return logprobs, (*arrays, log_normalizers, () if head.perturbed else None)


def _backward(
    temperature: float, limit: int, width: int, residuals: Any, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array | None, None]:
    hidden, head, targets, log_normalizers, trained = residuals
    columns = jnp.arange(head.shape[1])

    def body(carry: tuple[jax.Array, Any], start: jax.Array) -> tuple[tuple[jax.Array, Any], None]:
        d_hidden, d_head = carry
        hidden_here, target, normalizer, weight = (
            lax.dynamic_slice_in_dim(x, start, width, 1) for x in (hidden, targets, log_normalizers, cotangent)
        )
        probabilities = jnp.exp(chunk_logits(hidden_here, head, temperature, limit) - normalizer[..., None])
        d_logits = (weight / temperature)[..., None] * ((columns == target[..., None]) - probabilities)
        here = jnp.einsum("btv,dv->btd", d_logits, head.astype(jnp.float32))
        d_hidden = lax.dynamic_update_slice_in_dim(d_hidden, here.astype(d_hidden.dtype), start, 1)
        if d_head is not None:
            d_head += jnp.einsum("btd,btv->dv", hidden_here.astype(jnp.float32), d_logits)
        return (d_hidden, d_head), None

    zeros = (jnp.zeros_like(hidden), None if trained is None else jnp.zeros(head.shape, jnp.float32))
    (d_hidden, d_head), _ = lax.scan(body, zeros, jnp.arange(0, targets.shape[1], width))
    return d_hidden, None if d_head is None else d_head.astype(head.dtype), None


_chunked.defvjp(_forward, _backward, symbolic_zeros=True)
