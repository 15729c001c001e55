"""Runs a dumped step again: the state that it began with, its learning, and what came out beside what the dump says.

The state is that of the nearest checkpoint before the step, or of the model that the run began with, moved on by the
dumped steps between. Learning is `learning.learn_from`, as in the run. Writes nothing.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from envace_jax import checksums, dumps, learning, rescoring
from envace_jax import config as configuration
from envace_jax.chat import load_tokenizer
from envace_jax.checkpoint import Checkpoints
from envace_jax.config import RunConfig, UserError
from envace_jax.dumps import Dump
from envace_jax.learning import Learned, Learner, Rollouts
from envace_jax.models import hf
from envace_jax.players import State
from envace_jax.rewards import Reward
from envace_jax.types import Trajectory
from envace_jax.workfolder import CHECKPOINTS

SHOWN = 8  # trajectories that are named where they differ


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a replay begins."""

    checkpoint: int  # its step; 0: at the model that the run began with
    between: tuple[int, ...]  # dumped steps up to the one that is replayed


@dataclasses.dataclass(frozen=True)
class Row:
    """A quantity as dumped and as replayed."""

    name: str
    dumped: str
    replayed: str
    equal: bool  # to the bit
    where: tuple[str, ...] = ()  # what differs in it


@dataclasses.dataclass(frozen=True)
class Replayed:
    """A step run again."""

    rows: tuple[Row, ...]
    scored: Mapping[str, int]  # turns by where their score came from (`rescoring.py`)


def find_dump(workdir: Path, step: int) -> Dump:
    """The dump of a step. Raises UserError saying what there is where it is not there or cannot be read."""
    if not workdir.is_dir():
        raise UserError(f"{workdir}: no such folder; give the work folder of a run with logging.dump_every")
    known = dumps.steps(workdir)
    if not known:
        raise UserError(f"{workdir}: holds no dumps of steps; a run writes them with --config.logging.dump_every=1")
    if step not in known:
        raise UserError(f"--step={step}: {workdir} holds dumps of {listed(known)}")
    return dumps.read(dumps.file_of(workdir, step))


def find_start(workdir: Path, step: int) -> Start:
    """Where the replay of a step begins. Raises UserError where dumps between are missing."""
    known, begin = set(dumps.steps(workdir)), 0
    if (workdir / CHECKPOINTS).is_dir():
        with Checkpoints(workdir / CHECKPOINTS, keep=None) as checkpoints:
            begin = max((found for found in checkpoints.steps() if found < step), default=0)
    between = range(begin + 1, step)
    missing = [one for one in between if one not in known]
    if missing:
        origin = f"the checkpoint of step {begin}" if begin else "the model that the run began with"
        raise UserError(
            f"--step={step}: the nearest state before it is that of {origin}, and from there the dumps of "
            f"{listed(missing)} are missing; a run with logging.dump_every=1 has them, or keep a checkpoint of step "
            f"{step - 1} (checkpoint.every, checkpoint.keep)"
        )
    return Start(begin, tuple(between))


def listed(steps: Sequence[int]) -> str:
    """Steps as "step 4" or "steps 1 to 3, 7"."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in runs]
    shown = texts if len(texts) <= SHOWN else [*texts[: SHOWN - 1], "...", texts[-1]]
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(shown)


def load(config: RunConfig, mesh: Mesh) -> tuple[Learner, State]:
    """What the run learned with, and the state that it began with. Raises FileNotFoundError where its model is gone."""
    folder = hf.resolve(configuration.model_path(config.model.path))
    adapters = hf.resolve(configuration.model_path(config.lora.path, "lora.path")) if config.lora.path else None
    return learning.load(config, mesh, folder, load_tokenizer(folder), adapters)


def state_before(
    workdir: Path, start: Start, learner: Learner, state: State, settings: Mapping[str, Any],
    tell: Callable[[str], None] = lambda _: None,
) -> State:  # fmt: skip
    """The state before a step, from that of the run's beginning, which is given up. `settings`: those of its dump."""
    if start.checkpoint:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        jax.tree.map(lambda x: x.delete(), state)  # the restored one takes its place in memory
        with Checkpoints(workdir / CHECKPOINTS, keep=None) as checkpoints:
            state, _ = checkpoints.restore(start.checkpoint, shapes)
    for step in start.between:
        dump = dumps.read(dumps.file_of(workdir, step))
        _check_settings(dump, settings)
        state = learning.learn_from(learner, state, dump.rollouts).state
        different = [name for name, value in checksums.of_state(state).items() if value != dump.after.get(name)]
        tell(f"step {step}: {'as dumped' if not different else 'not as dumped: ' + ', '.join(different)}")
    return state


