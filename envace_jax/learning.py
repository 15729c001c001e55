"""What a step learns from its rollouts: advantages, batch, optimizer step. The run and its replay call the same code.

`learn_from` is a function of the settings, the state and `Rollouts` alone: it asks nobody, samples nothing, and reads
no clock. Knows no task source, responder, judge or file.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from envace_jax import batching, config_checks, evaluate, fidelity, hosts, parts, players, sharding
from envace_jax.batching import deal_rows, make_batch, role_tokens
from envace_jax.buckets import row_shapes, row_tokens
from envace_jax.chat import Chat
from envace_jax.config import RunConfig
from envace_jax.grpo import role_advantages
from envace_jax.metrics import Lesson
from envace_jax.models import hf, qwen
from envace_jax.players import State
from envace_jax.roles import Prompts
from envace_jax.task_sampling import Gathered
from envace_jax.train_step import init_train_state
from envace_jax.types import Params, Policy, Role, Task, TrainBatch, TrainState, Trajectory

Metrics = dict[str, float]
Told = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Learner:
    """What a run learns with; it stays the same during the run."""

    config: RunConfig
    mesh: Mesh
    model: qwen.QwenConfig
    policy: Policy
    prompts: Prompts
    train_step: Any
    score_step: Any
    reference: Params | None  # parameters of the reference policy, only where the loss has a KL term
    base: Params | None  # with LoRA: the frozen parameters that the state's adapters go with

    @property
    def learners(self) -> Mapping[str, tuple[Role, ...]]:
        """The roles that each part of the state learns from, by its name."""
        return players.LEARNERS[config_checks.cast(self.config)[0]]


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """What a step's rollouts gave: all that its learning is a function of, beside the settings and the state."""

    step: int  # the first is 0
    gathered: Gathered
    rehearsed: tuple[Trajectory, ...] = ()  # of held-out results (`fidelity.py`)

    @property
    def all(self) -> tuple[Trajectory, ...]:
        """The attempts at tasks, and then the rehearsals."""
        return *self.gathered.trajectories, *self.rehearsed

    @property
    def learned(self) -> tuple[Trajectory, ...]:
        """Those that advantages and the batch are made of."""
        return *self.gathered.trained, *self.rehearsed


@dataclasses.dataclass(frozen=True)
class Learned:
    """What a step learned."""

    state: State
    metrics: Metrics  # all that follows from the settings, the rollouts and the state before
    advantages: tuple[np.ndarray, ...]  # f32[segments] of each of `Rollouts.learned`
    batches: Mapping[str, TrainBatch]  # of each learner, by its name; numpy


def load(config: RunConfig, mesh: Mesh, folder: Path, chat: Chat, adapters: Path | None) -> tuple[Learner, State]:
    """The model of a folder in Hugging Face layout, with LoRA adapters of a folder or new ones, ready for its first
    step. Nothing is compiled yet."""
    adapts = config.lora.rank > 0
    model, params = hf.load(folder, mesh, config.model.param_dtype, adapts and parts.quantizes(config))
    policy, base = parts.make_policy(config, model, mesh), None
    if adapts:
        base, params = params, parts.make_adapters(config, policy, model, mesh, adapters)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    steps = parts.make_steps(config, policy, chat.vocab_size, mesh, shardings)
    learner = Learner(
        config, mesh, model, policy, parts.make_prompts(config, chat),
        train_step=steps.train, score_step=steps.score, reference=_reference(config, params, base), base=base,
    )  # fmt: skip
    kind = config_checks.cast(config)[0]
    return learner, players.begin(kind, params, lambda own: init_train_state(own, steps.optimizer, mesh, shardings))


def _reference(config: RunConfig, params: Params, base: Params | None) -> Params | None:
    """The reference policy of the KL term: what training starts from, or the base without adapters, which stays."""
    if not config.grpo.kl_coef:
        return None
    return jax.tree.map(jnp.copy, params) if base is None else base


# --- a step ---


