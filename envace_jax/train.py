"""The training run: a straight loop of rollout, score, advantages, batch, step; then log, evaluate and save.

`run` is the whole of it and restarts where its newest checkpoint left off. Everything that an iteration computes is a
function of the configuration, the step number, the parameters and of what was drawn (`Drawn`, kept in the checkpoint),
so that a resumed run repeats an unbroken one bit by bit. It knows every other module; no module knows it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from envace_jax import config as configuration
from envace_jax import (
    envs,
    evaluate,
    fidelity,
    hosts,
    parts,
    players,
    sharding,
    task_sampling,
    trackers,
    users,
    workfolder,
)
from envace_jax.batching import deal_rows, make_batch, role_tokens
from envace_jax.buckets import row_shapes, row_tokens
from envace_jax.checkpoint import Checkpoints
from envace_jax.compile_count import CompileCounter
from envace_jax.config import RunConfig
from envace_jax.data import TaskStream
from envace_jax.envs import tiny
from envace_jax.episode import Limits
from envace_jax.grpo import role_advantages
from envace_jax.inputs import Inputs, read_inputs
from envace_jax.lora import joined
from envace_jax.metrics import MetricsWriter, write_json_atomic
from envace_jax.models import hf, peft, qwen
from envace_jax.players import Cast, State
from envace_jax.responders import Responder
from envace_jax.rewards import Reward, choose
from envace_jax.rewards.checklist import ChecklistReward
from envace_jax.roles import Prompts
from envace_jax.rollout import Player, rollout
from envace_jax.stopping import Stopped
from envace_jax.task_sampling import Drawn, Gathered
from envace_jax.train_step import init_train_state
from envace_jax.types import Params, Role, Task, TrainBatch, TrainState, Trajectory
from envace_jax.warm_up import warm_up

Metrics = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything that stays the same during a run."""

    config: RunConfig
    mesh: Mesh
    model: qwen.QwenConfig
    folder: Path  # where the model came from
    prompts: Prompts
    limits: Limits
    cast: Cast  # the samplers, and who plays and learns which role
    responder: Responder
    reward: Reward
    user: users.User | None  # who answers replies in tasks with a simulated user
    stream: TaskStream
    rehearsable: Sequence[Task]  # those with a call to hold out, where the configuration holds any out
    heldout: tuple[Task, ...]
    unseen: tuple[Task, ...]
    train_step: Any
    score_step: Any
    reference: Params | None  # parameters of the reference policy, only where the loss has a KL term
    base: Params | None = None  # with LoRA: the frozen parameters that the state's adapters go with


