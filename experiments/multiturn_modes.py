"""Three ways to schedule the multi-turn workload: the same generations, the same trained tokens, different costs.

    ours             whatever any trajectory waits for takes a free slot, kept caches, packed rows that share beginnings
    lockstep-reused  all ACT generations of a round end before any REHEARSE begins; kept caches, a row per segment
    lockstep-fresh   the same, and every prompt is encoded from its first token

Every request asks for exactly the scripted number of tokens and has no stop id, and what is sampled does not depend on
the schedule. Drives the library's own `Sampler`, `make_batch` and train step. Used by `bench.py`.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_limits import Work, decode_work, delta_prefill_work, train_work
from multiturn import Attempt, build_prompt, role_of, round_up, segment_sizes

from envace_jax.batching import make_batch
from envace_jax.buckets import Buckets
from envace_jax.models.qwen import QwenConfig, make_policy
from envace_jax.sampling import Sample, Sampler, SampleRequest, SamplerStats
from envace_jax.train_step import TrainStepConfig, init_train_state, make_optimizer, make_train_step
from envace_jax.types import Params, Policy, Segment, TrainBatch, Trajectory

MODES = ("ours", "lockstep-reused", "lockstep-fresh")
LAYOUTS = {"ours": "shared", "lockstep-reused": "segment", "lockstep-fresh": "segment"}
LONG_ROWS = 3
MOST_SEGMENTS = 1 << 10  # of one trajectory; request ids are number * MOST_SEGMENTS + index
Tick = Callable[[str], None]


# --- what all modes share ---


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the sampler, the same for every mode, and of the train step."""

    slots: int = 16
    decode_chunk: int = 8
    cache_rows: int = 0  # kept streams; 0: two for each trajectory, so that none is evicted
    # A prefill costs about what its padded tokens cost; on a CPU a row of its own is no dearer than one of several.
    prefill_lengths: tuple[int, ...] = (64, 128, 192, 256, 384, 512, 768, 1024)
    prefill_rows: tuple[int, ...] = (1,)
    # Of a training row that holds several streams; 0: LONG_ROWS longest streams, rounded up to `rounding`. A row for
    # one segment has the length of the longest stream.
    row_length: int = 0
    rounding: int = 256
    micro_batch_rows: int = 2  # of the latter; of the longer rows about as many tokens
    logprob_chunk: int = 2048


@dataclasses.dataclass(frozen=True)
class Rows:
    """The shape of a layout's training rows, and the train step for them."""

    length: int
    micro_batch: int  # rows
    step: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Setup:
    """One sampler, one script and a train step for each layout, which all modes use in turn."""

    config: QwenConfig
    script: tuple[Attempt, ...]
    seed: int
    settings: Settings
    policy: Policy
    params: Params
    ready: Params  # for decoding
    sampler: Sampler
    optimizer: Any
    rows: dict[str, Rows]  # by layout


def make_setup(config: QwenConfig, script: tuple[Attempt, ...], settings: Settings, seed: int) -> Setup:
    """Raises ValueError where the longest stream does not fit into a row of `settings.row_length`."""
    longest = max(sum(sizes) for attempt in script for sizes in segment_sizes(attempt))
    max_length = round_up(longest, settings.rounding)
    row_length = settings.row_length or round_up(int(LONG_ROWS * longest), settings.rounding)
    if row_length < longest:
        raise ValueError(f"row_length {row_length} is below the longest stream of the script, {longest} tokens")
    policy = make_policy(config)
    caches = (*(size for size in (1024, 2048) if size < max_length), max_length)
    buckets = Buckets(settings.prefill_lengths, settings.prefill_rows, caches)
    sampler = Sampler(
        with_aliases(policy),
        slots=settings.slots,
        max_length=max_length,
        buckets=buckets,
        vocab_limit=config.vocab_size,
        stop_ids=(),
        decode_chunk=settings.decode_chunk,
        cache_rows=settings.cache_rows or 2 * len(script),
    )
    optimizer = make_optimizer(1e-6)
    long = max(1, round(settings.micro_batch_rows * max_length / row_length))

    def rows(length: int, micro_batch: int) -> Rows:
        config = TrainStepConfig(micro_batch_rows=micro_batch, logprob_chunk=settings.logprob_chunk)
        return Rows(length, micro_batch, make_train_step(policy, optimizer, config))

    params = policy.init(jax.random.key(seed))
    return Setup(
        config,
        script,
        seed,
        settings,
        policy,
        params,
        policy.for_decoding(params),
        sampler,
        optimizer,
        {"shared": rows(row_length, long), "segment": rows(max_length, settings.micro_batch_rows)},
    )


