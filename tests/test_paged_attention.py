"""Attention over pages: the plain path against attention over whole rows, the TPU kernel against the plain path."""

from __future__ import annotations

import types

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
    dynamic_validate_inputs,
    ref_ragged_paged_attention,
)

from envace_jax.models import attention, paged_attention
from envace_jax.types import PagedCache

LAYERS, PAGES, SIZE, HEADS, KV_HEADS, WIDTH = 3, 24, 8, 4, 2, 128
LENGTHS = np.array([0, 5, 16, 37], np.int32)


def problem(time: int, seed: int = 0):
    """Rows of LENGTHS cached tokens and `time` new ones, of which rows have all, some, one or none."""
    rng = np.random.default_rng(seed)
    rows, most = len(LENGTHS), 7
    query = rng.standard_normal((rows, time, HEADS, WIDTH)).astype(np.float32)
    key, value = rng.standard_normal((2, rows, time, KV_HEADS, WIDTH)).astype(np.float32)
    old = rng.standard_normal((2, rows, most * SIZE, KV_HEADS, WIDTH)).astype(np.float32)
    # Junk wherever nothing was written.
    pages = 9 * rng.standard_normal((LAYERS, PAGES, SIZE, 2 * KV_HEADS, WIDTH)).astype(np.float32)
    free = iter(rng.permutation(PAGES))
    table = np.full((rows, most), -1, np.int32)
    count = np.array([time, max(1, time - 3), 1, 0], np.int32)
    for row, length in enumerate(LENGTHS):
        for index in range(-(-(length + count[row]) // SIZE)):
            table[row, index] = page = next(free)
            both = old[:, row, index * SIZE : (index + 1) * SIZE]
            filled = np.arange(index * SIZE, (index + 1) * SIZE) < length
            pages[1, page, filled, 0::2], pages[1, page, filled, 1::2] = both[0][filled], both[1][filled]
    head = np.take_along_axis(table, (LENGTHS // SIZE)[:, None], 1)[:, 0]
    valid = np.arange(time) < count[:, None]
    cache = PagedCache(jnp.asarray(pages), jnp.asarray(table), jnp.asarray(head), jnp.asarray(LENGTHS))
    return (query, key, value), old, cache, jnp.asarray(valid), count


@pytest.mark.parametrize("time", [1, 6, 21])
def test_pages_give_what_whole_rows_give(time):
    new, old, cache, valid, count = problem(time)
    attended, pages = paged_attention.attend(*map(jnp.asarray, new), 1, cache, valid, mesh=None, kernel=False)
    keys, values = old[0].transpose(0, 2, 3, 1), old[1].transpose(0, 2, 1, 3)
    read = attention.layer_reader(jnp.asarray(keys), jnp.asarray(values))
    want = attention.attend_cached(*map(jnp.asarray, new), cache.lengths, old.shape[2], read)
    for row in range(len(LENGTHS)):
        np.testing.assert_allclose(attended[row, : count[row]], want[row, : count[row]], rtol=1e-5, atol=1e-5)
    # What was written lies where the table says, what was there before stays, and no other page or layer changes.
    after, before, table = np.asarray(pages), np.asarray(cache.pages), np.asarray(cache.table)
    for row, length in enumerate(LENGTHS):
        held = after[1, table[row][table[row] >= 0]].reshape(-1, 2 * KV_HEADS, WIDTH)
        np.testing.assert_array_equal(held[:length, 0::2], old[0, row, :length])
        np.testing.assert_array_equal(held[length : length + count[row], 1::2], new[2][row, : count[row]])
    others = np.setdiff1d(np.arange(PAGES), table)
    np.testing.assert_array_equal(after[1, others], before[1, others])
    np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])


def test_the_beginning_of_a_page_comes_from_the_page_named():
    new, _, cache, valid, _ = problem(6)
    source = int(np.setdiff1d(np.arange(PAGES), np.asarray(cache.table))[0])
    own = int(cache.table[1, 0])
    moved = PagedCache(
        cache.pages.at[1, source].set(cache.pages[1, own]).at[1, own].set(0.0),
        cache.table, cache.head.at[1].set(source), cache.lengths,
    )  # fmt: skip
    want = paged_attention.attend(*map(jnp.asarray, new), 1, cache, valid, mesh=None, kernel=False)
    got = paged_attention.attend(*map(jnp.asarray, new), 1, moved, valid, mesh=None, kernel=False)
    np.testing.assert_array_equal(want[0], got[0])
    np.testing.assert_array_equal(want[1][1, own], got[1][1, own])


@pytest.mark.parametrize("time", [1, 21])
def test_the_kernel_is_asked_for_what_the_plain_path_gives(monkeypatch, time):
    """The library's own reference in the kernel's place: no interpreter of jax 0.10.2 runs this kernel."""
    new, _, cache, valid, count = problem(time)
    arrays = tuple(map(jnp.asarray, new))
    plain, pages = paged_attention.attend(*arrays, 1, cache, valid, mesh=None, kernel=False)

    def in_its_place(*inputs, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes, **options):
        dynamic_validate_inputs(
            *inputs, num_kv_pages_per_block=num_kv_pages_per_block, num_queries_per_block=num_queries_per_block,
            vmem_limit_bytes=vmem_limit_bytes, **options,
        )  # fmt: skip
        assert (np.asarray(inputs[2]) > 0).all()  # or it would wait for a copy for ever
        return ref_ragged_paged_attention(*inputs, **options)

    monkeypatch.setattr(paged_attention, "ragged_paged_attention", in_its_place)
    got, written = paged_attention.attend(*arrays, 1, cache, valid, mesh=None, kernel=True)
    np.testing.assert_array_equal(written, pages)
    for row in range(len(LENGTHS)):
        np.testing.assert_allclose(got[row, : count[row]], plain[row, : count[row]], rtol=1e-4, atol=1e-4)


class Device:
    def __init__(self, platform: str):
        self.platform = platform


@pytest.mark.parametrize("choice", ["auto", "kernel", "plain"])
def test_the_kernel_is_taken_on_tpus(choice):
    def on(platform: str) -> object:
        return types.SimpleNamespace(devices=np.array([Device(platform)]))

    assert paged_attention.use_kernel(choice, on("tpu"), 128) == (choice != "plain")
    assert not paged_attention.use_kernel(choice, on("gpu"), 128)
    assert not paged_attention.use_kernel(choice, on("tpu"), 64)
    if choice != "kernel":  # which is refused where there is none (test_kernels.py)
        assert not any(paged_attention.use_kernel(choice, mesh, 128) for mesh in (None, on("cpu")))


def test_an_unknown_attention_is_refused():
    with pytest.raises(ValueError, match="attention is 'fast'; accepted are auto, plain, kernel"):
        paged_attention.use_kernel("fast", None, 128)
