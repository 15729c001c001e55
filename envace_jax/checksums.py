"""Checksums of a run's state: equal for equal bits, wherever the arrays lie, and all but surely different for others.

Sums of integers modulo 2^32 over the bit patterns, so no order of adding and no sharding changes them. Every array is
read once; nothing is copied to the host but two numbers for each.
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from envace_jax.players import State
from envace_jax.types import TrainState

WORDS = {1: jnp.uint8, 2: jnp.uint16}  # by the bytes of an element; longer ones are words of 4 bytes


def of_state(state: State) -> dict[str, str]:
    """Hex checksums by name: "parameters" and "optimizer", for each role where the roles have their own. With several
    processes a collective."""
    if isinstance(state, TrainState):
        return {"parameters": of_tree(state.params), "optimizer": of_tree((state.step, state.opt_state))}
    return {f"{name} of {role}": value for role, own in state.items() for name, value in of_state(own).items()}


def of_tree(tree: Any) -> str:
    """The hex checksum of a pytree of arrays: of their values, shapes, dtypes and places in the tree."""
    leaves, digest = jax.tree_util.tree_flatten_with_path(tree)[0], hashlib.sha256()
    # One array after the other: those that lie in the host's memory might not fit on the device together.
    sums = [_sums(_on_device(leaf)) for _, leaf in leaves]
    for (path, leaf), found in zip(leaves, jax.device_get(sums), strict=True):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}".encode())
        digest.update(np.array(found, np.uint32).tobytes())
    return digest.hexdigest()[:16]


def _on_device(leaf: jax.Array) -> jax.Array:
    kind = leaf.sharding.memory_kind
    return leaf if kind != "pinned_host" else jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))


@jax.jit
def _sums(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of the bits, and that of each times an odd number by its place, which an exchange of two changes."""
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    bits = lax.bitcast_convert_type(array, WORDS.get(array.dtype.itemsize, jnp.uint32)).astype(jnp.uint32)
    place = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(bits.shape):
        place = place * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    return jnp.sum(bits, dtype=jnp.uint32), jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)