def with_aliases(policy: Policy) -> Policy:
    """The same model under many names for each token: id + n * vocab_size means id, for every n up to int32's end.

    The sampler finds kept prefixes by comparing ids, so a prompt under names of its own is encoded from its first token
    whatever the sampler holds or shares, and its samples are the same. It costs one remainder per token.
    """
    size = policy.vocab_size

    def apply(params: Params, tokens: jax.Array, *rest: Any, **named: Any) -> Any:
        return policy.apply(params, tokens % size, *rest, **named)

    return dataclasses.replace(policy, apply=apply)


# --- rollout ---


@dataclasses.dataclass(frozen=True)
class Rollout:
    trajectories: tuple[Trajectory, ...]  # in the script's order
    seconds: float
    stats: SamplerStats
    compiled: int  # programs compiled meanwhile


def play(setup: Setup, mode: str, tick: Tick = lambda text: None) -> Rollout:
    """Generates the whole script in one of MODES, from an empty sampler."""
    sampler, script = setup.sampler, setup.script
    sampler.reset()
    sampler.stats = SamplerStats()
    compiled, start = sampler.compile_count, time.perf_counter()
    played: list[tuple[Segment, ...]] = [() for _ in script]
    if mode == "ours":
        _wave(setup, played, range(len(script)), requeue=True, fresh=False, tick=tick)
    else:
        for index in range(max(len(attempt.lengths) for attempt in script)):
            if mode == "lockstep-fresh":
                sampler.reset()
            numbers = [number for number, attempt in enumerate(script) if index < len(attempt.lengths)]
            _wave(setup, played, numbers, requeue=False, fresh=mode == "lockstep-fresh", tick=tick)
    seconds = time.perf_counter() - start
    trajectories = tuple(
        Trajectory(str(attempt.task), attempt.task, attempt.attempt, segments, 0.0, "ok", "done")
        for attempt, segments in zip(script, played, strict=True)
    )
    return Rollout(trajectories, seconds, sampler.stats, sampler.compile_count - compiled)


def _wave(
    setup: Setup,
    played: list[tuple[Segment, ...]],
    numbers: Iterable[int],
    *,
    requeue: bool,
    fresh: bool,
    tick: Tick,
) -> None:
    """Generates the next segment of each trajectory in `numbers`, and with `requeue` all that follow; fills `played`.

    A free slot goes to the lowest waiting number, as in `rollout.py`, and lockstep too refills slots within its wave.
    """
    sampler, total = setup.sampler, sum(len(attempt.lengths) for attempt in setup.script)
    waiting = sorted(numbers)
    prompts: dict[int, np.ndarray] = {}  # of what is being sampled, by trajectory
    while waiting or prompts:
        requests = []
        for _ in range(min(sampler.free(), len(waiting))):
            number = heapq.heappop(waiting)
            prompts[number] = build_prompt(setup.script[number], [segment.tokens for segment in played[number]])
            requests.append(_request(setup, number, len(played[number]), prompts[number], fresh))
        sampler.submit(requests)
        for sample in sampler.step(setup.ready):
            number = sample.request_id // MOST_SEGMENTS
            index = len(played[number])
            played[number] += (_segment(index, prompts.pop(number), sample),)
            if requeue and index + 1 < len(setup.script[number].lengths):
                heapq.heappush(waiting, number)
        tick(f"{sum(map(len, played))}/{total} segments")


def _request(setup: Setup, number: int, index: int, prompt: np.ndarray, fresh: bool) -> SampleRequest:
    attempt, request_id = setup.script[number], number * MOST_SEGMENTS + index
    alias = 1 + sum(len(other.lengths) for other in setup.script[:number]) + index if fresh else 0
    return SampleRequest(
        request_id=request_id,
        prompt_tokens=(prompt + np.int32(alias * setup.policy.vocab_size)).tolist(),
        max_tokens=attempt.lengths[index],
        key_ids=(setup.seed, attempt.task, attempt.attempt, index),
        stop_ids=(),
    )


def _segment(index: int, prompt: np.ndarray, sample: Sample) -> Segment:
    return Segment(role_of(index), prompt, sample.tokens, sample.logprobs, sample.finish_reason, policy_version=0)


# --- training ---


@dataclasses.dataclass(frozen=True)
class Training:
    batch_seconds: float
    step_seconds: float
    rows: int  # that hold something; the empty ones that follow them cost nothing (`train_step.py`)
    row_length: int
    sequences: tuple[int, ...]  # tokens of each sequence
    trained_tokens: int
    batch_fill: float  # empty rows included
    loss: float
    compiled: int

    @property
    def row_tokens(self) -> int:
        return self.rows * self.row_length

    @property
    def fill(self) -> float:
        return sum(self.sequences) / self.row_tokens