def _check_settings(between: Dump, settings: Mapping[str, Any]) -> None:
    """Raises UserError where a step between was learned with other settings: on another mesh, say."""
    free = {"logging", "evaluation", "checkpoint", "warm_up", "compilation_cache", "reward", "external", "user"}
    if settings["optimizer"]["schedule"] == "constant":  # others are stretched over the steps
        free.add("steps")
    different = configuration.differing_settings(between.settings, settings)
    lines = [line for key, line in different.items() if key.split(".")[0] not in free]
    if lines:
        raise UserError(f"the dump of step {between.step} is of other settings: {'; '.join(lines)}")


def replay(dump: Dump, learner: Learner, state: State, reward: Reward | None) -> Replayed:
    """Scores, advantages, batch and train step of a dump, from the state before it, which is donated.

    `reward` scores its conversations anew; None takes the scores as they are.
    """
    config = learner.config
    before = checksums.of_state(state)
    rollouts, scored = rescoring.rescored(dump.rollouts, reward, filtered=config.data.filter_zero_variance)
    learned = learning.learn_from(learner, state, rollouts)
    return Replayed(tuple(_rows(dump, config, before, rollouts, learned)), scored)


# --- what came out, beside the dump ---


def _rows(
    dump: Dump, config: RunConfig, before: Mapping[str, str], rollouts: Rollouts, learned: Learned
) -> Iterator[Row]:
    yield from _texts("before", dump.before, before)
    all_of, scored = rollouts.all, [dump.rollouts.all, rollouts.all]
    yield _per_trajectory("rewards", all_of, *([[one.reward] for one in side] for side in scored))
    yield _per_trajectory("verdicts", all_of, *(list(map(_verdicts, side)) for side in scored))
    advantages = learning.segment_advantages(rollouts, learned.advantages)
    trained = learning.segments_trained(config, rollouts, learned.advantages)
    yield _per_trajectory("advantages", all_of, *(_lists(side) for side in (dump.advantages, advantages)))
    yield _per_trajectory("trained", all_of, *(_lists(side) for side in (dump.trained, trained)))
    yield from _texts("batch", dump.batches, dumps.batch_checksums(learned.batches))
    for name in dict.fromkeys([*dump.metrics, *learned.metrics]):
        one, other = dump.metrics.get(name), learned.metrics.get(name)
        yield Row(name, _number(one), _number(other), _bits(one) == _bits(other))
    yield from _texts("after", dump.after, checksums.of_state(learned.state))


def _texts(when: str, dumped: Mapping[str, str], replayed: Mapping[str, str]) -> Iterator[Row]:
    for name in dict.fromkeys([*dumped, *replayed]):
        one, other = dumped.get(name, "absent"), replayed.get(name, "absent")
        yield Row(f"{name} {when}" if when != "batch" else f"batch {name}", one, other, one == other)


def _lists(arrays: Iterable[np.ndarray]) -> list[list[float]]:
    return [array.astype(float).tolist() for array in arrays]


def _verdicts(trajectory: Trajectory) -> list[float]:
    """1 for each item that held, else 0, and for each turn whether the next could begin."""
    return [float(held) for score in trajectory.turn_scores for held in (*score.verdicts, score.proceed)]


def _per_trajectory(
    name: str, trajectories: Sequence[Trajectory], dumped: Sequence[list[float]], replayed: Sequence[list[float]]
) -> Row:
    """Numbers of each trajectory; those of the first that differ are named. Shown is the sum of their sizes."""
    where = [
        f"task {trajectory.task_id} attempt {trajectory.attempt}: {_few(one)} -> {_few(other)}"
        for trajectory, one, other in zip(trajectories, dumped, replayed, strict=True)
        if [*map(_bits, one)] != [*map(_bits, other)]
    ]
    more = [f"and {len(where) - SHOWN} more"] if len(where) > SHOWN else []
    sums = [_few([sum(abs(n) for values in side for n in values if n == n)]) for side in (dumped, replayed)]
    return Row(name, f"total {sums[0]}", f"total {sums[1]}", not where, (*where[:SHOWN], *more))


def _few(values: Sequence[float]) -> str:
    texts = [format(value, ".6g") for value in values[:SHOWN]]
    return " ".join(texts) + (" ..." if len(values) > SHOWN else "")


def _number(value: float | None) -> str:
    return "absent" if value is None else format(value, ".9g")


def _bits(value: float | None) -> bytes:
    return b"" if value is None else struct.pack("<d", value)


def table(rows: Sequence[Row], whole: bool) -> list[str]:
    """Lines of a table of all rows, or of those that differ; under each that differs, where."""
    shown = [row for row in rows if whole or not row.equal]
    cells = [("quantity", "dumped", "replayed", ""), *((r.name, r.dumped, r.replayed, _verdict(r)) for r in shown)]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    lines = []
    for place, row in enumerate(cells):
        texts = [text.ljust(width) for text, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*texts, row[3]]).rstrip())
        lines += [f"    {text}" for text in (shown[place - 1].where if place else ())]
    return lines


def _verdict(row: Row) -> str:
    return "equal" if row.equal else "DIFFERS"