def learn_from(learner: Learner, state: State, rollouts: Rollouts, told: Told = lambda rows: None) -> Learned:
    """Advantages, batch and optimizer step of what the rollouts gave. The state is donated. `told` as for `learn`."""
    config, gathered, rehearsed = learner.config, rollouts.gathered, rollouts.rehearsed
    advantages, advantage_stats = advantages_of(config, rollouts)
    state, metrics, batches = learn(learner, state, rollouts.learned, advantages, told)
    metrics |= advantage_stats | players.frozen_stats(learner.learners)
    metrics |= rollout_metrics(gathered.trajectories, gathered.tasks)
    if config.data.filter_zero_variance:
        metrics |= gathered.metrics(config.data.attempts)
    if config.fidelity.calls_per_step:
        metrics |= fidelity.metrics(rehearsed)
        metrics["sampled_tokens"] += metrics["fidelity_tokens"]
    return Learned(state, metrics, tuple(advantages), batches)


def advantages_of(config: RunConfig, rollouts: Rollouts) -> tuple[list[np.ndarray], Metrics]:
    """f32[segments] of each of `rollouts.learned`, and the statistics of the tasks' (`role_advantages`)."""
    grpo = config.grpo
    of = functools.partial(role_advantages, baseline=grpo.baseline, scale=grpo.scale, singleton=grpo.singleton)
    advantages, stats = of(rollouts.gathered.trained)
    return [*advantages, *(config.fidelity.weight * values for values in of(rollouts.rehearsed)[0])], stats


def learn(
    learner: Learner, state: State, trajectories: Sequence[Trajectory], advantages: Sequence[np.ndarray],
    told: Told = lambda rows: None,
) -> tuple[State, Metrics, dict[str, TrainBatch]]:  # fmt: skip
    """One optimizer step of everything that is trained, each on the tokens of its own roles. The state is donated.

    `told` hears of the rows of each batch before its step, whose first run with so many may have to be compiled.
    Returns the new state, the statistics, and the batch of each learner as it was on the host."""
    batches: dict[str, TrainBatch] = {}
    batch_stats: list[Metrics] = []
    stats: dict[str, Any] = {}
    for name, roles in learner.learners.items():
        own = players.of_roles(trajectories, advantages, roles)
        batches[name], counts = make_rows(learner, *own, learner.config.batch.row_buckets)
        told(len(batches[name].tokens))
        new, stats[name] = update(learner, players.part(state, name), batches[name], counts)
        state = players.with_part(state, name, new)
        batch_stats.append(counts)
    plain = {name: {key: float(value) for key, value in own.items()} for name, own in jax.device_get(stats).items()}
    joined = players.joined_batch_stats(batch_stats)
    return state, players.joined_stats(plain) | {f"batch_{name}": value for name, value in joined.items()}, batches


def make_rows(
    learner: Learner, trajectories: Sequence[Trajectory], advantages: Sequence[np.ndarray], row_buckets: Sequence[int]
) -> tuple[TrainBatch, Metrics]:
    """The trajectories as training rows on the host, and the statistics of `make_batch`."""
    chosen, shards = learner.config.batch, sharding.axis_size(learner.mesh, sharding.BATCH_AXES)
    batch, stats = make_batch(
        trajectories, advantages, layout=chosen.layout, row_length=row_tokens(chosen.row_length),
        rows_multiple=chosen.rows_multiple * shards, row_buckets=row_buckets, pad_id=learner.prompts.chat.pad_id,
        drop_zero_advantage=chosen.drop_zero_advantage,
    )  # fmt: skip
    return deal_rows(batch, shards), stats


def bucketed_rows(learner: Learner) -> tuple[int, ...]:
    """The numbers of rows of all batches that fit into `batch.row_buckets`: what a warm-up compiles."""
    chosen, shards = learner.config.batch, sharding.axis_size(learner.mesh, sharding.BATCH_AXES)
    return row_shapes(chosen.rows_multiple * shards, chosen.row_buckets)


def update(learner: Learner, state: TrainState, batch: TrainBatch, batch_stats: Metrics) -> tuple[TrainState, Any]:
    """One optimizer step, and its statistics on the device. The state is donated."""
    device_batch, counts = _on_devices(learner, batch, batch_stats)
    with jax.transfer_guard("disallow"):
        reference = None if learner.reference is None else learner.score_step(learner.reference, device_batch)
        return learner.train_step(state, device_batch, reference, counts, learner.base)


