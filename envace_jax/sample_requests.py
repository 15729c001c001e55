"""What goes into the sampler and comes out of it, and what is noted while it is under way.

Host values only. `calls` deals rows to the shapes and shards of prefill calls, whatever cache they go to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from envace_jax import drawing, hosts
from envace_jax.buckets import Buckets, pick
from envace_jax.sharding import batch_sharding, replicated
from envace_jax.types import FinishReason


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
    cached_tokens: int = 0  # of the prompt, found in a kept cache


@dataclasses.dataclass
class SamplerStats:
    """Counts since the sampler was made (or `stats` was replaced)."""

    prefilled_tokens: int = 0
    reused_tokens: int = 0  # prompt tokens found in a kept cache
    decoded_tokens: int = 0
    decode_steps: int = 0
    busy_slot_steps: int = 0  # slots that drew, summed over steps; / (decode_steps x slots) is the occupancy
    paused: int = 0  # times that a segment gave up its pages to others, to be prefilled again


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a sampler's programs are made of, besides the policy; see `Sampler`."""

    slots: int
    max_length: int
    buckets: Buckets
    vocab_limit: int
    rows: int
    pages: int
    page_size: int
    mesh: Mesh | None
    shards: int  # parts that slots, and rows or pages, are dealt to: the mesh's data x fsdp
    dtype: Any
    decode_chunk: int

    @property
    def row_sharding(self) -> NamedSharding | None:
        """Of what there is a row of for each slot, or each row of a prefill call."""
        return None if self.mesh is None else batch_sharding(self.mesh)

    @property
    def everywhere(self) -> NamedSharding | None:
        return None if self.mesh is None else replicated(self.mesh)

    def free_slot(self, part: int, running: Mapping[int, Any]) -> int:
        """The first slot of a part that no request is in."""
        size = self.slots // self.shards
        return next(slot for slot in range(part * size, (part + 1) * size) if slot not in running)

    def limits(self, steps: int, enough: int) -> jax.Array:
        """i32[2], after how many steps and with how many slots left a call of decode ends."""
        return hosts.put(np.array([steps, enough], np.int32), self.everywhere)


@dataclasses.dataclass
class Running:
    """A request in a slot."""

    request: SampleRequest
    prompt: np.ndarray  # i32[P]
    budget: int
    stop_ids: tuple[int, ...]
    row: int = drawing.NOWHERE  # the stream that keeps its cache
    source: int = drawing.NOWHERE  # row that holds the prompt's first `prefilled` tokens
    prefilled: int = 0
    held: bool = False  # its own pages hold those
    cached: int = 0  # tokens of the prompt that were in a kept cache when it came
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    count: int = 0  # tokens drawn

    def longest(self, chunk: int) -> int:
        """Positions that its cache may hold after one more call of decode."""
        return len(self.prompt) + min(self.budget, max(self.count, 1) + chunk) - 1


def segment_key(key_ids: Sequence[int]) -> np.ndarray:
    """u32[2], a hash of the ids in order (any integers of up to 64 bits; their number counts too)."""
    mask = 0xFFFFFFFF
    words = [len(key_ids)]
    for value in map(int, key_ids):
        words += [value & mask, (value >> 32) & mask]
    return np.random.SeedSequence(words).generate_state(2, np.uint32)


def calls(rests: Mapping[int, int], settings: Settings) -> list[tuple[int, list[int | None]]]:
    """Prefill calls (padded tokens, slots) for `rests`, the tokens that each slot has still to prefill.

    A call's row i belongs to shard i // (rows / shards); None marks padding.
    """
    groups: dict[int, list[int]] = {}
    lengths = settings.buckets.prefill_lengths
    for slot, rest in rests.items():
        groups.setdefault(pick(min(rest, lengths[-1]), lengths), []).append(slot)
    return [(length, call) for length, slots in sorted(groups.items()) for call in _by_shard(slots, settings)]


def _by_shard(slots: list[int], settings: Settings) -> list[list[int | None]]:
    per_shard, sizes = settings.slots // settings.shards, settings.buckets.prefill_rows
    queues = [[slot for slot in slots if slot // per_shard == shard] for shard in range(settings.shards)]
    made: list[list[int | None]] = []
    while any(queues):
        size = pick(min(max(map(len, queues)), sizes[-1]), sizes)
        call: list[int | None] = []
        for queue in queues:
            part, queue[:] = queue[:size], queue[size:]
            call += [*part, *[None] * (size - len(part))]
        made.append(call)
    return made


def pack(row: np.ndarray, slot: int, item: Running, piece: np.ndarray, *, start: int, final: bool) -> None:
    """Fills a row of a prefill call with a piece of the item's tokens that begins at position `start`."""
    request = item.request
    drawing.pack_row(
        row, slot, item.row, item.source, piece, start=start, final=final, budget=item.budget,
        key=segment_key(request.key_ids), temperature=request.temperature, top_p=request.top_p,
        stop_ids=item.stop_ids,
    )  # fmt: skip
