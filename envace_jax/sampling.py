"""The sampler: requests go into slots, slots keep their key-value caches, finished samples come out.

A new prompt takes the free slot that already holds its longest prefix and pays only for the rest (delta prefill).
Knows token ids only, no text, roles or episodes. Device work is `decoding.py`'s; everything decided here derives
from values that all processes hold, so several hosts may run it in step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from envace_jax import decoding
from envace_jax.buckets import Buckets, pick
from envace_jax.sharding import BATCH_AXES, axis_size, batch_sharding, partition_spec, replicated
from envace_jax.types import FinishReason, KVCache, Params, Policy


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
    prefilled: int  # prompt tokens in the cache
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


def common_prefix(prompt: np.ndarray, held: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Leading tokens that prompt i32[P] shares with each row of held i32[N, S], of which lengths i32[N] are valid."""
    size = min(len(prompt), held.shape[1])
    shared = np.zeros(len(held), np.int64)
    alive = np.arange(len(held))
    for begin in range(0, size, 256):  # most rows part early: look at the rest in pieces
        end = min(begin + 256, size)
        same = held[alive, begin:end] == prompt[begin:end]
        whole = same.all(axis=1)
        shared[alive] = np.where(whole, end, begin + same.argmin(axis=1))
        alive = alive[whole & (lengths[alive] >= end)]
        if not len(alive):
            break
    return np.minimum(shared, lengths)