def lower_update(
    learner: Learner, state: TrainState, batch: TrainBatch, batch_stats: Metrics
) -> list[jax.stages.Lowered]:
    """The programs of `update`, which nothing runs."""
    device_batch, counts = _on_devices(learner, batch, batch_stats)
    if learner.reference is None:
        return [learner.train_step.lower(state, device_batch, None, counts, learner.base)]
    score = learner.score_step.lower(learner.reference, device_batch)
    place: Any = sharding.batch_sharding(learner.mesh)
    logprobs = jax.ShapeDtypeStruct(batch.tokens.shape, jnp.float32, sharding=place)
    return [learner.train_step.lower(state, device_batch, logprobs, counts, learner.base), score]


def _on_devices(learner: Learner, batch: TrainBatch, batch_stats: Metrics) -> tuple[TrainBatch, jax.Array]:
    """A batch where the train step takes it, and the tokens of each role in it, f32[roles]."""
    counts = hosts.put(role_tokens(batch_stats), sharding.replicated(learner.mesh))
    return hosts.put(batch, sharding.batch_sharding(learner.mesh)), counts


# --- what is said of it ---


def rollout_metrics(trajectories: Sequence[Trajectory], tasks: Sequence[Task]) -> Metrics:
    """What a step's trajectories say of the policy; masked ones count only as masked."""
    scored = [trajectory for trajectory in trajectories if trajectory.status == "ok"]
    rewards = [trajectory.reward for trajectory in scored]
    by_id = {task.task_id: task for task in tasks}
    metrics = {
        "reward": float(np.mean(rewards)) if rewards else float("nan"),
        "solved": float(np.mean([reward >= evaluate.FULL_REWARD for reward in rewards])) if rewards else float("nan"),
        "masked": float(len(trajectories) - len(scored)),
        "segments": float(sum(len(trajectory.segments) for trajectory in trajectories)),
        "sampled_tokens": float(sum(len(s.tokens) for trajectory in trajectories for s in trajectory.segments)),
        "agreement": evaluate.agreement(scored, by_id),
    }
    for trajectory in trajectories:
        name = f"ended_{evaluate.end_reason(trajectory)}"
        metrics[name] = metrics.get(name, 0.0) + 1.0
    return metrics


def lessons(config: RunConfig, chat: Chat, rollouts: Rollouts, learned: Learned) -> list[Lesson]:
    """What each attempt at a task was to the step."""
    tasks = {task.task_id: task for task in rollouts.gathered.tasks}
    advantages = segment_advantages(rollouts, learned.advantages)
    trained = segments_trained(config, rollouts, learned.advantages)
    told = zip(rollouts.gathered.trajectories, advantages, trained, strict=False)  # the rehearsals come last

    def piece(token: int) -> str:
        return chat.decode([token])

    return [Lesson(tasks[trajectory.task_id], values, mask, piece) for trajectory, values, mask in told]


def segment_advantages(rollouts: Rollouts, advantages: Sequence[np.ndarray]) -> list[np.ndarray]:
    """f32[segments] of each of `rollouts.all`; `advantages` are those of `rollouts.learned`, others have 0."""
    known = {_name(trajectory): values for trajectory, values in zip(rollouts.learned, advantages, strict=True)}
    return [known.get(_name(trajectory), np.zeros(len(trajectory.segments), np.float32)) for trajectory in rollouts.all]


def segments_trained(config: RunConfig, rollouts: Rollouts, advantages: Sequence[np.ndarray]) -> list[np.ndarray]:
    """bool[segments] of each of `rollouts.all`: whether a batch has the segment's tokens in its loss mask.

    `advantages` are those of `rollouts.learned`.
    """
    masks = {_name(trajectory): np.zeros(len(trajectory.segments), bool) for trajectory in rollouts.all}
    for roles in players.LEARNERS[config_checks.cast(config)[0]].values():
        found = batching.segments_trained(
            *players.of_roles(rollouts.learned, advantages, roles), layout=config.batch.layout,
            drop_zero_advantage=config.batch.drop_zero_advantage,
        )  # fmt: skip
        for trajectory, own in zip(rollouts.learned, found, strict=True):
            masks[_name(trajectory)][[segment.role in roles for segment in trajectory.segments]] = own
    return [masks[_name(trajectory)] for trajectory in rollouts.all]


def _name(trajectory: Trajectory) -> tuple[int, int]:
    """By which a trajectory is known among a step's."""
    return trajectory.group_id, trajectory.attempt
