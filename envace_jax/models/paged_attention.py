"""Attention over keys and values that lie in pages, and the writing of new ones: jax's TPU kernel, or plain operations.

All layers' pages are one array [L, P, page, 2 K, H], a head's keys and values side by side, as the kernel reads them.
A sequence's positions lie in the pages that its row of a table names, in order. On a mesh each shard of the sequences
has its own pages, and numbers count within them, so nothing here is sent from device to device. Shape letters as in
`attention.py`; P pages, M pages a sequence may have.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import Mesh, PartitionSpec

from envace_jax.models import kernels
from envace_jax.models.attention import KeyValue, attend_cached
from envace_jax.sharding import BATCH_AXES, axis_size, platform_of
from envace_jax.types import PagedCache

# Of the kernel, which would look its sizes up by the chip at hand: there may be none when a program is planned.
BLOCK_POSITIONS = 512  # of keys and values that are in fast memory at a time, twice
QUERIES_PER_BLOCK = 64
QUERIES_PER_STEP = 8  # when decoding: each sequence of a block meets all of its queries
VMEM_LIMIT = 32 * 2**20  # bytes


def use_kernel(choice: str, mesh: Mesh | None, head_dim: int) -> bool:
    """Whether `model.attention` means the kernel on the devices of this mesh.

    There is one for TPUs, and it wants heads of a multiple of 128: elsewhere pages are read by plain operations.
    Raises ValueError as `kernels.resolve`.
    """
    return kernels.resolve(choice, platform_of(mesh)) == "splash" and head_dim % 128 == 0


def page_spec(mesh: Mesh, kv_heads: int) -> PartitionSpec:
    """Of the pages: dealt to the shards of the sequences, heads over `tensor` where it divides them."""
    return PartitionSpec(None, BATCH_AXES, None, _head_axis(mesh, kv_heads), None)


def _head_axis(mesh: Mesh, kv_heads: int) -> str | None:
    return None if kv_heads % axis_size(mesh, "tensor") else "tensor"


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    layer: jax.Array | int,
    cache: PagedCache,
    valid: jax.Array,
    *,
    mesh: Mesh | None,
    kernel: bool,
) -> tuple[jax.Array, jax.Array]:
    """Writes a layer's new keys and values, and lets token i of row b read positions up to lengths[b] + i.

    query [B,T,N,H]; key, value [B,T,K,H]; valid bool[B,T], a prefix of each row -> [B,T,N,H] and the pages. A row
    that is not valid at all reads and writes nothing that counts.
    """
    count = valid.sum(axis=1, dtype=jnp.int32)
    local = functools.partial(_attend_local, kernel)
    inputs = (query, key, value, cache.pages, jnp.asarray(layer, jnp.int32), cache.table, cache.head, cache.lengths)
    if mesh is None:
        return local(*inputs, count)
    heads = _head_axis(mesh, key.shape[2])
    tokens, rows = PartitionSpec(BATCH_AXES, None, heads), PartitionSpec(BATCH_AXES)
    pages = page_spec(mesh, key.shape[2])
    places = (tokens, tokens, tokens, pages, PartitionSpec(), rows, rows, rows, rows)
    return jax.shard_map(local, mesh=mesh, in_specs=places, out_specs=(tokens, pages), check_vma=False)(*inputs, count)


def _attend_local(
    kernel: bool,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    pages: jax.Array,
    layer: jax.Array,
    table: jax.Array,
    head: jax.Array,
    lengths: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    # Page p of layer l is page l * P + p of all: the kernel reads them where they are, and no layer is cut out.
    first = layer * pages.shape[1]
    flat = pages.reshape(-1, *pages.shape[2:])
    new = jnp.stack([key, value], axis=3).reshape(*key.shape[:2], -1, key.shape[3]).astype(pages.dtype)
    flat = _write(flat, new, first, table, head, lengths, count)
    if kernel:
        attended = _with_kernel(query, flat, first, table, lengths, count)
    else:
        read = _reader(flat, first, table)
        positions = table.shape[1] * flat.shape[1]
        attended = attend_cached(query, key, value, jnp.where(count > 0, lengths, 0), positions, read)
    return attended, flat.reshape(pages.shape)


def _write(flat: Any, new: Any, first: Any, table: Any, head: Any, lengths: Any, count: Any) -> jax.Array:
    """New tokens [B, T, 2 K, H] at positions from lengths[b] on; where more than one may come, the page of the first
    gets what it holds before lengths[b] from page head[b].

    A token at a time: for updates of whole pages XLA would turn all pages into another order and back.
    """
    size = flat.shape[1]
    positions = lengths[:, None] + jnp.arange(new.shape[1])
    wanted = jnp.arange(new.shape[1]) < count[:, None]
    if new.shape[1] > 1:
        places = jnp.arange(size)
        begun = flat[(first + jnp.maximum(head, 0))[:, None], places]
        new = jnp.concatenate([begun, new], axis=1)
        positions = jnp.concatenate([(lengths // size * size)[:, None] + places, positions], axis=1)
        copied = (places < (lengths % size)[:, None]) & (count > 0)[:, None]
        wanted = jnp.concatenate([copied, wanted], axis=1)
    index = positions // size
    inside = index < table.shape[1]
    page = jnp.take_along_axis(table, jnp.where(inside, index, 0), axis=1)
    page = jnp.where(wanted & inside & (page >= 0), first + page, flat.shape[0])  # beyond the end: dropped
    return flat.at[page, positions % size].set(new, mode="drop")


def _reader(flat: jax.Array, first: jax.Array, table: jax.Array) -> Any:
    """For `attend_cached`."""
    size = flat.shape[1]

    def read(start: jax.Array, positions: int) -> KeyValue:
        at = start + jnp.arange(positions)
        page = first + jnp.maximum(jnp.take(table, at // size, axis=1, mode="clip"), 0)
        both = flat[page, at % size]  # [B, positions, 2 K, H]
        return both[:, :, 0::2].transpose(0, 2, 3, 1), both[:, :, 1::2].transpose(0, 2, 1, 3)

    return read


def _with_kernel(query: Any, flat: Any, first: Any, table: Any, lengths: Any, count: Any) -> jax.Array:
    rows, time, heads, width = query.shape
    # Padding reads as if it were tokens: what comes of it is not used, and pages hold finite numbers everywhere. The
    # kernel needs at least one position of every row.
    read = jnp.where(count > 0, lengths, 0) + time
    out = ragged_paged_attention(
        query.reshape(-1, heads, width),
        flat,
        read,
        first + jnp.maximum(table, 0),
        jnp.arange(rows + 1, dtype=jnp.int32) * time,
        jnp.array([rows], jnp.int32),
        sm_scale=width**-0.5,
        num_kv_pages_per_block=max(1, min(BLOCK_POSITIONS // flat.shape[1], table.shape[1])),
        num_queries_per_block=min(rows * time, QUERIES_PER_STEP if time == 1 else QUERIES_PER_BLOCK),
        vmem_limit_bytes=VMEM_LIMIT,
    )
    return out.reshape(query.shape)
