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
import numpy as np
from jax.sharding import Mesh

from envace_jax import (
    checksums,
    dumps,
    envs,
    evaluate,
    fidelity,
    hosts,
    learning,
    parts,
    players,
    task_sampling,
    trackers,
    users,
    workfolder,
)
from envace_jax import config as configuration
from envace_jax.checkpoint import Checkpoints
from envace_jax.compile_count import CompileCounter
from envace_jax.config import RunConfig
from envace_jax.data import TaskStream
from envace_jax.episode import Limits
from envace_jax.inputs import Inputs, read_inputs
from envace_jax.learning import Learned, Learner, Metrics, Rollouts, learn_from
from envace_jax.lora import joined
from envace_jax.metrics import MetricsWriter, write_json_atomic
from envace_jax.models import hf, peft, qwen
from envace_jax.notes import Notes
from envace_jax.players import Cast, State
from envace_jax.responders import Responder
from envace_jax.rewards import Reward, choose
from envace_jax.rewards.checklist import ChecklistReward
from envace_jax.rollout import Player, rollout
from envace_jax.stopping import Stopped
from envace_jax.task_sampling import Drawn
from envace_jax.types import Params, Role, Task, TrainState, Trajectory
from envace_jax.warm_up import warm_up


@dataclasses.dataclass(frozen=True)
class Setup(Learner):
    """Everything that stays the same during a run."""

    folder: Path  # where the model came from
    limits: Limits
    cast: Cast  # the samplers, and who plays and learns which role
    responder: Responder
    reward: Reward
    user: users.User | None  # who answers replies in tasks with a simulated user
    stream: TaskStream
    rehearsable: Sequence[Task]  # those with a call to hold out, where the configuration holds any out
    heldout: tuple[Task, ...]
    unseen: tuple[Task, ...]


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
            if hosts.first():
                dumps.drop_after(workdir, progress["step"])
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
    notes = Notes(writer, learning.bucketed_rows(setup) if config.warm_up else ())
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
        done = step + 1
        before = checksums.of_state(state) if _due(done, config.logging.dump_every) else None
        keep = functools.partial(_keep, setup, writer, before)
        state, metrics, trajectories = iterate(setup, state, step, writer, drawn, keep, notes.rows)
        seconds = time.time() - started
        metrics |= {"seconds": seconds, "tokens_per_second": metrics["sampled_tokens"] / seconds}
        metrics["compiled"] = compiled.take()  # since the last step, so the evaluation before the first counts too
        writer.masked(collections.Counter(t.reason for t in trajectories if t.status == "failed"))
        writer.write(done, metrics)
        notes.learned(metrics)
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
    setup: Setup, state: State, step: int, writer: MetricsWriter | None = None, drawn: Drawn | None = None,
    keep: Callable[[Rollouts, Learned], None] = lambda *_: None, told: Callable[[int], None] = lambda rows: None,
) -> tuple[State, Metrics, list[Trajectory]]:  # fmt: skip
    """One step of role-wise GRPO from data to updated parameters: the new state, metrics, and the tasks' trajectories.

    `drawn` is what the steps before drew, and is brought up to date; by default that of a run whose options need none.
    `keep` is told what the step's rollouts gave, and what was learned from them; `told` the rows of each batch before
    its train step.
    """
    config = setup.config
    drawn = Drawn(step * config.data.tasks_per_step) if drawn is None else drawn
    slots = setup.cast.slot_steps()
    rollouts = _sample(setup, state, step, writer, drawn)
    trajectories = rollouts.gathered.trajectories
    choose.check_masked(trajectories, config.reward.most_masked)
    if isinstance(setup.responder, players.Simulator):
        setup.responder.count(trajectories if hosts.first() else ())  # all processes have all of them
    setup.cast.reset()  # the caches make room for the train step
    if (judge := getattr(setup.reward, "model", None)) is not None:
        judge.reset()
    sampled = time.time()
    learned = learn_from(setup, state, rollouts, told)
    asked = (("judge", setup.reward), ("external", setup.responder), ("user", setup.user))
    counts = {f"{who}_{name}": n for who, model in asked for name, n in dict(getattr(model, "counts", {})).items()}
    metrics = learned.metrics | players.slot_use(slots, setup.cast.slot_steps())
    metrics |= {name: float(count) for name, count in hosts.total(counts).items()}
    metrics["train_seconds"] = time.time() - sampled
    keep(rollouts, learned)
    return learned.state, metrics, list(trajectories)


