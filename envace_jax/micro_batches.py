"""Cutting a batch into micro-batches whose rows stay on their devices, and joining what came of them.

Knows arrays whose first axis is rows, and the mesh; knows nothing of what a row holds.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from envace_jax.sharding import BATCH_AXES, axis_size


def split(batch: Any, rows: int, mesh: Mesh | None) -> tuple[Any, int]:
    """A pytree of [B, ...] as one of [N, rows, ...], and the pieces that the mesh cuts each micro-batch into.

    A batch of fewer rows is one micro-batch. Raises ValueError where `rows` does not divide B.
    """
    count = jax.tree.leaves(batch)[0].shape[0]
    rows = min(rows, count)
    if count % rows:
        raise ValueError(
            f"a batch of {count} rows cannot be cut into micro-batches of {rows}; make rows_multiple a multiple of "
            "micro_batch_rows"
        )
    shards = 1 if mesh is None else axis_size(mesh, BATCH_AXES)
    if rows % shards:
        return jax.tree.map(lambda x: _split(x, rows, 1), batch), 1
    micro = jax.tree.map(lambda x: _split(x, rows, shards), batch)
    if mesh is not None:
        sharding = NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))
        micro = jax.tree.map(lambda x: lax.with_sharding_constraint(x, sharding), micro)
    return micro, shards


def join(array: jax.Array, shards: int) -> jax.Array:
    """[N, rows, ...] as [B, ...], the inverse of `split`."""
    count, rows = array.shape[:2]
    parts = array.reshape(count, shards, rows // shards, *array.shape[2:])
    return parts.swapaxes(0, 1).reshape(count * rows, *array.shape[2:])


def _split(array: jax.Array, rows: int, shards: int) -> jax.Array:
    """[B, T] -> [B / rows, rows, T]. A micro-batch takes the next rows / shards rows of every shard of the batch.

    So each device keeps its own rows, and empty rows, last in every shard (`batching.deal_rows`), share micro-batches.
    """
    count = array.shape[0] // rows
    parts = array.reshape(shards, count, rows // shards, *array.shape[1:])
    return parts.swapaxes(0, 1).reshape(count, rows, *array.shape[1:])
