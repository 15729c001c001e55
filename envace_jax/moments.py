"""Adam whose moments are stored small between updates, or in the host's memory.

    float32    as they are;
    bfloat16   both moments rounded;
    int8       in blocks along the last axis, a float32 scale each, in steps of equal ratio: numbers that share a block
               differ by orders of magnitude, and a first moment that is wrong by a step of the largest would be divided
               by its own small second (about 2.1 bytes a parameter).

Rounding is stochastic: the mean of what is stored is what was computed. Rounded to the nearest, a second moment that
falls by a thousandth in each update would never fall at all. The noise is a function of the update's number and of the
place, so that a resumed run repeats an unbroken one, on any mesh. Knows gradients and moments; no network.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

MOMENTS_DTYPES = ("float32", "bfloat16", "int8")
BLOCK = 128  # numbers that share a scale, or as many as divide the last axis
# Codes besides 0, and the binary orders of magnitude that they span below a block's largest number. A smaller first
# moment is rounded between nothing and the least code; a smaller second is raised to that, since it divides.
SIGNED, UNSIGNED = (127, 16.0), (255, 24.0)


class Quantized(NamedTuple):
    """A moment in 8 bits: codes [..., N] and the scale f32[..., N / block] of each block of the last axis."""

    codes: jax.Array
    scales: jax.Array


class AdamState(NamedTuple):
    """`mu` and `nu` are like the parameters; each leaf is an array, or a `Quantized` in its place."""

    count: jax.Array  # type: ignore[assignment]  # i32[], updates so far
    mu: Any
    nu: Any


class Optimizer(optax.GradientTransformationExtraArgs):
    """An optimizer with moments of this module: its `update` takes `use`, as that of `adam`."""


class Offloaded(Optimizer):
    """Its moments lie in the host's memory between updates."""


@dataclasses.dataclass(frozen=True)
class Storage:
    """How moments lie between updates."""

    dtype: str = "float32"
    offload: bool = False  # in the host's pinned memory


def adam(storage: Storage, *, b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam` in float32, over moments stored as `storage` says.

    With the further argument `use` (bool[]) False the state stays as it was; what is returned means nothing then.
    Raises ValueError for an unknown dtype.
    """
    if storage.dtype not in MOMENTS_DTYPES:
        raise ValueError(f"moments_dtype is {storage.dtype!r}; accepted are {', '.join(MOMENTS_DTYPES)}")

    def init(params: Any) -> AdamState:
        def zeros(leaf: jax.Array) -> Any:
            return _empty(leaf.shape, storage.dtype)

        return AdamState(jnp.zeros((), jnp.int32), jax.tree.map(zeros, params), jax.tree.map(zeros, params))

    def update(
        gradient: Any, state: AdamState, params: Any = None, *, use: jax.Array | None = None, **_: Any
    ) -> tuple[Any, AdamState]:
        count = state.count + 1
        key = jax.random.fold_in(jax.random.key(0), count)
        leaves, structure = jax.tree.flatten(gradient)
        stored = zip(_leaves(state.mu), _leaves(state.nu), strict=True)
        results: list[tuple[jax.Array, Any, Any]] = []
        for number, (leaf, old) in enumerate(zip(leaves, stored, strict=True)):
            if storage.offload:
                # One parameter's moments after another: together they might not fit beside the rest.
                old = jax.device_put(_after(old, results), jax.memory.Space.Device)
            keys = jax.random.split(jax.random.fold_in(key, number))
            g = leaf.astype(jnp.float32)
            mu = b1 * _read(old[0], signed=True) + (1 - b1) * g
            nu = b2 * _read(old[1], signed=False) + (1 - b2) * g * g
            direction = (mu / (1 - b1**count)) / (jnp.sqrt(nu / (1 - b2**count)) + eps)
            new = (_written(mu, old[0], keys[0], signed=True), _written(nu, old[1], keys[1], signed=False))
            if use is not None:
                new = jax.tree.map(lambda now, before: jnp.where(use, now, before), new, old)
            if storage.offload:
                new = jax.device_put(new, jax.memory.Space.Host)
            results.append((direction, *new))
        directions, mu, nu = (jax.tree.unflatten(structure, [one[i] for one in results]) for i in range(3))
        if use is not None:
            count = jnp.where(use, count, state.count)
        return directions, AdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


def _leaves(moment: Any) -> list[Any]:
    """What is stored for each parameter."""
    return jax.tree.leaves(moment, is_leaf=lambda node: isinstance(node, Quantized))


def _after(arrays: Any, results: list[tuple[jax.Array, Any, Any]]) -> Any:
    """The arrays, which nobody may touch before the last result but one is there."""
    return arrays if len(results) < 2 else lax.optimization_barrier((arrays, results[-2][0]))[0]


def _empty(shape: tuple[int, ...], dtype: str) -> Any:
    if dtype != "int8":
        return jnp.zeros(shape, dtype)
    blocks = shape[-1] // _block(shape[-1]) if shape else 1
    # A scale of 0 makes every code mean 0.
    return Quantized(jnp.zeros(shape, jnp.int8), jnp.zeros((*shape[:-1], blocks), jnp.float32))


def _block(size: int) -> int:
    """The largest divisor of the last axis up to `BLOCK`."""
    return next(block for block in range(min(BLOCK, size), 0, -1) if size % block == 0)


def _read(stored: Any, signed: bool) -> jax.Array:
    if not isinstance(stored, Quantized):
        return stored.astype(jnp.float32)
    codes = stored.codes.astype(jnp.int32)
    scales = jnp.repeat(stored.scales, codes.shape[-1] // stored.scales.shape[-1], axis=-1)
    return scales * (jnp.sign(codes) * _level(jnp.abs(codes), *SIGNED) if signed else _level(codes + 128, *UNSIGNED))


def _level(code: jax.Array, count: int, orders: float) -> jax.Array:
    """The share of a block's largest number that a code 0 .. count means: 0 is nothing, `count` is all of it."""
    return jnp.where(code == 0, 0.0, jnp.exp2((code - count) * (orders / (count - 1))))


def _written(moment: jax.Array, like: Any, key: jax.Array, signed: bool) -> Any:
    """The moment f32 as `like` is stored."""
    if not isinstance(like, Quantized):
        return moment if like.dtype == jnp.float32 else _rounded(moment, key)
    count, orders = SIGNED if signed else UNSIGNED
    blocks = moment.reshape(*like.scales.shape, -1)
    scales = jnp.max(jnp.abs(blocks), axis=-1)
    shares = jnp.abs(blocks / jnp.where(scales > 0, scales, 1.0)[..., None]).reshape(moment.shape)  # in [0, 1]
    if not signed:
        shares = jnp.where(shares > 0, jnp.maximum(shares, 2.0**-orders), 0.0)
    below = jnp.floor(count + jnp.log2(shares) * ((count - 1) / orders))
    below = jnp.clip(below, 0, count - 1).astype(jnp.int32)
    low, high = _level(below, count, orders), _level(below + 1, count, orders)
    code = below + (jax.random.uniform(key, moment.shape) * (high - low) < shares - low)
    code = jnp.where(moment < 0, -code, code) if signed else code - 128
    return Quantized(code.astype(jnp.int8), scales)


def _rounded(moment: jax.Array, key: jax.Array) -> jax.Array:
    """bfloat16, up or down with the probability that makes the mean right: random bits added below those it keeps."""
    bits = lax.bitcast_convert_type(moment, jnp.uint32)
    noise = jax.random.bits(key, moment.shape, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type(((bits + noise) >> 16).astype(jnp.uint16), jnp.bfloat16)