def run(
    config: RunConfig,
    mesh: Mesh,
    workdir: Path,
    reward: Reward | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Trains to `config.steps` and returns what `summary.json` holds. A restart with the same workdir continues.

    With several processes all call this; the first writes the files, and all write the checkpoints. `stop` is asked
    before every step, in every process: where one says yes the run is saved, and all raise Stopped.

    Every refusal comes before the first file is written, and nearly all before the model is loaded.
    """
    began = time.time()
    tracking = config.logging.tracker if hosts.first() else ""
    trackers.check(tracking)
    workfolder.check(workdir, config)
    workfolder.check_shared(workdir)
    with contextlib.ExitStack() as opened:
        if reward is None:
            reward = opened.enter_context(choose.chosen(config.reward, workdir, config.seed))
        user = opened.enter_context(users.chosen(config.user, workdir))
        inputs = read_inputs(config, reward)
        checkpoints = opened.enter_context(Checkpoints(workdir / workfolder.CHECKPOINTS, keep=config.checkpoint.keep))
        kept = {"config": configuration.to_json(config), "fingerprints": inputs.fingerprints()}
        known = checkpoints.latest_extra()
        if known is not None:
            workfolder.check_continued(workdir, config, known, kept["fingerprints"])
        setup, state = build(config, mesh, reward, inputs, workdir, user)
        opened.callback(setup.responder.close)
        hosts.exchange("all have looked at the folder")  # before anything is written there
        state, progress = _resume(checkpoints, state)
        progress |= kept
        began -= progress["seconds"]
        tracker = opened.enter_context(
            trackers.following(tracking, workdir, kept["config"], resumed=progress["step"] > 0)
        )
        with MetricsWriter(
            workdir, config.logging.tensorboard, resume_step=progress["step"], enabled=hosts.first(), tracker=tracker
        ) as writer:
            workfolder.claim(workdir, config, progress["step"])
            writer.start(total=config.steps, done=progress["step"])
            if config.warm_up and progress["step"] < config.steps:
                state = compile_all(setup, state, writer)
            state = _train(setup, state, progress, began, checkpoints, writer, stop)
            # The numbers first: they are small, and whatever may go wrong with the export must not cost them.
            summary = summarise(config, progress)
            if hosts.first():
                write_json_atomic(workdir / workfolder.SUMMARY_FILE, summary)
            writer.curves(workdir / workfolder.CURVES_FILE)
            checkpoints.wait()
            for name, roles in setup.cast.learners.items():
                _export(setup, players.part(state, name).params, workdir, Role.ACT in roles)
    return summary


def _export(setup: Setup, trained: Params, workdir: Path, acts: bool) -> None:
    """What a learner came to, for other programs: a model, and with LoRA its adapters too."""
    folder = workdir / (workfolder.MODEL if acts else workfolder.MODEL_REHEARSE)
    if setup.base is None:
        hf.save(folder, setup.model, trained, tokenizer_dir=setup.folder)
        return
    config, lora = setup.config, parts.make_lora(setup.config)
    assert lora is not None  # there is a base
    path = configuration.model_path(config.model.path)
    peft.save(workdir / (workfolder.ADAPTER if acts else workfolder.ADAPTER_REHEARSE), setup.model, trained, lora, path)
    whole = joined(setup.base, trained)
    hf.save(folder, setup.model, whole, tokenizer_dir=setup.folder, dtype=config.model.param_dtype, lora=lora)


def _resume(checkpoints: Checkpoints, state: State) -> tuple[State, dict[str, Any]]:
    """State and progress of the newest checkpoint, or those of a run that begins."""
    if not checkpoints.steps():
        return state, {"step": 0, "evaluations": [], "env_calls": 0, "seconds": 0.0}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    jax.tree.map(lambda x: x.delete(), state)  # the restored one takes its place in memory
    restored = checkpoints.restore_latest(shapes)
    assert restored is not None  # there are steps
    return restored


def _train(
    setup: Setup, state: State, progress: dict[str, Any], began: float, checkpoints: Checkpoints,
    writer: MetricsWriter, stop: Callable[[], bool],
) -> State:  # fmt: skip
    """The loop from `progress` to the last step. It keeps `progress` up to date; `began` is when step 0 did."""
    config, first, compiled = setup.config, progress["step"], CompileCounter()
    asked = getattr(setup.responder, "counts", {})  # of another model
    if hosts.first():  # one process carries on what a run that this one continues asked of it
        asked.update(progress.get("external", {}))
    drawn = Drawn(progress.get("tasks_seen", 0), dict(progress.get("task_record", {})))
    if first == 0:
        if any(hosts.exchange(stop())):  # a warm-up may have lasted
            raise Stopped(0)
        progress["evaluations"].append(_evaluate(setup, state, 0, writer))
    for step in range(first, config.steps):
        if any(hosts.exchange(stop())):
            if step > first and not _due(step, config.checkpoint.every, config.steps):
                checkpoints.save(step, state, progress)
            checkpoints.wait()
            raise Stopped(step)
        started, executed = time.time(), envs.execution_count()
        state, metrics, trajectories = iterate(setup, state, step, writer, drawn)
        done, seconds = step + 1, time.time() - started
        metrics |= {"seconds": seconds, "tokens_per_second": metrics["sampled_tokens"] / seconds}
        metrics["compiled"] = compiled.take()  # since the last step, so the evaluation before the first counts too
        writer.masked(collections.Counter(t.reason for t in trajectories if t.status == "failed"))
        writer.write(done, metrics)
        writer.write_trajectories(done, _samples(trajectories, config))
        progress["env_calls"] += hosts.total({"calls": envs.execution_count() - executed})["calls"]
        if _due(done, config.evaluation.every, config.steps):
            progress["evaluations"].append(_evaluate(setup, state, done, writer))
        progress |= {
            "step": done,
            "policy_version": done,
            "tasks_seen": drawn.taken,
            "task_record": drawn.record,
            "external": hosts.total(asked),
            "seconds": time.time() - began,
        }
        if _due(done, config.checkpoint.every, config.steps):
            checkpoints.save(done, state, progress)
    return state


# --- one iteration ---


def iterate(
    setup: Setup, state: State, step: int, writer: MetricsWriter | None = None, drawn: Drawn | None = None
) -> tuple[State, Metrics, list[Trajectory]]:
    """One step of role-wise GRPO from data to updated parameters: the new state, metrics, and the tasks' trajectories.

    `drawn` is what the steps before drew, and is brought up to date; by default that of a run whose options need none.
    """
    config, grpo = setup.config, setup.config.grpo
    drawn = Drawn(step * config.data.tasks_per_step) if drawn is None else drawn
    slots = setup.cast.slot_steps()
    gathered, rehearsed = _sample(setup, state, step, writer, drawn)
    choose.check_masked(gathered.trajectories, config.reward.most_masked)
    if isinstance(setup.responder, players.Simulator):
        setup.responder.count(gathered.trajectories if hosts.first() else ())  # all processes have all of them
    setup.cast.reset()  # the caches make room for the train step
    if (judge := getattr(setup.reward, "model", None)) is not None:
        judge.reset()
    sampled = time.time()
    advantages_of = functools.partial(
        role_advantages, baseline=grpo.baseline, scale=grpo.scale, singleton=grpo.singleton
    )
    advantages, advantage_stats = advantages_of(gathered.trained)
    advantages += [config.fidelity.weight * values for values in advantages_of(rehearsed)[0]]
    state, metrics = learn(setup, state, [*gathered.trained, *rehearsed], advantages)
    metrics |= advantage_stats | players.frozen_stats(setup.cast) | players.slot_use(slots, setup.cast.slot_steps())
    asked = (("judge", setup.reward), ("external", setup.responder), ("user", setup.user))
    counts = {f"{who}_{name}": n for who, model in asked for name, n in dict(getattr(model, "counts", {})).items()}
    metrics |= {name: float(count) for name, count in hosts.total(counts).items()}
    metrics |= rollout_metrics(gathered.trajectories, gathered.tasks)
    if config.data.filter_zero_variance:
        metrics |= gathered.metrics(config.data.attempts)
    if config.fidelity.calls_per_step:
        metrics |= fidelity.metrics(rehearsed)
        metrics["sampled_tokens"] += metrics["fidelity_tokens"]
    return state, metrics | {"train_seconds": time.time() - sampled}, list(gathered.trajectories)


def _sample(
    setup: Setup, state: State, step: int, writer: MetricsWriter | None, drawn: Drawn
) -> tuple[Gathered, list[Trajectory]]:
    """The step's attempts at tasks, and its rehearsals of held-out results. Decoding's parameters end with it."""
    config = setup.config
    act, rehearser = setup.cast.players(state)

    def play(tasks: Sequence[Task], group_offset: int) -> list[Trajectory]:
        return rollout(
            act.sampler, act.params, tasks, rehearser=rehearser,
            attempts=config.data.attempts, responder=setup.responder, reward=setup.reward,
            prompts=setup.prompts, limits=setup.limits, seed=config.seed, step=step,
            temperature=config.sampler.temperature, top_p=config.sampler.top_p, policy_version=step,
            group_offset=group_offset, user=setup.user, schema_check=config.rollout.schema_check,
            progress=writer.progress if writer else None,
        )  # fmt: skip

    gathered = task_sampling.of_step(config.data, setup.stream, step, drawn, play)
    return gathered, fidelity.of_step(config, setup.rehearsable, rehearser or act, setup.prompts, step)


def learn(
    setup: Setup, state: State, trajectories: Sequence[Trajectory], advantages: Sequence[np.ndarray]
) -> tuple[State, Metrics]:
    """One optimizer step of everything that is trained, each on the tokens of its own roles. The state is donated."""
    batch_stats: list[Metrics] = []
    stats: dict[str, Any] = {}
    for name, roles in setup.cast.learners.items():
        own = players.of_roles(trajectories, advantages, roles)
        batch, counts = _batch(setup, *own, setup.config.batch.row_buckets)
        new, stats[name] = _update(setup, players.part(state, name), batch, counts)
        state = players.with_part(state, name, new)
        batch_stats.append(counts)
    plain = {name: {key: float(value) for key, value in own.items()} for name, own in jax.device_get(stats).items()}
    counts = players.joined_batch_stats(batch_stats)
    return state, players.joined_stats(plain) | {f"batch_{name}": value for name, value in counts.items()}


def _batch(
    setup: Setup, trajectories: Sequence[Trajectory], advantages: Sequence[np.ndarray], row_buckets: Sequence[int]
) -> tuple[TrainBatch, Metrics]:
    """The trajectories as training rows on the host, and the statistics of `make_batch`."""
    chosen, shards = setup.config.batch, sharding.axis_size(setup.mesh, sharding.BATCH_AXES)
    batch, stats = make_batch(
        trajectories, advantages, layout=chosen.layout, row_length=row_tokens(chosen.row_length),
        rows_multiple=chosen.rows_multiple * shards, row_buckets=row_buckets, pad_id=setup.prompts.chat.pad_id,
        drop_zero_advantage=chosen.drop_zero_advantage,
    )  # fmt: skip
    return deal_rows(batch, shards), stats


def _update(setup: Setup, state: TrainState, batch: TrainBatch, batch_stats: Metrics) -> tuple[TrainState, Any]:
    """One optimizer step, and its statistics on the device. The state is donated."""
    device_batch = hosts.put(batch, sharding.batch_sharding(setup.mesh))
    counts = hosts.put(role_tokens(batch_stats), sharding.replicated(setup.mesh))
    with jax.transfer_guard("disallow"):
        reference = None if setup.reference is None else setup.score_step(setup.reference, device_batch)
        return setup.train_step(state, device_batch, reference, counts, setup.base)


def compile_all(setup: Setup, state: State, writer: MetricsWriter | None = None) -> State:
    """The warm-up: compiles all that `iterate` needs for the shapes of the configuration; the state stays as it was.

    Without `batch.row_buckets` the numbers of rows are not known, and the train step is left to the first steps.
    """
    chosen, shards = setup.config.batch, sharding.axis_size(setup.mesh, sharding.BATCH_AXES)

    def update(state: TrainState, rows: int) -> TrainState:
        return _update(setup, state, *_batch(setup, [], [], (rows,)))[0]

    def samplers() -> list[Player]:
        judge = getattr(setup.reward, "model", None)  # of a reward that asks a model in this process
        judges = [] if judge is None or judge.sampler is None else [Player(judge.sampler, judge.params)]
        return [*setup.cast.to_compile(state), *judges]

    name = next(iter(setup.cast.learners))  # the train step of one is that of all
    warm = warm_up(
        players.part(state, name), players=samplers, update=update,
        row_shapes=row_shapes(chosen.rows_multiple * shards, chosen.row_buckets), writer=writer,
    )  # fmt: skip
    return players.with_part(state, name, warm)


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


# --- setting up ---


def build(
    config: RunConfig,
    mesh: Mesh,
    reward: Reward | None = None,
    inputs: Inputs | None = None,
    workdir: Path = Path(),
    user: users.User | None = None,
) -> tuple[Setup, State]:
    """Loads the model and makes the compiled steps.

    `reward` scores user turns, by program checks if it is None; `inputs` are read now if they were not before. What an
    external model answers may be kept in `workdir`. The setup's responder is to be closed in the end.
    """
    reward = ChecklistReward() if reward is None else reward
    inputs = read_inputs(config, reward) if inputs is None else inputs
    chat = inputs.chat
    adapts = config.lora.rank > 0
    model, params = hf.load(inputs.folder, mesh, config.model.param_dtype, adapts and parts.quantizes(config))
    policy, base = parts.make_policy(config, model, mesh), None
    if adapts:
        base, params = params, parts.make_adapters(config, policy, model, mesh, inputs.adapters)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    steps = parts.make_steps(config, policy, chat.vocab_size, mesh, shardings)
    prompts, limits = parts.make_prompts(config, chat), parts.make_limits(config)
    if (judge := getattr(reward, "model", None)) is not None:
        parts.bind_judge(config, judge, chat, mesh)
    setup = Setup(
        config=config, mesh=mesh, model=model, folder=inputs.folder, prompts=prompts, limits=limits,
        cast=parts.make_cast(config, policy, model, chat, mesh, _frozen(config, mesh, inputs, model, base), base),
        responder=parts.make_responder(config, prompts, workdir),
        reward=reward, user=user,
        stream=TaskStream(inputs.tasks, config.data.tasks_per_step, config.data.seed),
        rehearsable=fidelity.rehearsable(config, inputs.tasks),
        heldout=inputs.heldout, unseen=inputs.unseen,
        train_step=steps.train, score_step=steps.score,
        reference=_reference(config, params, base), base=base,
    )  # fmt: skip
    return setup, players.begin(
        setup.cast.kind, params, lambda own: init_train_state(own, steps.optimizer, mesh, shardings)
    )


def _frozen(
    config: RunConfig, mesh: Mesh, inputs: Inputs, model: qwen.QwenConfig, base: Params | None
) -> tuple[qwen.QwenConfig, Params] | None:
    """The checkpoint that plays a role and is never trained: the adapters' base where it is that."""
    if inputs.frozen is None:
        return None
    if base is not None and inputs.frozen == inputs.folder:
        return model, base
    return hf.load(inputs.frozen, mesh, config.model.param_dtype, parts.quantizes(config))


def _reference(config: RunConfig, params: Params, base: Params | None) -> Params | None:
    """The reference policy of the KL term: what training starts from, or the base without adapters, which stays."""
    if not config.grpo.kl_coef:
        return None
    return jax.tree.map(jnp.copy, params) if base is None else base


# --- evaluation, checkpoints, summary ---


def _evaluate(setup: Setup, state: State, step: int, writer: MetricsWriter) -> dict[str, Any]:
    """All evaluations of the configuration at one step, as plain numbers; they are written to the metrics too."""
    config, wanted = setup.config, setup.config.evaluation
    act, rehearser = setup.cast.players(state)
    rehearser = rehearser or act
    started = time.time()
    values: Metrics = {}
    masked = 0
    for name, tasks in (("real_success", setup.heldout), ("unseen_domain", setup.unseen)):
        for suffix, samples, temperature in (("", wanted.samples, wanted.temperature), ("_greedy", 1, 0.0)):
            if not tasks or (suffix and not wanted.greedy):
                continue
            result = evaluate.success(
                act.sampler, act.params, tasks, reward=setup.reward, prompts=setup.prompts, limits=setup.limits,
                samples=samples, temperature=temperature, top_p=wanted.top_p if temperature else 1.0,
                seed=config.seed, user=setup.user, progress=writer.progress,
            )  # fmt: skip
            values[name + suffix] = result.rate
            masked += sum(trajectory.status == "failed" for trajectory in result.trajectories)
    told = setup.heldout if wanted.fidelity_calls else ()  # only the tiny world's are
    calls = [call for task in told for call in evaluate.calls_of(task, tiny.conversation(task), setup.prompts)]
    calls = calls[: wanted.fidelity_calls]
    for name, examples in (("fidelity", True), ("fidelity_without_examples", False)):
        if calls:
            values[name] = evaluate.fidelity(
                rehearser.sampler, rehearser.params, calls, prompts=setup.prompts,
                max_tokens=config.limits.rehearse_response, temperature=wanted.temperature, seed=config.seed,
                reference_examples=examples,
            )  # fmt: skip
    setup.cast.reset()
    if values:
        values["masked"] = float(masked)
        writer.write(step, {f"eval_{name}": value for name, value in values.items()})
    # Checkpoints keep this as plain JSON, which has no nan.
    known = {name: value if np.isfinite(value) else None for name, value in values.items()}
    return {"step": step, "seconds": time.time() - started, "values": known}


def _samples(trajectories: Sequence[Trajectory], config: RunConfig) -> list[Trajectory]:
    """The first attempts at different tasks, as many as are to be written out."""
    return list(trajectories[:: config.data.attempts][: config.logging.trajectories_per_step])


def _due(done: int, every: int, last: int) -> bool:
    return done == last or (every > 0 and done % every == 0)


def summarise(config: RunConfig, progress: dict[str, Any]) -> dict[str, Any]:
    """The run in a few numbers: each evaluation before and after training, and what training cost."""
    first, last = progress["evaluations"][0]["values"], progress["evaluations"][-1]["values"]
    summary: dict[str, Any] = {}
    for name in first:
        summary[f"{name}_before"], summary[f"{name}_after"] = first[name], last.get(name)
    asked = progress.get("external", {})
    return summary | {
        "real_env_calls_in_training": progress["env_calls"],
        "external_tokens": asked.get("prompt_tokens", 0) + asked.get("completion_tokens", 0),
        "steps": config.steps,
        "seed": config.seed,
        "seconds": progress["seconds"],
    }