class Sampler:
    """Continuous batching over a fixed number of slots.

    Args:
      policy: the model, as pure functions.
      slots: sequences decoded side by side; a multiple of the mesh's data x fsdp.
      max_length: positions per slot, prompt and sample together.
      buckets: padded shapes, see `buckets.py`; the largest cache length must be at least `max_length`.
      vocab_limit: the tokenizer's length; ids at or above it are never drawn.
      stop_ids: ids that end a segment unless its request says otherwise (at most 4).
      mesh: slots are split over ("data", "fsdp"), kv heads over "tensor" where divisible.
      cache_dtype: of keys and values.
      decode_chunk: the most tokens a call of `step` draws per slot.
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
        mesh: Mesh | None = None,
        cache_dtype: Any = jnp.float32,
        decode_chunk: int = 16,
    ):
        self._shards = axis_size(mesh, BATCH_AXES) if mesh is not None else 1
        if slots < 1 or slots % self._shards:
            raise ValueError(f"slots must be a positive multiple of {self._shards} (mesh data x fsdp), got {slots}")
        if buckets.cache_lengths[-1] < max_length:
            raise ValueError(f"cache_lengths end at {buckets.cache_lengths[-1]}, below max_length {max_length}")
        if not 0 < vocab_limit <= policy.vocab_size:
            raise ValueError(f"vocab_limit must lie in 1..{policy.vocab_size} (embedding rows), got {vocab_limit}")
        if decode_chunk < 1:
            raise ValueError(f"decode_chunk must be at least 1, got {decode_chunk}")
        self.slots, self.max_length, self.buckets, self.mesh = slots, max_length, buckets, mesh
        self.decode_chunk = decode_chunk
        self.stop_ids = _checked_stop_ids(stop_ids)
        self.stats = SamplerStats()
        # The output buffer also holds the token that a prefill draws before the chunk.
        axes = decoding.cache_axes(policy)
        make = functools.partial(decoding.fresh_state, policy, slots, columns=decode_chunk + 1, dtype=cache_dtype)
        shardings = None
        if mesh is not None:
            shardings = _state_shardings(mesh, axes, jax.eval_shape(functools.partial(make, length=max_length)))
        outputs = None if mesh is None else (shardings, replicated(mesh))
        self._row_sharding = None if mesh is None else batch_sharding(mesh)
        self._limit_sharding = None if mesh is None else replicated(mesh)
        self._fresh = jax.jit(make, static_argnames="length", out_shardings=shardings)
        self._resize = jax.jit(functools.partial(decoding.resize, axes), static_argnums=1, out_shardings=shardings)
        self._prefill = jax.jit(
            functools.partial(decoding.prefill, policy, vocab_limit, axes, self._shards),
            donate_argnums=1,
            out_shardings=shardings,
        )
        self._decode = jax.jit(
            functools.partial(decoding.decode, policy, vocab_limit), donate_argnums=1, out_shardings=outputs
        )
        self._capacity = 0
        self._clock = 0
        self.reset()

    @property
    def compile_count(self) -> int:
        """Programs compiled so far, bounded by `buckets.compile_bound()`."""
        functions: tuple[Any, ...] = (self._fresh, self._resize, self._prefill, self._decode)
        return sum(function._cache_size() for function in functions)

    def reset(self) -> None:
        """Forgets all kept caches and drops whatever is running. To be called after a weight update."""
        self._state: decoding.SlotState | None = None
        self._held = np.zeros((self.slots, self.max_length), np.int32)  # tokens whose keys and values a slot keeps
        self._held_length = np.zeros(self.slots, np.int64)
        self._last_used = np.zeros(self.slots, np.int64)
        self._running: dict[int, _Running] = {}  # by slot
        self._waiting: list[int] = []  # slots whose prompt is not yet prefilled, in order of arrival

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
        running = [self._check(request) for request in requests]
        for index, slot, shared in self._choose([item.prompt for item in running]):
            item = running[index]
            item.prefilled = shared
            self.stats.reused_tokens += shared
            self._held[slot, : len(item.prompt)] = item.prompt
            self._held_length[slot] = 0  # not to be matched while it runs
            self._running[slot] = item
            self._waiting.append(slot)

    def step(self, params: Params) -> list[Sample]:
        """Prefills what was submitted, then draws up to `decode_chunk` tokens per slot; returns what finished."""
        if not self._running:
            return []
        self._reserve()
        while self._waiting:
            self._prefill_round(params)
        limits = jax.device_put(np.array([self.decode_chunk, 0], np.int32), self._limit_sharding)
        state, self._state = self._state, None
        self._state, report = self._decode(params, state, limits)
        return self._harvest(np.asarray(jax.device_get(report)))

    def _check(self, request: SampleRequest) -> _Running:
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
        return _Running(request, prompt, 0, min(request.max_tokens, room), stop_ids)

    def _choose(self, prompts: Sequence[np.ndarray]) -> list[tuple[int, int, int]]:
        """(request index, slot, tokens kept) for each prompt, longest common prefixes first.

        A slot is given up for a prefix only when that is at least half of what it holds: a shared system prompt must
        not cost another stream its cache. All others take the least recently used slot, with whatever they share.
        """
        free = np.array([slot for slot in range(self.slots) if slot not in self._running])
        held, lengths = self._held[free], self._held_length[free]
        # The last prompt token is always prefilled: its logits draw the first token.
        shared = np.stack([np.minimum(common_prefix(p, held, lengths), len(p) - 1) for p in prompts])
        continues = (2 * shared >= lengths) & (shared > 0)
        chosen: dict[int, int] = {}  # request index -> column
        taken: set[int] = set()
        rows, columns = np.nonzero(continues)
        order = np.lexsort((self._last_used[free[columns]], rows, -shared[rows, columns]))
        for row, column in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
            if row not in chosen and column not in taken:
                chosen[row] = column
                taken.add(column)
        spare = iter([c for c in np.argsort(self._last_used[free], kind="stable").tolist() if c not in taken])
        for row in range(len(prompts)):
            if row not in chosen:
                chosen[row] = next(spare)
        return [(row, int(free[chosen[row]]), int(shared[row, chosen[row]])) for row in range(len(prompts))]

    def _reserve(self) -> None:
        """Makes the cache long enough for the coming prefills and one decode chunk."""
        longest = int(self._held_length.max())
        for item in self._running.values():
            drawn = min(item.budget, max(item.count, 1) + self.decode_chunk)
            longest = max(longest, len(item.prompt) + drawn - 1)
        needed = pick(longest, self.buckets.cache_lengths, "cache length")
        if self._state is None:
            self._capacity = needed
            self._state = self._fresh(length=needed)
        elif needed > self._capacity:
            state, self._state = self._state, None
            self._state = self._resize(state, needed)
            self._capacity = needed

    def _prefill_round(self, params: Params) -> None:
        """One piece of every waiting prompt, grouped into calls by padded length."""
        longest = self.buckets.prefill_lengths[-1]
        groups: dict[int, list[int]] = {}
        for slot in self._waiting:
            item = self._running[slot]
            rest = min(len(item.prompt) - item.prefilled, longest)
            groups.setdefault(pick(rest, self.buckets.prefill_lengths), []).append(slot)
        for length, slots in sorted(groups.items()):
            for rows in self._rows(slots):
                self._prefill_call(params, rows, length)
        self._waiting = [s for s in self._waiting if self._running[s].prefilled < len(self._running[s].prompt)]

    def _rows(self, slots: list[int]) -> list[list[int | None]]:
        """Splits slots into calls; a call's row i belongs to shard i // (rows / shards), None marks padding."""
        per_shard = self.slots // self._shards
        queues = [[slot for slot in slots if slot // per_shard == shard] for shard in range(self._shards)]
        most = min(self.buckets.prefill_rows[-1], per_shard)
        calls: list[list[int | None]] = []
        while any(queues):
            size = min(pick(min(max(map(len, queues)), most), self.buckets.prefill_rows), per_shard)
            call: list[int | None] = []
            for shard, queue in enumerate(queues):
                part, queue[:] = queue[:size], queue[size:]
                if size == per_shard:  # the whole cache in place: row b is slot b
                    call += [slot if slot in part else None for slot in range(shard * size, (shard + 1) * size)]
                else:
                    call += [*part, *[None] * (size - len(part))]
            calls.append(call)
        return calls

    def _prefill_call(self, params: Params, rows: list[int | None], length: int) -> None:
        packed = np.zeros((len(rows), decoding.HEADER + length), np.int32)
        used = set(rows)
        per_shard, size = self.slots // self._shards, len(rows) // self._shards
        for index, slot in enumerate(rows):
            if slot is None:  # padding names another slot of its shard, which stays as it is
                first = index // size * per_shard
                whole = size == per_shard
                slot = index if whole else next(s for s in range(first, first + per_shard) if s not in used)
                used.add(slot)
                packed[index, decoding.SLOT] = slot
                continue
            item = self._running[slot]
            piece = item.prompt[item.prefilled : item.prefilled + length]
            final = item.prefilled + len(piece) == len(item.prompt)
            decoding.pack_row(
                packed[index],
                slot,
                piece,
                start=item.prefilled,
                final=final,
                budget=item.budget,
                key=segment_key(item.request.key_ids),
                temperature=item.request.temperature,
                top_p=item.request.top_p,
                stop_ids=item.stop_ids,
            )
            item.prefilled += len(piece)
            self.stats.prefilled_tokens += len(piece)
        state, self._state = self._state, None
        self._state = self._prefill(params, state, jax.device_put(packed, self._row_sharding))

    def _harvest(self, report: np.ndarray) -> list[Sample]:
        columns = self.decode_chunk + 1
        filled, active, steps = report[:, 2 * columns], report[:, 2 * columns + 1], int(report[0, 2 * columns + 2])
        logprobs = np.ascontiguousarray(report[:, columns : 2 * columns]).view(np.float32)
        self._clock += 1
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
        end = len(item.prompt) + len(tokens) - 1
        self._held[slot, len(item.prompt) : end] = tokens[:-1]
        self._held_length[slot] = end
        self._last_used[slot] = self._clock
        del self._running[slot]
        reason: FinishReason = "stop" if int(tokens[-1]) in item.stop_ids else "length"
        return Sample(item.request.request_id, tokens, np.concatenate(item.logprobs), reason)


def _checked_stop_ids(stop_ids: Sequence[int]) -> tuple[int, ...]:
    if len(stop_ids) > decoding.STOP_COLUMNS:
        raise ValueError(f"at most {decoding.STOP_COLUMNS} stop ids, got {list(stop_ids)}")
    return tuple(int(i) for i in stop_ids)


def _state_shardings(mesh: Mesh, axes: decoding.CacheAxes, state: decoding.SlotState) -> Any:
    rows: Any = NamedSharding(mesh, PartitionSpec(BATCH_AXES))

    def cached(array: Any) -> NamedSharding:
        names: list[str | None] = [None] * array.ndim
        names[axes.slots], names[axes.heads] = "batch", "kv_heads"
        return NamedSharding(mesh, partition_spec(mesh, tuple(names), array.shape))

    k, v = jax.tree.map(cached, (state.cache.k, state.cache.v))
    return decoding.SlotState(KVCache(k, v, rows), jax.tree.map(lambda _: rows, state.drawing))
