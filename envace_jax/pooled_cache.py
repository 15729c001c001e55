"""The sampler's cache without pages: a pool of whole rows, and a working set of those that draw now.

Decides which row a request gets and when the working set changes its length, makes the compiled programs of
`decoding.py` and runs them. `paged_cache.py` is its counterpart with pages.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from envace_jax import decoding, drawing, hosts
from envace_jax.buckets import pick
from envace_jax.sample_requests import Running, SamplerStats, Settings, calls, pack
from envace_jax.sharding import BATCH_AXES, partition_spec, replicated
from envace_jax.streams import Streams
from envace_jax.types import Params, Policy


@dataclasses.dataclass(frozen=True)
class Programs:
    """The jitted functions; samplers that share them compile once."""

    fresh: Any
    load: Any
    prefill: Any
    decode: Any
    places: Any  # of the state; None without a mesh

    def compile_count(self) -> int:
        return sum(function._cache_size() for function in (self.fresh, self.load, self.prefill, self.decode))


def make_programs(policy: Policy, settings: Settings) -> Programs:
    """Nothing is compiled or allocated, and no device is asked for anything."""
    axes, mesh, shards = decoding.cache_axes(policy), settings.mesh, settings.shards
    make = functools.partial(
        # The output buffer also holds the token that a prefill draws before the chunk.
        decoding.fresh_state, policy, settings.rows, settings.slots, settings.decode_chunk + 1, settings.dtype,
        settings.buckets.cache_lengths[-1],
    )  # fmt: skip
    places = outputs = None
    if mesh is not None:
        state = jax.eval_shape(functools.partial(make, length=settings.max_length))
        places = _state_shardings(mesh, axes, state)
        outputs = (places, settings.everywhere)
    model = (policy, settings.vocab_limit, axes, shards)
    return Programs(
        fresh=jax.jit(make, static_argnames="length", out_shardings=places),
        load=jax.jit(
            functools.partial(decoding.load, axes, shards), static_argnums=2, donate_argnums=0, out_shardings=places
        ),
        prefill=jax.jit(functools.partial(decoding.prefill, *model), donate_argnums=1, out_shardings=places),
        decode=jax.jit(functools.partial(decoding.decode, *model), donate_argnums=1, out_shardings=outputs),
        places=places,
    )


class PooledCache:
    """The streams in the pool and the state on the device."""

    def __init__(self, programs: Programs, settings: Settings):
        self.programs, self.settings = programs, settings
        self.reset()

    def reset(self) -> None:
        self._state: decoding.SamplerState | None = None
        self._capacity = 0  # positions of the working set
        self._streams = Streams(
            self.settings.rows, self.settings.slots, self.settings.shards, self.settings.max_length
        )  # fmt: skip
        self._waiting: list[int] = []  # slots whose prompt is not yet prefilled, in order of arrival

    def place(self, items: list[Running], running: dict[int, Running], stats: SamplerStats) -> None:
        """Puts items into free slots of `running`, each with the row that it continues or copies from."""
        for place in self._streams.place([item.prompt for item in items]):
            item = items[place.index]
            item.row, item.source, item.prefilled = place.row, place.source, place.shared
            item.cached = place.shared
            slot = self.settings.free_slot(self._streams.part(place.row), running)
            running[slot] = item
            self._waiting.append(slot)
            stats.reused_tokens += place.shared

    def prefill(self, params: Params, running: dict[int, Running], stats: SamplerStats) -> list[int]:
        """Prefills all that waits; returns the slots that draw now."""
        self._reserve(running)
        while self._waiting:
            self._prefill_round(params, running, stats)
        return sorted(running)

    def decode(self, params: Params, running: dict[int, Running], steps: int, enough: int) -> np.ndarray:
        """Draws until `steps` are taken or `enough` slots are left; returns the report of `decoding.decode`."""
        return self._run_decode(params, self._slot_rows(running), steps, enough)

    def finish(self, slot: int, item: Running, tokens: np.ndarray) -> None:
        """The slot is free, its row keeps the prompt and `tokens`."""
        self._streams.finish(item.row, len(item.prompt), tokens)

    def cancel(self, slot: int, item: Running, running: dict[int, Running], stats: SamplerStats) -> None:
        """The slot is free; its row keeps what is cached, or nothing where its prompt is still to be prefilled."""
        if slot not in self._waiting:
            self.finish(slot, item, np.concatenate(item.tokens)[:-1])
            return
        self._waiting.remove(slot)
        stats.reused_tokens -= item.cached
        self._streams.prefilled(item.row)
        self._streams.finish(item.row, 0, np.zeros(0, np.int32))
        for other in (running[waiting] for waiting in self._waiting):
            if other.source == item.row:  # it has nothing to copy from any longer
                place = self._streams.again(other.row, other.prompt)
                stats.reused_tokens += place.shared - other.cached
                other.source, other.prefilled, other.cached = place.source, place.shared, place.shared

    def _slot_rows(self, running: dict[int, Running]) -> jax.Array:
        rows = np.full(self.settings.slots, drawing.NOWHERE, np.int32)
        for slot, item in running.items():
            rows[slot] = item.row
        return hosts.put(rows, self.settings.row_sharding)

    def _reserve(self, running: dict[int, Running]) -> None:
        """Gives the working set the length that the coming prefills and one decode chunk need."""
        longest = max(item.longest(self.settings.decode_chunk) for item in running.values())
        needed = pick(longest, self.settings.buckets.cache_lengths, "cache length")
        if self._state is None:
            self._make_state(needed)
        elif needed != self._capacity:
            self._load_working(self._slot_rows(running), needed)
        self._capacity = needed

    def _prefill_round(self, params: Params, running: dict[int, Running], stats: SamplerStats) -> None:
        """One piece of every waiting prompt, grouped into calls by padded length."""
        unready = {running[slot].row for slot in self._waiting}
        rests = {}
        for slot in self._waiting:
            item = running[slot]
            if item.source != item.row and item.source in unready:
                continue  # its source comes first
            rests[slot] = len(item.prompt) - item.prefilled
        assert rests, "prompts wait for each other"
        for length, slots in calls(rests, self.settings):
            packed = drawing.empty_call(len(slots), length)
            for row, taken in zip(packed, slots, strict=True):
                if taken is not None:
                    stats.prefilled_tokens += self._pack_piece(row, taken, running[taken], length)
            self._run_prefill(params, packed)
        done = [slot for slot in self._waiting if running[slot].prefilled == len(running[slot].prompt)]
        self._waiting = [slot for slot in self._waiting if slot not in done]
        for slot in done:
            self._streams.prefilled(running[slot].row)

    def _pack_piece(self, row: np.ndarray, slot: int, item: Running, length: int) -> int:
        piece = item.prompt[item.prefilled : item.prefilled + length]
        final = item.prefilled + len(piece) == len(item.prompt)
        pack(row, slot, item, piece, start=item.prefilled, final=final)
        item.prefilled += len(piece)
        item.source = item.row
        return len(piece)

    # --- the compiled programs; each takes the state over ---

    def _make_state(self, length: int) -> None:
        self._state = None  # gone before the new one takes memory
        self._state = self.programs.fresh(length=length)

    def _load_working(self, rows: jax.Array, length: int) -> None:
        """Fills a working set of another length. It does not matter to the program which length was there before."""
        assert self._state is not None
        state, self._state = dataclasses.replace(self._state, working=None), None
        self._state = self.programs.load(state, rows, length)

    def _run_prefill(self, params: Params, packed: np.ndarray) -> None:
        state, self._state = self._state, None
        self._state = self.programs.prefill(params, state, hosts.put(packed, self.settings.row_sharding))

    def _run_decode(self, params: Params, rows: jax.Array, steps: int, enough: int) -> np.ndarray:
        limits = self.settings.limits(steps, enough)
        state, self._state = self._state, None
        self._state, report = self.programs.decode(params, state, rows, limits)
        return np.asarray(jax.device_get(report))

    # --- all programs, by the shapes that the buckets allow ---

    def run_all(self, params: Params) -> None:
        """Runs each program on padding, in an order in which each finds the state it needs."""
        self.reset()
        idle, shards = self._slot_rows({}), self.settings.shards
        for _, kind, shape in self.shapes():
            if kind == "prefill":
                length, rows, tokens = shape
                self._make_state(length)
                # Twice: without a mesh, parameters that are bound to a device bind the state that a call gives.
                for _ in range(2):
                    self._run_prefill(params, drawing.empty_call(rows * shards, tokens))
            elif kind == "decode":
                self._run_decode(params, idle, 0, 0)
            elif kind == "load":
                self._load_working(idle, shape[0])
        self.reset()

    def shapes(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name, kind, sizes) of every program; an empty cache is made again before each prefill."""
        lengths = self.settings.buckets.cache_lengths
        for length in lengths:
            yield f"empty cache of {length}", "fresh", (length,)
            for rows, tokens in self.settings.buckets.prefill_shapes(length):
                name = f"prefill of {rows * self.settings.shards} x {tokens} tokens, cache of {length}"
                yield name, "prefill", (length, rows, tokens)
            yield f"decode, cache of {length}", "decode", (length,)
            if len(lengths) > 1:
                yield f"load into a cache of {length}", "load", (length,)

    def lower(self, params: Params, kind: str, shape: tuple[int, ...]) -> jax.stages.Lowered:
        """One of `shapes` for abstract parameters."""
        programs, length = self.programs, shape[0]
        if kind == "fresh":
            return programs.fresh.lower(length=length)
        state = abstract(programs.fresh.eval_shape(length=length), programs.places)
        rows = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32, sharding=self.settings.row_sharding)
        if kind == "prefill":
            return programs.prefill.lower(
                params, state, rows((shape[1] * self.settings.shards, drawing.HEADER + shape[2]))
            )
        if kind == "load":
            state = dataclasses.replace(state, working=None)
            return programs.load.lower(state, rows((self.settings.slots,)), length)
        limits = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=self.settings.everywhere)
        return programs.decode.lower(params, state, rows((self.settings.slots,)), limits)


def abstract(shapes: Any, places: Any) -> Any:
    """Shapes with the shardings of `places`; as they are where that is None."""
    if places is None:
        return shapes
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, places)


def _state_shardings(mesh: Mesh, axes: Any, state: decoding.SamplerState) -> Any:
    rows: Any = NamedSharding(mesh, PartitionSpec(BATCH_AXES))

    def cached(array: Any, at: decoding.Axes) -> NamedSharding:
        names: list[str | None] = [None] * array.ndim
        names[at.rows], names[at.heads] = "batch", "kv_heads"
        return NamedSharding(mesh, partition_spec(mesh, tuple(names), array.shape))

    pool, working = (jax.tree.map(cached, arrays, axes) for arrays in (state.pool, state.working))
    drawing = jax.tree.map(lambda _: rows, state.drawing)
    return decoding.SamplerState(pool, working, drawing, jax.tree.map(lambda _: replicated(mesh), state.by_position))
