"""The single-purpose cells of the benchmark: decode, prefill, train step, and the two sweeps over decoding.

A cell does one fixed piece of work with the library's own sampler or train step and says how long it took. Knows
nothing of rounds, medians or tables (`bench.py`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_limits import Work, decode_work, prefill_work, train_work

from envace_jax.buckets import Buckets
from envace_jax.models.qwen import QwenConfig, make_policy
from envace_jax.sampling import Sampler, SampleRequest, SamplerStats
from envace_jax.train_step import TrainStepConfig, init_train_state, make_optimizer, make_train_step
from envace_jax.types import Params, Policy, TrainBatch


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The work of the cells; by default the peers' 16 prompts of 128, 128 new tokens, and 8 rows of 512."""

    slots: int = 16
    prompt: int = 128  # tokens before what the decode cell draws
    new: int = 128  # tokens it draws per slot
    prefill_prompt: int = 512
    rows: int = 8
    row_length: int = 512
    context_slots: int = 8  # of the context sweep: eight prompts of 8,192 tokens have to be encoded first
    slot_counts: tuple[int, ...] = (8, 16, 32, 64)  # of the slots sweep
    contexts: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)  # used positions, of the context sweep
    decode_chunk: int = 16
    micro_batch_rows: int = 8
    logprob_chunk: int = 1024


TINY_SHAPES = Shapes(
    slots=4,
    prompt=16,
    new=16,
    prefill_prompt=32,
    rows=4,
    row_length=64,
    context_slots=2,
    slot_counts=(2, 4),
    contexts=(64, 128, 256),
    decode_chunk=4,
    micro_batch_rows=4,
)


@dataclasses.dataclass(frozen=True)
class Model:
    config: QwenConfig
    policy: Policy
    params: Params
    ready: Params  # for decoding


@dataclasses.dataclass(frozen=True)
class Cell:
    """`run(repetition)` gives the seconds that `tokens` tokens took, whose nominal work is `work`."""

    name: str
    tokens: int
    steps: int  # that a repetition's seconds are divided by in the table
    work: Work
    run: Callable[[int], float]
    compiled: Callable[[], int]


def make_model(config: QwenConfig) -> Model:
    policy = make_policy(config)
    params = policy.init(jax.random.key(0))
    return Model(config, policy, params, policy.for_decoding(params))


def make_sampler(model: Model, slots: int, chunk: int, prefill: tuple[int, int], caches: tuple[int, ...]) -> Sampler:
    """A sampler with one prefill shape (length, rows), whose cache may grow through `caches`."""
    buckets = Buckets(prefill_lengths=prefill[:1], prefill_rows=prefill[1:], cache_lengths=caches)
    limit = model.config.vocab_size
    return Sampler(
        model.policy,
        slots=slots,
        max_length=caches[-1],
        buckets=buckets,
        vocab_limit=limit,
        stop_ids=(),
        decode_chunk=chunk,
    )


def make_requests(model: Model, count: int, length: int, tokens: int, seed: Sequence[int]) -> list[SampleRequest]:
    """`count` random prompts of `length` tokens, each to be continued by exactly `tokens`."""
    prompts = np.random.default_rng(seed).integers(0, model.config.vocab_size, (count, length))
    return [SampleRequest(i, row.tolist(), tokens, (*seed, i), stop_ids=()) for i, row in enumerate(prompts)]


def drain(sampler: Sampler, params: Params) -> None:
    while sampler.free() < sampler.slots:
        sampler.step(params)


def decode_cell(
    name: str, model: Model, sampler: Sampler, prompt: int, new: int, before: Callable[[], None] = lambda: None
) -> Cell:
    """Decoding alone: the first `step`, which also encodes the prompts, is not timed, and its prompts stay cached.

    `before` runs once, before the first repetition.
    """
    first = 1 + sampler.decode_chunk  # tokens that each slot has drawn before the clock starts
    requests = make_requests(model, sampler.slots, prompt, first + new, (1, prompt))
    prepare = [before]

    def run(repetition: int) -> float:
        while prepare:
            prepare.pop()()
        sampler.submit(requests)
        sampler.step(model.ready)
        sampler.stats = SamplerStats()
        start = time.perf_counter()
        drain(sampler, model.ready)
        seconds = time.perf_counter() - start
        if sampler.stats.decode_steps != new:
            raise RuntimeError(f"{name}: {sampler.stats.decode_steps} decode steps were timed instead of {new}")
        return seconds

    tokens = sampler.slots * new
    read = tokens * (prompt + first + (new - 1) / 2)
    work = decode_work(model.config, tokens, new, read)
    return Cell(name, tokens, new, work, run, lambda: sampler.compile_count)


