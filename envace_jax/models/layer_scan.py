"""A scan over layers whose backward pass adds to sums of gradients in place.

With gradients summed over micro-batches, plain differentiation holds two trees as large as the parameters: the sums,
and the gradient about to be added. Here the backward pass, which computes each layer again from its kept input, adds a
layer's gradient where the sum lies. Knows a layer as a function; knows no network.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from envace_jax.types import Params

Layer = Callable[[jax.Array, Params, Any], jax.Array]  # (x, one layer's parameters, constants) -> x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def scan_adding(layer: Layer, offload: bool, x: jax.Array, layers: Params, totals: Params, constants: Any) -> jax.Array:
    """x after all layers. What differentiation gives for `layers` is `totals` plus their gradient, in float32.

    Args:
      layer: one layer; only its input is kept for the backward pass.
      offload: keep the inputs in the host's pinned memory meanwhile.
      x: [B, T, D].
      layers: arrays [L, ...].
      totals: like layers, float32: sums over what came before. They get no gradient.
      constants: a pytree of arrays that every layer sees; no gradient.
    """
    return lax.scan(lambda x, one: (layer(x, one, constants), None), x, layers)[0]


def _forward(
    layer: Layer, offload: bool, x: jax.Array, layers: Params, totals: Params, constants: Any
) -> tuple[jax.Array, Any]:
    def body(x: jax.Array, one: Params) -> tuple[jax.Array, jax.Array]:
        return layer(x, one, constants), jax.device_put(x, jax.memory.Space.Host) if offload else x

    out, inputs = lax.scan(body, x, layers)
    return out, (inputs, layers, totals, constants)


def _backward(layer: Layer, offload: bool, residuals: Any, d_out: jax.Array) -> tuple[Any, ...]:
    inputs, layers, totals, constants = residuals
    count = inputs.shape[0]

    def body(step: jax.Array, carry: tuple[jax.Array, Params]) -> tuple[jax.Array, Params]:
        d_x, totals = carry
        number = count - 1 - step
        x, one = jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, number, keepdims=False), (inputs, layers))
        if offload:
            x = jax.device_put(x, jax.memory.Space.Device)
        _, pull = jax.vjp(lambda x, one: layer(x, one, constants), x, one)
        d_x, d_one = pull(d_x)

        def add(total: jax.Array, new: jax.Array) -> jax.Array:
            old = lax.dynamic_index_in_dim(total, number, keepdims=False)
            return lax.dynamic_update_index_in_dim(total, old + new.astype(total.dtype), number, 0)

        return d_x, jax.tree.map(add, totals, d_one)

    d_x, totals = lax.fori_loop(0, count, body, (d_out, totals))
    return d_x, jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), totals, layers), None, None


scan_adding.defvjp(_forward, _backward)