def _sample(setup: Setup, state: State, step: int, writer: MetricsWriter | None, drawn: Drawn) -> Rollouts:
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
    rehearsed = fidelity.of_step(config, setup.rehearsable, rehearser or act, setup.prompts, step)
    return Rollouts(step, gathered, tuple(rehearsed))


def _keep(
    setup: Setup, writer: MetricsWriter, before: dict[str, str] | None, rollouts: Rollouts, learned: Learned
) -> None:
    """Writes samples of a step's trajectories, and a dump of the whole step where the checksums `before` it are given.

    A collective, since the checksums after it are one.
    """
    after = None if before is None else checksums.of_state(learned.state)
    if not hosts.first():
        return
    config, chat = setup.config, setup.prompts.chat
    lessons = learning.lessons(config, chat, rollouts, learned)
    told = list(zip(rollouts.gathered.trajectories, lessons, strict=True))
    # The first attempts at different tasks.
    writer.write_trajectories(rollouts.step + 1, told[:: config.data.attempts][: config.logging.trajectories_per_step])
    if before is not None and after is not None:
        dumps.write(writer.workdir, dumps.of_step(config, chat, rollouts, learned, before, after, setup.reward))


def compile_all(setup: Setup, state: State, writer: MetricsWriter | None = None) -> State:
    """The warm-up: compiles all that `iterate` needs for the shapes of the configuration; the state stays as it was.

    Without `batch.row_buckets` the numbers of rows are not known, and the train step is left to the first steps.
    """

    def update(state: TrainState, rows: int) -> TrainState:
        return learning.update(setup, state, *learning.make_rows(setup, [], [], (rows,)))[0]

    def lower_update(state: TrainState, rows: int) -> list[jax.stages.Lowered]:
        return learning.lower_update(setup, state, *learning.make_rows(setup, [], [], (rows,)))

    def samplers() -> list[Player]:
        judge = getattr(setup.reward, "model", None)  # of a reward that asks a model in this process
        judges = [] if judge is None or judge.sampler is None else [Player(judge.sampler, judge.params)]
        return [*setup.cast.to_compile(state), *judges]

    name = next(iter(setup.cast.learners))  # the train step of one is that of all
    warm = warm_up(
        players.part(state, name), players=samplers, update=update, lower_update=lower_update,
        row_shapes=learning.bucketed_rows(setup), writer=writer,
    )  # fmt: skip
    state = players.with_part(state, name, warm)
    if setup.config.logging.dump_every:
        checksums.of_state(state)
    return state


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
    learner, state = learning.load(config, mesh, inputs.folder, inputs.chat, inputs.adapters)
    if (judge := getattr(reward, "model", None)) is not None:
        parts.bind_judge(config, judge, inputs.chat, mesh)
    policy, model, base = learner.policy, learner.model, learner.base
    frozen = _frozen(config, mesh, inputs, model, base)
    setup = Setup(
        **vars(learner), folder=inputs.folder, limits=parts.make_limits(config),
        cast=parts.make_cast(config, policy, model, inputs.chat, mesh, frozen, base),
        responder=parts.make_responder(config, learner.prompts, workdir),
        reward=reward, user=user,
        stream=TaskStream(inputs.tasks, config.data.tasks_per_step, config.data.seed),
        rehearsable=fidelity.rehearsable(config, inputs.tasks),
        heldout=inputs.heldout, unseen=inputs.unseen,
    )  # fmt: skip
    return setup, state


def _frozen(
    config: RunConfig, mesh: Mesh, inputs: Inputs, model: qwen.QwenConfig, base: Params | None
) -> tuple[qwen.QwenConfig, Params] | None:
    """The checkpoint that plays a role and is never trained: the adapters' base where it is that."""
    if inputs.frozen is None:
        return None
    if base is not None and inputs.frozen == inputs.folder:
        return model, base
    return hf.load(inputs.frozen, mesh, config.model.param_dtype, parts.quantizes(config))


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
    told = [task for task in setup.heldout if wanted.fidelity_calls and fidelity.tells_reference(task)]
    calls = [call for task in told for call in evaluate.calls_of(task, task.conversation, setup.prompts)]
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


def _due(done: int, every: int, last: int | None = None) -> bool:
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