def plain_decode_cell(name: str, model: Model, shapes: Shapes, slots: int) -> Cell:
    length = shapes.prompt + 1 + shapes.decode_chunk + shapes.new
    sampler = make_sampler(model, slots, shapes.decode_chunk, (shapes.prompt, slots), (length,))
    return decode_cell(name, model, sampler, shapes.prompt, shapes.new)


def context_cell(model: Model, shapes: Shapes, used: int) -> Cell:
    """Decoding up to `used` positions in a cache that a longer prompt has made grow to its full length before."""
    full, chunk = max(shapes.contexts), shapes.decode_chunk
    new = min(shapes.new, 2 * chunk)
    piece = min(512, min(shapes.contexts) // 2)
    sampler = make_sampler(model, shapes.context_slots, chunk, (piece, 1), tuple(sorted(shapes.contexts)))

    def grow() -> None:
        sampler.submit(make_requests(model, 1, full - 1, 1, (2,)))
        drain(sampler, model.ready)

    return decode_cell(f"context {used}", model, sampler, used - 1 - chunk - new, new, grow)


def prefill_cell(model: Model, shapes: Shapes) -> Cell:
    """Encoding new prompts and drawing the first token of each."""
    slots, length = shapes.slots, shapes.prefill_prompt
    sampler = make_sampler(model, slots, 1, (length, slots), (length + 1,))

    def run(repetition: int) -> float:
        requests = make_requests(model, slots, length, 1, (3, repetition))
        start = time.perf_counter()
        sampler.submit(requests)
        drain(sampler, model.ready)
        return time.perf_counter() - start

    work = prefill_work(model.config, slots, length)
    return Cell("prefill", slots * length, 1, work, run, lambda: sampler.compile_count)


def full_rows(rows: int, length: int, vocab_size: int) -> TrainBatch:
    """Rows without padding, a sequence each, whose first quarter is a prompt; random tokens and advantages."""
    rng, shape = np.random.default_rng(4), (rows, length)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
    advantages = np.broadcast_to(rng.standard_normal((rows, 1), np.float32), shape)
    ones, zeros = np.ones(shape, np.int32), np.zeros(shape, np.int32)
    arrays: list[Any] = [rng.integers(0, vocab_size, shape).astype(np.int32), positions, ones]
    arrays += [positions >= length // 4, advantages, zeros.astype(np.float32), zeros]
    return TrainBatch(*arrays)


def train_cell(model: Model, shapes: Shapes) -> Cell:
    """One optimizer step on full rows."""
    rows, length = shapes.rows, shapes.row_length
    config = TrainStepConfig(micro_batch_rows=shapes.micro_batch_rows, logprob_chunk=shapes.logprob_chunk)
    optimizer = make_optimizer(1e-6)
    step: Any = make_train_step(model.policy, optimizer, config)
    batch = jax.device_put(full_rows(rows, length, model.config.vocab_size))
    states: list[Any] = []  # the one under way: a step donates it

    def run(repetition: int) -> float:
        if not states:
            states.append(init_train_state(jax.tree.map(jnp.copy, model.params), optimizer))
        start = time.perf_counter()
        result = jax.block_until_ready(step(states.pop(), batch))
        seconds = time.perf_counter() - start
        states.append(result[0])
        return seconds

    return Cell("train", rows * length, 1, train_work(model.config, [length] * rows), run, step._cache_size)


def make_cells(model: Model, shapes: Shapes, cells: Sequence[str], sweeps: Sequence[str]) -> list[Cell]:
    """The cells and the sweeps that are asked for, each with a sampler or a train step of its own."""
    made = []
    if "decode" in cells:
        made.append(plain_decode_cell("decode", model, shapes, shapes.slots))
    if "prefill" in cells:
        made.append(prefill_cell(model, shapes))
    if "train" in cells:
        made.append(train_cell(model, shapes))
    if "slots" in sweeps:
        made += [plain_decode_cell(f"slots {count}", model, shapes, count) for count in shapes.slot_counts]
    if "context" in sweeps:
        made += [context_cell(model, shapes, used) for used in shapes.contexts]
    return made
