"""The sampler: requests go into slots, their key-value caches stay behind in a pool, finished samples come out.

A new prompt continues the kept stream that is its longest prefix, or copies the longest prefix that any stream shares
with it, and pays only for the rest (delta prefill); streams that no longer fit are dropped, least recently used first.
Knows token ids only, no text, roles or episodes. Device work is `decoding.py`'s; everything decided here derives
from values that all processes hold, so several hosts may run it in step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from envace_jax import decoding
from envace_jax.buckets import Buckets, pick
from envace_jax.sharding import BATCH_AXES, axis_size, batch_sharding, partition_spec, replicated
from envace_jax.streams import Streams
from envace_jax.types import FinishReason, Params, Policy


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """One segment to generate. `key_ids` (seed, step, task, segment, ...) alone decide the random numbers it
    draws."""

    request_id: int
    prompt_tokens: Sequence[int]
    max_tokens: int
    key_ids: tuple[int, ...]
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    stop_ids: tuple[int, ...] | None = None  # None: the sampler's


@dataclasses.dataclass(frozen=True)
class Sample:
    """A finished segment; a stop id that ended it is the last token."""

    request_id: int
    tokens: np.ndarray  # i32[C]
    logprobs: np.ndarray  # f32[C], at the sampling temperature (at 1 for greedy), before top-p
    finish_reason: FinishReason


@dataclasses.dataclass
class SamplerStats:
    """Counts since the sampler was made (or `stats` was replaced)."""

    prefilled_tokens: int = 0
    reused_tokens: int = 0  # prompt tokens found in a kept cache
    decoded_tokens: int = 0
    decode_steps: int = 0
    busy_slot_steps: int = 0  # slots that drew, summed over steps; / (decode_steps x slots) is the occupancy


@dataclasses.dataclass
class _Running:
    request: SampleRequest
    prompt: np.ndarray  # i32[P]
    row: int  # of the pool
    source: int  # row that holds the prompt's first `prefilled` tokens
    prefilled: int
    budget: int
    stop_ids: tuple[int, ...]
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    count: int = 0  # tokens drawn


def segment_key(key_ids: Sequence[int]) -> np.ndarray:
    """u32[2], a hash of the ids in order (any integers of up to 64 bits; their number counts too)."""
    mask = 0xFFFFFFFF
    words = [len(key_ids)]
    for value in map(int, key_ids):
        words += [value & mask, (value >> 32) & mask]
    return np.random.SeedSequence(words).generate_state(2, np.uint32)


class Sampler:
    """Continuous batching over a fixed number of slots.

    Args:
      policy: the model, as pure functions.
      slots: sequences decoded side by side; a multiple of the mesh's data x fsdp.
      cache_rows: streams whose caches are kept, those in slots included; at least `slots`, a multiple of the mesh's
        data x fsdp. None: twice the slots, since a trajectory has two streams.
      max_length: positions per stream, prompt and sample together.
      buckets: padded shapes, see `buckets.py`; the largest cache length must be at least `max_length`.
      vocab_limit: the tokenizer's length; ids at or above it are never drawn.
      stop_ids: ids that end a segment unless its request says otherwise (at most 4).
      mesh: slots and rows are split over ("data", "fsdp"), kv heads over "tensor" where divisible.
      cache_dtype: of keys and values.
      decode_chunk: the most tokens a call of `step` draws per slot.
      refill_share: a call of `step` ends early when this share of the slots that were drawing has finished.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        slots: int,
        max_length: int,
        buckets: Buckets,
        vocab_limit: int,
        stop_ids: Sequence[int],
        cache_rows: int | None = None,
        mesh: Mesh | None = None,
        cache_dtype: Any = jnp.float32,
        decode_chunk: int = 16,
        refill_share: float = 0.125,
    ):
        self._shards = axis_size(mesh, BATCH_AXES) if mesh is not None else 1
        rows = 2 * slots if cache_rows is None else cache_rows
        if slots < 1 or slots % self._shards:
            raise ValueError(f"slots must be a positive multiple of {self._shards} (mesh data x fsdp), got {slots}")
        if rows < slots or rows % self._shards:
            raise ValueError(f"cache_rows must be at least {slots} and a multiple of {self._shards}, got {rows}")
        if buckets.cache_lengths[-1] < max_length:
            raise ValueError(f"cache_lengths end at {buckets.cache_lengths[-1]}, below max_length {max_length}")
        if not 0 < vocab_limit <= policy.vocab_size:
            raise ValueError(f"vocab_limit must lie in 1..{policy.vocab_size} (embedding rows), got {vocab_limit}")
        if decode_chunk < 1:
            raise ValueError(f"decode_chunk must be at least 1, got {decode_chunk}")
        if not 0.0 < refill_share <= 1.0:
            raise ValueError(f"refill_share must be above 0 and at most 1, got {refill_share}")
        self.slots, self.rows, self.max_length, self.buckets = slots, rows, max_length, buckets
        self.decode_chunk, self.refill_share = decode_chunk, refill_share
        self.stop_ids = _checked_stop_ids(stop_ids)
        self.stats = SamplerStats()
        axes = decoding.cache_axes(policy)
        make = functools.partial(
            # The output buffer also holds the token that a prefill draws before the chunk.
            decoding.fresh_state, policy, rows, slots, decode_chunk + 1, cache_dtype, buckets.cache_lengths[-1],
        )  # fmt: skip
        places = outputs = None
        if mesh is not None:
            places = _state_shardings(mesh, axes, jax.eval_shape(functools.partial(make, length=max_length)))
            outputs = (places, replicated(mesh))
        self._row_sharding = None if mesh is None else batch_sharding(mesh)
        self._limit_sharding = None if mesh is None else replicated(mesh)
        self._fresh = jax.jit(make, static_argnames="length", out_shardings=places)
        model = (policy, vocab_limit, axes, self._shards)
        self._load = jax.jit(
            functools.partial(decoding.load, axes, self._shards),
            static_argnums=2,
            donate_argnums=0,
            out_shardings=places,
        )
        self._prefill = jax.jit(functools.partial(decoding.prefill, *model), donate_argnums=1, out_shardings=places)
        self._decode = jax.jit(functools.partial(decoding.decode, *model), donate_argnums=1, out_shardings=outputs)
        self.reset()

    @property
    def compile_count(self) -> int:
        """Programs compiled so far, bounded by `buckets.compile_bound()`."""
        functions: tuple[Any, ...] = (self._fresh, self._load, self._prefill, self._decode)
        return sum(function._cache_size() for function in functions)

    def reset(self) -> None:
        """Forgets all kept caches and drops whatever is running. To be called after a weight update."""
        self._state: decoding.SamplerState | None = None
        self._capacity = 0  # positions of the working set
        self._streams = Streams(self.rows, self.slots, self._shards, self.max_length)
        self._running: dict[int, _Running] = {}  # by slot
        self._waiting: list[int] = []  # slots whose prompt is not yet prefilled, in order of arrival

    def warm_up(self, params: Params, progress: Callable[[str], None] = lambda _: None) -> None:
        """Compiles all programs that the buckets allow, by running each on padding; leaves the sampler as `reset` does.

        Afterwards no request compiles anything, as long as `step` gets parameters of these shapes, dtypes and
        placement. `progress` is told what is compiled next, `buckets.compile_bound()` times.
        """
        self.reset()
        idle, lengths = self._slot_rows(), self.buckets.cache_lengths
        for length in lengths:
            progress(f"empty cache of {length}")
            for rows, tokens in self.buckets.prefill_shapes(length):
                self._make_state(length)
                progress(f"prefill of {rows * self._shards} x {tokens} tokens, cache of {length}")
                # Twice: without a mesh, parameters that are bound to a device bind the state that a call gives.
                for _ in range(2):
                    self._run_prefill(params, decoding.empty_call(rows * self._shards, tokens))
            progress(f"decode, cache of {length}")
            self._run_decode(params, idle, 0, 0)
            if len(lengths) > 1:
                progress(f"load into a cache of {length}")
                self._load_working(idle, length)
        self.reset()

    def free(self) -> int:
        """Slots that a request may take."""
        return self.slots - len(self._running)

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Puts requests (at most `free()`) into slots; their prompts are prefilled by the next `step`.

        Raises ValueError, before any is taken, for too many requests, or a prompt that is empty or leaves no room to
        draw.
        """
        if len(requests) > self.free():
            raise ValueError(f"{len(requests)} requests submitted, but {self.free()} of {self.slots} slots are free")
        if not requests:
            return
        checked = [self._check(request) for request in requests]
        for place in self._streams.place([prompt for prompt, _, _ in checked]):
            prompt, budget, stop_ids = checked[place.index]
            slot = self._free_slot(self._streams.part(place.row))
            self._running[slot] = _Running(
                requests[place.index], prompt, place.row, place.source, place.shared, budget, stop_ids
            )
            self._waiting.append(slot)
            self.stats.reused_tokens += place.shared

    def step(self, params: Params) -> list[Sample]:
        """Prefills what was submitted, then draws up to `decode_chunk` tokens per slot; returns what finished."""
        if not self._running:
            return []
        self._reserve()
        while self._waiting:
            self._prefill_round(params)
        active = len(self._running)
        enough = active - max(1, int(active * self.refill_share))
        return self._harvest(self._run_decode(params, self._slot_rows(), self.decode_chunk, enough))

    def _check(self, request: SampleRequest) -> tuple[np.ndarray, int, tuple[int, ...]]:
        """The request's prompt, token budget and stop ids."""
        prompt = np.asarray(request.prompt_tokens, np.int32)
        room = self.max_length - len(prompt)
        if len(prompt) == 0 or room < 1 or request.max_tokens < 1:
            raise ValueError(
                f"request {request.request_id}: a prompt of {len(prompt)} tokens, max_tokens {request.max_tokens}; "
                f"needs 1..{self.max_length - 1} (max_length {self.max_length}), and max_tokens of at least 1"
            )
        if not (request.temperature >= 0 and 0 < request.top_p <= 1):
            raise ValueError(
                f"request {request.request_id}: temperature {request.temperature} and top_p {request.top_p}; "
                "needs temperature >= 0 and 0 < top_p <= 1"
            )
        stop_ids = self.stop_ids if request.stop_ids is None else _checked_stop_ids(request.stop_ids)
        return prompt, min(request.max_tokens, room), stop_ids

    def _free_slot(self, part: int) -> int:
        """The first free slot of a shard."""
        size = self.slots // self._shards
        return next(slot for slot in range(part * size, (part + 1) * size) if slot not in self._running)

    def _slot_rows(self) -> jax.Array:
        rows = np.full(self.slots, decoding.NOWHERE, np.int32)
        for slot, item in self._running.items():
            rows[slot] = item.row
        return jax.device_put(rows, self._row_sharding)

    def _reserve(self) -> None:
        """Gives the working set the length that the coming prefills and one decode chunk need."""
        longest = 0
        for item in self._running.values():
            drawn = min(item.budget, max(item.count, 1) + self.decode_chunk)
            longest = max(longest, len(item.prompt) + drawn - 1)
        needed = pick(longest, self.buckets.cache_lengths, "cache length")
        if self._state is None:
            self._make_state(needed)
        elif needed != self._capacity:
            self._load_working(self._slot_rows(), needed)
        self._capacity = needed

    # --- the compiled programs; each takes the state over ---

    def _make_state(self, length: int) -> None:
        self._state = None  # gone before the new one takes memory
        self._state = self._fresh(length=length)

    def _load_working(self, rows: jax.Array, length: int) -> None:
        """Fills a working set of another length. It does not matter to the program which length was there before."""
        assert self._state is not None
        state, self._state = dataclasses.replace(self._state, working=None), None
        self._state = self._load(state, rows, length)

    def _run_prefill(self, params: Params, packed: np.ndarray) -> None:
        state, self._state = self._state, None
        self._state = self._prefill(params, state, jax.device_put(packed, self._row_sharding))

    def _run_decode(self, params: Params, rows: jax.Array, steps: int, enough: int) -> np.ndarray:
        """Draws until `steps` are taken or `enough` slots are left; returns what `_harvest` reads."""
        limits = jax.device_put(np.array([steps, enough], np.int32), self._limit_sharding)
        state, self._state = self._state, None
        self._state, report = self._decode(params, state, rows, limits)
        return np.asarray(jax.device_get(report))

    def _prefill_round(self, params: Params) -> None:
        """One piece of every waiting prompt, grouped into calls by padded length."""
        longest = self.buckets.prefill_lengths[-1]
        groups: dict[int, list[int]] = {}
        unready = {self._running[slot].row for slot in self._waiting}
        for slot in self._waiting:
            item = self._running[slot]
            if item.source != item.row and item.source in unready:
                continue  # its source comes first
            rest = min(len(item.prompt) - item.prefilled, longest)
            groups.setdefault(pick(rest, self.buckets.prefill_lengths), []).append(slot)
        assert groups, "prompts wait for each other"
        for length, slots in sorted(groups.items()):
            for call in self._calls(slots):
                self._prefill_call(params, call, length)
        done = [s for s in self._waiting if self._running[s].prefilled == len(self._running[s].prompt)]
        self._waiting = [slot for slot in self._waiting if slot not in done]
        for slot in done:
            self._streams.prefilled(self._running[slot].row)

    def _calls(self, slots: list[int]) -> list[list[int | None]]:
        """Splits slots into calls; a call's row i belongs to shard i // (rows / shards), None marks padding."""
        per_shard = self.slots // self._shards
        queues = [[slot for slot in slots if slot // per_shard == shard] for shard in range(self._shards)]
        most = self.buckets.prefill_rows[-1]
        calls: list[list[int | None]] = []
        while any(queues):
            size = pick(min(max(map(len, queues)), most), self.buckets.prefill_rows)
            call: list[int | None] = []
            for queue in queues:
                part, queue[:] = queue[:size], queue[size:]
                call += [*part, *[None] * (size - len(part))]
            calls.append(call)
        return calls

    def _prefill_call(self, params: Params, slots: list[int | None], length: int) -> None:
        packed = decoding.empty_call(len(slots), length)
        for index, slot in enumerate(slots):
            if slot is None:
                continue
            item = self._running[slot]
            piece = item.prompt[item.prefilled : item.prefilled + length]
            decoding.pack_row(
                packed[index],
                slot,
                item.row,
                item.source,
                piece,
                start=item.prefilled,
                final=item.prefilled + len(piece) == len(item.prompt),
                budget=item.budget,
                key=segment_key(item.request.key_ids),
                temperature=item.request.temperature,
                top_p=item.request.top_p,
                stop_ids=item.stop_ids,
            )
            item.prefilled += len(piece)
            item.source = item.row
            self.stats.prefilled_tokens += len(piece)
        self._run_prefill(params, packed)

    def _harvest(self, report: np.ndarray) -> list[Sample]:
        columns = self.decode_chunk + 1
        filled, active, steps = report[:, 2 * columns], report[:, 2 * columns + 1], int(report[0, 2 * columns + 2])
        logprobs = np.ascontiguousarray(report[:, columns : 2 * columns]).view(np.float32)
        self.stats.decode_steps += steps
        finished = []
        for slot in sorted(self._running):
            item, count = self._running[slot], int(filled[slot])
            self.stats.busy_slot_steps += count - (item.count == 0)  # a segment's first token came from its prefill
            self.stats.decoded_tokens += count
            item.count += count
            item.tokens.append(report[slot, :count].copy())
            item.logprobs.append(logprobs[slot, :count].copy())
            if not active[slot]:
                finished.append(self._finish(slot, item))
        return finished

    def _finish(self, slot: int, item: _Running) -> Sample:
        tokens = np.concatenate(item.tokens)
        # The cache holds the prompt and every drawn token but the last, which no step has fed.
        self._streams.finish(item.row, len(item.prompt), tokens[:-1])
        del self._running[slot]
        reason: FinishReason = "stop" if int(tokens[-1]) in item.stop_ids else "length"
        return Sample(item.request.request_id, tokens, np.concatenate(item.logprobs), reason)


def _checked_stop_ids(stop_ids: Sequence[int]) -> tuple[int, ...]:
    if len(stop_ids) > decoding.STOP_COLUMNS:
        raise ValueError(f"at most {decoding.STOP_COLUMNS} stop ids, got {list(stop_ids)}")
    return tuple(int(i) for i in stop_ids)


def _state_shardings(mesh: Mesh, axes: Any, state: decoding.SamplerState) -> Any:
    rows: Any = NamedSharding(mesh, PartitionSpec(BATCH_AXES))

    def cached(array: Any, at: decoding.Axes) -> NamedSharding:
        names: list[str | None] = [None] * array.ndim
        names[at.rows], names[at.heads] = "batch", "kv_heads"
        return NamedSharding(mesh, partition_spec(mesh, tuple(names), array.shape))

    pool, working = (jax.tree.map(cached, arrays, axes) for arrays in (state.pool, state.working))
    drawing = jax.tree.map(lambda _: rows, state.drawing)
    return decoding.SamplerState(pool, working, drawing, jax.tree.map(lambda _: replicated(mesh), state.by_position))