def advantages_of(trajectories: Sequence[Trajectory], seed: int) -> list[np.ndarray]:
    """Random advantages, f32[segments] per trajectory."""
    return [np.random.default_rng([seed, i]).normal(size=len(t.segments)) for i, t in enumerate(trajectories)]


def train(setup: Setup, mode: str, trajectories: Sequence[Trajectory], *, warm_up: bool = False) -> Training:
    """Lays a batch out in the mode's layout and takes one train step on it, from the setup's parameters.

    With `warm_up` the batch trains nothing, so that the step is compiled at this shape and does no work.
    """
    rows = setup.rows[LAYOUTS[mode]]
    state = init_train_state(jax.tree.map(jnp.copy, setup.params), setup.optimizer)
    values = advantages_of(trajectories, setup.seed)
    jax.block_until_ready(state)
    compiled, start = _programs(rows.step), time.perf_counter()
    batch, stats = make_batch(
        trajectories,
        values,
        layout=LAYOUTS[mode],
        row_length=rows.length,
        rows_multiple=rows.micro_batch,
    )
    made = time.perf_counter()
    mask: Any = np.zeros_like(batch.loss_mask) if warm_up else batch.loss_mask
    given = dataclasses.replace(batch, loss_mask=mask)
    state, step_stats = rows.step(state, jax.device_put(given))
    jax.block_until_ready((state, step_stats))
    done = time.perf_counter()
    return Training(
        batch_seconds=made - start,
        step_seconds=done - made,
        rows=int(np.any(batch.sequence_ids, axis=1).sum()),
        row_length=rows.length,
        sequences=_sequence_lengths(batch),
        trained_tokens=int(np.sum(batch.loss_mask)),
        batch_fill=stats["fill"],
        loss=float(step_stats["loss"]),
        compiled=_programs(rows.step) - compiled,
    )


def _programs(step: Any) -> int:
    return step._cache_size()


def _sequence_lengths(batch: TrainBatch) -> tuple[int, ...]:
    counts = [np.bincount(row)[1:] for row in np.asarray(batch.sequence_ids)]
    return tuple(int(count) for row in counts for count in row)


# --- figures ---


def nominal_work(setup: Setup, rollout: Rollout, training: Training) -> tuple[Work, Work]:
    """What the rollout and the training needed at least, given what was kept; attention within prefills is left out."""
    sizes = [size for attempt in setup.script for size in segment_sizes(attempt)]
    # The first token of a segment is drawn by its prefill; token i after it reads the prompt and i earlier ones.
    read = sum((new - 1) * prompt + new * (new - 1) / 2 for prompt, new in sizes)
    stats = rollout.stats
    encoded = delta_prefill_work(setup.config, stats.prefilled_tokens, len(sizes))
    decoded = decode_work(setup.config, stats.decoded_tokens - len(sizes), stats.decode_steps, read)
    return encoded + decoded, train_work(setup.config, training.sequences)


def figures(rollout: Rollout, training: Training, slots: int) -> dict[str, float]:
    """What a mode cost, as plain numbers."""
    stats = rollout.stats
    train_s = training.batch_seconds + training.step_seconds
    total = rollout.seconds + train_s
    return {
        "rollout_s": rollout.seconds,
        "batch_s": training.batch_seconds,
        "train_s": train_s,
        "total_s": total,
        "prefilled_tokens": stats.prefilled_tokens,
        "reused_tokens": stats.reused_tokens,
        "decoded_tokens": stats.decoded_tokens,
        "decode_steps": stats.decode_steps,
        "busy": stats.busy_slot_steps / (stats.decode_steps * slots),
        "rollout_tokens_per_s": stats.decoded_tokens / rollout.seconds,
        "tokens_per_s": stats.decoded_tokens / total,
        "rows": training.rows,
        "row_length": training.row_length,
        "row_tokens": training.row_tokens,
        "sequence_tokens": sum(training.sequences),
        "trained_tokens": training.trained_tokens,
        "fill": training.fill,
        "batch_fill": training.batch_fill,
        "loss": training.loss,
        "compiled": rollout.compiled + training.compiled,
    }


def ratios(modes: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """How many times what ours costs each other mode costs."""
    wanted = {"wall": "total_s", "rollout": "rollout_s", "train": "train_s", "prefilled": "prefilled_tokens"}
    wanted |= {"row_tokens": "row_tokens", "sequence_tokens": "sequence_tokens"}
    ours = modes["ours"]

    def over(other: float, own: float) -> float:
        return other / own if own else math.inf

    return {
        mode: {name: over(values[key], ours[key]) for name, key in wanted.items()}
        for mode, values in modes.items()
        if mode != "ours"
    }
