"""Looking tokens up in an embedding that a mesh cuts, over the vocabulary and over its width, where it lies.

Each device looks its own part of the table up for all rows of its group, and what it found goes to the rows:
activations travel, and the table never does, forwards or backwards. Knows the mesh and arrays. Shape letters as in
`types.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from envace_jax.sharding import BATCH_AXES, RULES, axis_size

VOCAB, WIDTH = RULES["vocab"], RULES["embed"]  # mesh axes that cut the table


def cut(mesh: Mesh, table: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
    """Whether the mesh cuts a table [V, D], and `look_up` can take it and tokens [B, T] of these shapes."""
    vocab, width, rows = (axis_size(mesh, axis) for axis in (VOCAB, WIDTH, BATCH_AXES))
    return vocab * width > 1 and not (table[0] % vocab or table[1] % width or tokens[0] % rows)


def look_up(mesh: Mesh, table: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
    """table [V, D] at tokens i32[B, T] -> [B, T, D] in `dtype`, positions spread over `tensor` where it divides T."""
    spread = tokens.shape[1] % axis_size(mesh, VOCAB) == 0

    def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
        """[V / tensor, D / fsdp] and the device's own rows."""
        tokens = lax.all_gather(tokens, WIDTH, axis=0, tiled=True)
        place = tokens - lax.axis_index(VOCAB) * table.shape[0]
        here = (place >= 0) & (place < table.shape[0])
        found = jnp.take(table, jnp.where(here, place, 0), axis=0, mode="clip").astype(dtype)
        found = jnp.where(here[..., None], found, 0)
        # One device of `tensor` has found it, the others add zeros: exact in any dtype.
        if spread:
            found = lax.psum_scatter(found, VOCAB, scatter_dimension=1, tiled=True)
        else:
            found = lax.psum(found, VOCAB)
        return lax.all_to_all(found, WIDTH, split_axis=0, concat_axis=2, tiled=True)

    specs = PartitionSpec(VOCAB, WIDTH), PartitionSpec(BATCH_AXES, None)
    out = PartitionSpec(BATCH_AXES, VOCAB if spread else None, None)
    tokens = jnp.clip(tokens, 0, table.shape[0] - 1)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)(table, tokens)
