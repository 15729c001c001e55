"""The sampler's cache in pages: which slot draws when pages are short, and the programs of `paged_decoding.py`.

Streams get pages as they grow. Where none are free, the streams without a slot give up theirs, least recently used
first; then slots that wait, and last those that draw, latest arrival first. A slot that lost its pages keeps what it
has drawn and is prefilled again when there is room, so nothing it draws depends on that. The earliest slot of a part is
never stopped, and each part holds a stream of full length, so all get done.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from envace_jax import drawing, hosts, paged_decoding
from envace_jax.models.paged_attention import page_spec
from envace_jax.pages import Pages
from envace_jax.pooled_cache import abstract
from envace_jax.sample_requests import Running, SamplerStats, Settings, calls, pack
from envace_jax.sharding import batch_sharding, replicated
from envace_jax.streams import Streams
from envace_jax.types import Params, Policy


@dataclasses.dataclass(frozen=True)
class Programs:
    """The jitted functions; samplers that share them compile once."""

    fresh: Any
    prefill: Any
    decode: Any
    places: Any  # of the state; None without a mesh

    def compile_count(self) -> int:
        return sum(function._cache_size() for function in (self.fresh, self.prefill, self.decode))


def table_width(settings: Settings) -> int:
    """Pages that a stream may have."""
    return -(-settings.max_length // settings.page_size)


def make_programs(policy: Policy, settings: Settings) -> Programs:
    """Nothing is compiled or allocated, and no device is asked for anything."""
    make = functools.partial(
        # The output buffer also holds the token that a prefill draws before the chunk.
        paged_decoding.fresh_state, policy, settings.pages, settings.page_size, settings.slots,
        settings.decode_chunk + 1, settings.dtype, settings.max_length,
    )  # fmt: skip
    places = outputs = None
    if settings.mesh is not None:
        places = _state_shardings(settings.mesh, jax.eval_shape(make))
        outputs = (places, settings.everywhere)
    prefill = functools.partial(
        paged_decoding.prefill, policy, settings.vocab_limit, settings.shards, table_width(settings)
    )
    decode = functools.partial(paged_decoding.decode, policy, settings.vocab_limit)
    return Programs(
        fresh=jax.jit(make, out_shardings=places),
        prefill=jax.jit(prefill, donate_argnums=1, out_shardings=places),
        decode=jax.jit(decode, donate_argnums=1, out_shardings=outputs),
        places=places,
    )


def _state_shardings(mesh: Mesh, state: paged_decoding.PagedState) -> Any:
    pages: Any = NamedSharding(mesh, page_spec(mesh, state.pages.shape[3] // 2))
    rows = jax.tree.map(lambda _: batch_sharding(mesh), state.drawing)
    return paged_decoding.PagedState(pages, rows, jax.tree.map(lambda _: replicated(mesh), state.by_position))


class PagedCache:
    """The streams, their pages, and the state on the device.

    A slot waits (its tokens are not all cached, and it may have no pages), is open (it has pages for its tokens and one
    decode chunk, and is being prefilled), or draws.
    """

    def __init__(self, programs: Programs, settings: Settings):
        self.programs, self.settings = programs, settings
        self.reset()

    def reset(self) -> None:
        chosen = self.settings
        self._state: paged_decoding.PagedState | None = None
        self._streams = Streams(chosen.rows, chosen.slots, chosen.shards, chosen.max_length)
        self._pages = Pages(chosen.rows, chosen.pages, chosen.shards, chosen.page_size)
        self._arrived: dict[int, int] = {}  # the order in which slots were taken
        self._arrivals = 0
        self._waiting: set[int] = set()
        self._open: set[int] = set()
        self._drawing: set[int] = set()

    def place(self, items: list[Running], running: dict[int, Running], stats: SamplerStats) -> None:
        """Puts items into free slots of `running`, each with the row that it continues or takes a beginning from."""
        for place in self._streams.place([item.prompt for item in items]):
            item = items[place.index]
            item.row, item.source, item.prefilled = place.row, place.source, place.shared
            slot = self.settings.free_slot(self._streams.part(place.row), running)
            running[slot] = item
            self._waiting.add(slot)
            self._arrived[slot] = self._arrivals = self._arrivals + 1

    def prefill(self, params: Params, running: dict[int, Running], stats: SamplerStats) -> list[int]:
        """Prefills what there are pages for; returns the slots that draw now, at least one."""
        self._grow(running, stats)
        while self._waiting or self._open:
            self._admit(running, stats)
            if not self._open:
                break
            self._prefill_round(params, running, stats)
        self._drawing = {slot for slot in running if slot not in self._waiting}
        return sorted(self._drawing)

    def decode(self, params: Params, running: dict[int, Running], steps: int, enough: int) -> np.ndarray:
        """Draws until `steps` are taken or `enough` slots are left; returns the report of `decoding.decode`."""
        return self._run_decode(params, self._table(running), steps, enough)

    def finish(self, slot: int, item: Running, tokens: np.ndarray) -> None:
        """The slot is free, its row keeps the prompt and `tokens`."""
        self._drawing.discard(slot)
        self._streams.finish(item.row, len(item.prompt), tokens)
        self._pages.written(item.row, len(item.prompt) + len(tokens))

    def cancel(self, slot: int, item: Running, running: dict[int, Running], stats: SamplerStats) -> None:
        """The slot is free; its row keeps what is cached, or nothing where it waits for pages."""
        del stats
        if slot in self._drawing:
            self.finish(slot, item, np.concatenate(item.tokens)[:-1])
            return
        self._waiting.discard(slot)
        self._pages.drop(item.row)
        self._streams.prefilled(item.row)
        self._streams.finish(item.row, 0, np.zeros(0, np.int32))
        for other in (running[waiting] for waiting in self._waiting):
            if other.source == item.row and not other.held:  # it has nothing to copy from any longer
                place = self._streams.again(other.row, self._tokens(other))
                other.source, other.prefilled = place.source, place.shared

    # --- who has pages ---

    def _in_order(self, slots: set[int]) -> list[int]:
        return sorted(slots, key=lambda slot: self._arrived[slot])

    def _part(self, slot: int) -> int:
        return slot * self.settings.shards // self.settings.slots

    def _grow(self, running: dict[int, Running], stats: SamplerStats) -> None:
        """Gives the slots that draw pages for another chunk, the earliest first."""
        self._drawing &= set(running)
        for slot in self._in_order(self._drawing):
            if slot not in self._drawing:
                continue  # an earlier one took its pages
            item = running[slot]
            needed = item.longest(self.settings.decode_chunk)
            later = [other for other in self._in_order(self._drawing)[::-1] if other != slot]
            victims = [other for other in later if self._arrived[other] > self._arrived[slot]]
            if not self._make_room(slot, running, needed, victims, stats):
                self._pause(slot, running, stats)

    def _admit(self, running: dict[int, Running], stats: SamplerStats) -> None:
        """Opens waiting slots in order of arrival. One that there is no room for lets none of its part pass."""
        full: set[int] = set()
        for slot in self._in_order(self._waiting):
            part, item = self._part(slot), running[slot]
            unready = {running[other].row for other in (self._waiting | self._open) if other != slot}
            if item.source != item.row and item.source in unready:
                continue
            self._begin(item, stats)
            if part in full:
                continue
            busy = [other for other in (self._open | self._drawing) if self._part(other) == part]
            # Room for those that draw to grow, or they would take back what this one gets.
            spare = sum(1 + self.settings.decode_chunk // self.settings.page_size for _ in busy)
            if self._make_room(slot, running, item.longest(self.settings.decode_chunk), [], stats, spare, not busy):
                self._waiting.discard(slot)
                self._open.add(slot)
            else:
                full.add(part)

    def _begin(self, item: Running, stats: SamplerStats) -> None:
        """Shares what can be shared, once; a slot that waits on keeps it as long as nobody needs it.

        From then on the source may go: its row must be free for another stream as soon as its slot is.
        """
        if not item.held:
            self._streams.begun(item.row)
            item.prefilled = self._pages.begin(item.row, item.source, item.prefilled)
            item.source, item.held = item.row, True
            stats.reused_tokens += item.prefilled
            if item.count == 0:
                item.cached = item.prefilled

    def _make_room(
        self,
        slot: int,
        running: dict[int, Running],
        positions: int,
        victims: list[int],
        stats: SamplerStats,
        spare: int = 0,
        alone: bool = False,
    ) -> bool:
        """Reserves pages for the slot, others giving up theirs as the module says; `spare` pages are to stay free.

        `victims` are slots that draw and may be paused; waiting slots may lose theirs to one that draws, or that is
        `alone` in its part.
        """
        row, part = running[slot].row, self._part(slot)

        def enough() -> bool:
            return self._pages.missing(row, positions) + spare <= self._pages.free(part)

        urgent = slot in self._drawing or alone
        if not urgent:  # nothing is given up in vain
            in_use = [item.row for other, item in running.items() if self._part(other) == part]
            left = self.settings.pages // self.settings.shards - self._pages.distinct(in_use)
            if self._pages.missing(row, positions) + spare > left:
                return False
        kept = [other for other in self._streams.kept() if self._streams.part(other) == part]
        while kept and not enough():
            # Those that share all their pages free none.
            other = next((other for other in kept if self._pages.alone(other)), kept[0])
            kept.remove(other)
            self._pages.drop(other)
            self._streams.forget(other)
        if urgent:
            for other in self._in_order(self._waiting)[::-1]:
                if not enough() and other != slot and self._part(other) == part:
                    self._lose(other, running)
        for other in victims:
            if not enough() and self._part(other) == part:
                self._pause(other, running, stats)
        return enough() and self._pages.reserve(row, positions)

    def _pause(self, slot: int, running: dict[int, Running], stats: SamplerStats) -> None:
        self._drawing.discard(slot)
        self._waiting.add(slot)
        self._lose(slot, running)
        stats.paused += 1

    def _lose(self, slot: int, running: dict[int, Running]) -> None:
        """A slot that waits gives up its pages; what it can take over from others is looked for anew."""
        item = running[slot]
        self._pages.drop(item.row)
        place = self._streams.again(item.row, self._tokens(item))
        item.source, item.prefilled, item.held = place.source, place.shared, False

    # --- prefill ---

    def _tokens(self, item: Running) -> np.ndarray:
        """What its cache must hold before it draws on: the prompt, and of what it has drawn all but the last."""
        return np.concatenate([item.prompt, *item.tokens])[: len(item.prompt) + max(item.count, 1) - 1]

    def _prefill_round(self, params: Params, running: dict[int, Running], stats: SamplerStats) -> None:
        """One piece of every open slot's tokens, grouped into calls by padded length."""
        tokens = {slot: self._tokens(running[slot]) for slot in self._in_order(self._open)}
        rests = {slot: len(own) - running[slot].prefilled for slot, own in tokens.items()}
        width = table_width(self.settings)
        for length, slots in calls(rests, self.settings):
            packed = self._empty_call(len(slots), length)
            for index, slot in enumerate(slots):
                if slot is None:
                    continue
                item, row = running[slot], packed[index]
                piece = tokens[slot][item.prefilled : item.prefilled + length]
                end = item.prefilled + len(piece)
                item.source = self._pages.head(item.row)
                # A segment that was paused has its first token already.
                pack(row, slot, item, piece, start=item.prefilled, final=end == len(tokens[slot]) and item.count == 0)
                row[-width:] = self._pages.numbers(item.row, width)
                item.prefilled, item.source = end, item.row
                stats.prefilled_tokens += len(piece)
            self._run_prefill(params, packed)
        for slot, own in tokens.items():
            item = running[slot]
            self._pages.written(item.row, item.prefilled)
            if item.prefilled == len(own):
                self._streams.prefilled(item.row)
                self._open.discard(slot)
                self._drawing.add(slot)

    def _empty_call(self, rows: int, length: int) -> np.ndarray:
        packed = drawing.empty_call(rows, length + table_width(self.settings))
        packed[:, -table_width(self.settings) :] = drawing.NOWHERE
        return packed

    def _table(self, running: dict[int, Running]) -> jax.Array:
        """i32[B, M], the pages of the slots that draw."""
        width = table_width(self.settings)
        table = np.full((self.settings.slots, width), drawing.NOWHERE, np.int32)
        for slot in self._drawing & set(running):
            table[slot] = self._pages.numbers(running[slot].row, width)
        return hosts.put(table, self.settings.row_sharding)

    # --- the compiled programs; each takes the state over ---

    def _make_state(self) -> None:
        self._state = None  # gone before the new one takes memory
        self._state = self.programs.fresh()

    def _run_prefill(self, params: Params, packed: np.ndarray) -> None:
        if self._state is None:
            self._make_state()
        state, self._state = self._state, None
        self._state = self.programs.prefill(params, state, hosts.put(packed, self.settings.row_sharding))

    def _run_decode(self, params: Params, table: jax.Array, steps: int, enough: int) -> np.ndarray:
        limits = self.settings.limits(steps, enough)
        state, self._state = self._state, None
        self._state, report = self.programs.decode(params, state, table, limits)
        return np.asarray(jax.device_get(report))

    # --- all programs, by the shapes that the buckets allow ---

    def run_all(self, params: Params) -> None:
        """Runs each program on padding."""
        self.reset()
        for _, kind, shape in self.shapes():
            if kind == "prefill":
                self._make_state()
                # Twice: without a mesh, parameters that are bound to a device bind the state that a call gives.
                for _ in range(2):
                    self._run_prefill(params, self._empty_call(shape[0] * self.settings.shards, shape[1]))
            elif kind == "decode":
                self._run_decode(params, self._table({}), 0, 0)
        self.reset()

    def shapes(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name, kind, sizes) of every program."""
        pages = f"{self.settings.pages} pages of {self.settings.page_size}"
        yield f"empty {pages}", "fresh", ()
        for rows, tokens in self.settings.buckets.prefill_shapes(self.settings.max_length):
            name = f"prefill of {rows * self.settings.shards} x {tokens} tokens, {pages}"
            yield name, "prefill", (rows, tokens)
        yield f"decode, {pages}", "decode", ()

    def lower(self, params: Params, kind: str, shape: tuple[int, ...]) -> jax.stages.Lowered:
        """One of `shapes` for abstract parameters."""
        programs, width = self.programs, table_width(self.settings)
        if kind == "fresh":
            return programs.fresh.lower()
        state = abstract(programs.fresh.eval_shape(), programs.places)
        rows = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32, sharding=self.settings.row_sharding)
        if kind == "prefill":
            packed = rows((shape[0] * self.settings.shards, drawing.HEADER + shape[1] + width))
            return programs.prefill.lower(params, state, packed)
        limits = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=self.settings.everywhere)
        return programs.decode.lower(params, state, rows((self.settings.slots, width)), limits)
