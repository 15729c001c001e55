"""Dumps of whole steps, WORKDIR/rollouts/step_00000012.npz: all that learning was a function of, and what came of it,
exact to the bit.

A dump is numpy's npz without pickle: arrays of all segments one after the other, and a header of JSON for the rest. A
prompt is kept from where it leaves the last text of its role, since most of it repeats that. A file of another version,
or one that is damaged, is refused in one line. Knows no device; `replay.py` runs a step again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from envace_jax import config as configuration
from envace_jax import learning, task_sampling
from envace_jax.chat import Chat
from envace_jax.config import RunConfig, UserError
from envace_jax.learning import Learned, Metrics, Rollouts
from envace_jax.metrics import Lesson, trajectory_record, write_atomic
from envace_jax.rewards import Reward
from envace_jax.types import CheckItem, Role, Segment, Task, ToolCall, TrainBatch, Trajectory, TurnScore
from envace_jax.workfolder import ROLLOUTS

FORMAT, VERSION = "envace_jax rollouts", 1
FINISH = ("stop", "length")  # of segments, by number
# One entry for a segment each; the long arrays follow from them.
SEGMENT_ARRAYS = {
    "role": np.int8, "turn": np.int32, "finish": np.int8, "policy_version": np.int32, "cached_tokens": np.int32,
    "prompt_length": np.int32, "shared": np.int32, "length": np.int32, "advantages": np.float32, "trained": np.bool_,
}  # fmt: skip
LONG_ARRAYS = {"prompt_tokens": np.int32, "tokens": np.int32, "logprobs": np.float32}
OTHER_ARRAYS = {"header": np.uint8, "rewards": np.float64, "segments": np.int32, "metric_values": np.float64}


@dataclasses.dataclass(frozen=True)
class Dump:
    """A step as it was. `step` counts as metrics.jsonl does: the first is 1."""

    step: int
    settings: Mapping[str, Any]  # the run's, as `config.to_json` gives them
    rollouts: Rollouts
    advantages: tuple[np.ndarray, ...]  # f32[segments] of each of `rollouts.all`
    trained: tuple[np.ndarray, ...]  # bool[segments] of the same
    batches: Mapping[str, str]  # checksums of the batch's arrays (`batch_checksums`)
    metrics: Metrics  # those that learning determines
    before: Mapping[str, str]  # checksums of the state that the step began with (`checksums.of_state`)
    after: Mapping[str, str]
    pieces: Mapping[int, str]  # the text of every sampled token
    scored_by: str  # the kind of reward
    written_by: str = ""  # versions and the platform, for whoever replays elsewhere


def of_step(
    config: RunConfig, chat: Chat, rollouts: Rollouts, learned: Learned, before: Mapping[str, str],
    after: Mapping[str, str], reward: Reward,
) -> Dump:  # fmt: skip
    """A step that was just learned from. `chat` has the texts of tokens; `before` and `after` are the state's."""
    segments = [segment for trajectory in rollouts.all for segment in trajectory.segments]
    tokens = np.unique(np.concatenate([np.zeros(0, np.int32), *(segment.tokens for segment in segments)])).tolist()
    return Dump(
        step=rollouts.step + 1,
        settings=configuration.to_json(config),
        rollouts=rollouts,
        advantages=tuple(learning.segment_advantages(rollouts, learned.advantages)),
        trained=tuple(learning.segments_trained(config, rollouts, learned.advantages)),
        batches=batch_checksums(learned.batches),
        metrics=learned.metrics,
        before=before,
        after=after,
        pieces={token: chat.decode([token]) for token in tokens},
        scored_by=type(reward).__name__,
        written_by=program(),
    )


# --- files ---


def file_of(workdir: Path, step: int) -> Path:
    return workdir / ROLLOUTS / f"step_{step:08d}.npz"


def steps(workdir: Path) -> list[int]:
    """The steps that have a dump, in order."""
    names = [re.fullmatch(r"step_(\d{8,})\.npz", path.name) for path in (workdir / ROLLOUTS).glob("*.npz")]
    return sorted(int(name[1]) for name in names if name)


def drop_after(workdir: Path, step: int) -> None:
    """Removes the dumps of later steps, and what a killed process left half-written."""
    for later in steps(workdir):
        if later > step:
            file_of(workdir, later).unlink()
    for path in (workdir / ROLLOUTS).glob(".step_*.tmp"):
        path.unlink()


def records(path: Path) -> list[dict[str, Any]]:
    """Every attempt of a dumped step as trajectories.jsonl has its samples; the rehearsals of held-out results, which
    have no conversation, are left out. Raises as `read` does."""
    dump = read(path)
    tasks = {task.task_id: task for task in dump.rollouts.gathered.tasks}
    told = zip(dump.rollouts.gathered.trajectories, dump.advantages, dump.trained, strict=False)
    return [
        {"step": dump.step}
        | trajectory_record(trajectory, Lesson(tasks[trajectory.task_id], values, mask, dump.pieces.__getitem__))
        for trajectory, values, mask in told
    ]


# --- writing ---


def write(workdir: Path, dump: Dump) -> None:
    """Writes a dump; a reader sees all of it or nothing."""
    trajectories = dump.rollouts.all
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    arrays = _segment_arrays(segments) | {
        "advantages": np.concatenate([np.zeros(0, np.float32), *dump.advantages]),
        "trained": np.concatenate([np.zeros(0, bool), *dump.trained]),
        "rewards": np.array([trajectory.reward for trajectory in trajectories], np.float64),
        "segments": np.array([len(trajectory.segments) for trajectory in trajectories], np.int32),
        "metric_values": np.array(list(dump.metrics.values()), np.float64),
        "header": np.frombuffer(json.dumps(_header(dump), default=_plain).encode(), np.uint8),
    }
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    path = file_of(workdir, dump.step)
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, content.getvalue())


def _header(dump: Dump) -> dict[str, Any]:
    gathered = dump.rollouts.gathered
    return {
        "format": FORMAT,
        "version": VERSION,
        "written_by": dump.written_by,
        "scored_by": dump.scored_by,
        "step": dump.step,
        "settings": dump.settings,
        "tasks": [dataclasses.asdict(task) for task in gathered.tasks],
        "taken": gathered.taken,
        "rehearsed": len(dump.rollouts.rehearsed),
        "trajectories": [_trajectory_values(trajectory) for trajectory in dump.rollouts.all],
        "metrics": list(dump.metrics),
        "batches": dict(dump.batches),
        "before": dict(dump.before),
        "after": dict(dump.after),
        "pieces": {str(token): text for token, text in sorted(dump.pieces.items())},
    }


def _plain(value: Any) -> Any:
    """A value that is not JSON's own: numbers of numpy, say, from a reward of one's own."""
    return dict(value) if isinstance(value, Mapping) else value.tolist()


def _trajectory_values(trajectory: Trajectory) -> dict[str, Any]:
    names = ("task_id", "group_id", "attempt", "status", "reason", "messages")
    scores = [dataclasses.asdict(score) for score in trajectory.turn_scores]
    return {name: getattr(trajectory, name) for name in names} | {"turn_scores": scores}


def _segment_arrays(segments: Sequence[Segment]) -> dict[str, np.ndarray]:
    last: dict[Role, np.ndarray] = {}
    shared, prompts = [], []
    for segment in segments:
        shared.append(_common(last.get(segment.role, segment.prompt_tokens[:0]), segment.prompt_tokens))
        prompts.append(segment.prompt_tokens[shared[-1] :])
        last[segment.role] = np.concatenate([segment.prompt_tokens, segment.tokens])
    columns = {
        "role": [segment.role for segment in segments],
        "turn": [segment.turn for segment in segments],
        "finish": [FINISH.index(segment.finish_reason) for segment in segments],
        "policy_version": [segment.policy_version for segment in segments],
        "cached_tokens": [segment.cached_tokens for segment in segments],
        "prompt_length": [len(segment.prompt_tokens) for segment in segments],
        "shared": shared,
        "length": [len(segment.tokens) for segment in segments],
    }
    arrays: dict[str, np.ndarray] = {name: np.array(values, SEGMENT_ARRAYS[name]) for name, values in columns.items()}
    parts: dict[str, list[np.ndarray]] = {
        "prompt_tokens": prompts,
        "tokens": [segment.tokens for segment in segments],
        "logprobs": [segment.logprobs for segment in segments],
    }
    return arrays | {name: np.concatenate([np.zeros(0, kind), *parts[name]]) for name, kind in LONG_ARRAYS.items()}


def _common(one: np.ndarray, other: np.ndarray) -> int:
    size = min(len(one), len(other))
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size


def batch_checksums(batches: Mapping[str, TrainBatch]) -> dict[str, str]:
    """Hex checksums of each array of each learner's batch (numpy), by a name such as "tokens of act"."""
    return {
        f"{field.name} of {learner}" if learner else field.name: _checksum(getattr(batch, field.name))
        for learner, batch in batches.items()
        for field in dataclasses.fields(batch)
        if getattr(batch, field.name) is not None
    }


def _checksum(array: np.ndarray) -> str:
    digest = hashlib.sha256(f"{array.dtype}{array.shape}".encode())
    digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def program() -> str:
    """What writes dumps here."""
    try:
        own = version("envace_jax")
    except PackageNotFoundError:  # run from a checkout that is not installed
        own = "unknown"
    return f"envace_jax {own}, jax {jax.__version__}, {jax.default_backend()}"


# --- reading ---


def read(path: Path) -> Dump:
    """A dump as it was written. Raises UserError where there is none, and for a file that is not one, is damaged, or is
    of another version."""
    if not path.is_file():
        raise UserError(f"{path}: no such dump; logging.dump_every=1 writes one of every step")
    try:
        with open(path, "rb") as opened, np.lib.npyio.NpzFile(opened, allow_pickle=False) as file:
            arrays: dict[str, np.ndarray] = {name: file[name] for name in file.files}
        header = json.loads(arrays["header"].tobytes())
    except Exception as error:  # damage comes as whatever zipfile, zlib and numpy make of it
        raise UserError(f"{path}: not a readable dump of a step ({type(error).__name__}); delete it") from error
    if not isinstance(header, dict) or (header.get("format"), header.get("version")) != (FORMAT, VERSION):
        found = header.get("version") if isinstance(header, dict) else None
        raise UserError(f"{path}: a dump of version {found}; this envace_jax reads version {VERSION}")
    try:
        dump = _dump(header, arrays)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path}: a dump whose parts do not fit together ({why})") from error
    if path.name != file_of(Path(), dump.step).name:
        raise UserError(f"{path}: the dump of step {dump.step}, under the name of another; give it its own name back")
    return dump


def _dump(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Dump:
    for name, kind in (SEGMENT_ARRAYS | LONG_ARRAYS | OTHER_ARRAYS).items():
        if arrays[name].dtype != kind or arrays[name].ndim != 1:
            raise ValueError(f"{name} is {arrays[name].dtype}{list(arrays[name].shape)}")
        if name in SEGMENT_ARRAYS and len(arrays[name]) != len(arrays["role"]):
            raise ValueError(f"{name} tells of {len(arrays[name])} segments, and role of {len(arrays['role'])}")
    for name in ("settings", "batches", "before", "after", "pieces"):
        if not isinstance(header[name], dict):
            raise TypeError(f"{name} is no object")
    if type(header["step"]) is not int or not {*map(type, header["metrics"])} <= {str}:
        raise TypeError("step and metrics are not a number and names")
    segments, ends = _segments(arrays), np.cumsum(arrays["segments"])
    if len(ends) != len(header["trajectories"]) or (ends[-1] if len(ends) else 0) != len(segments):
        raise ValueError("the trajectories have other segments than there are")
    whole = [
        _trajectory(values, float(reward), tuple(segments[end - count : end]))
        for values, reward, count, end in zip(
            header["trajectories"], arrays["rewards"], arrays["segments"], ends, strict=True
        )
    ]
    attempts = len(whole) - header["rehearsed"]
    filtered = header["settings"]["data"]["filter_zero_variance"]
    tasks = [_task(values) for values in header["tasks"]]
    unknown = {trajectory.task_id for trajectory in whole[:attempts]} - {task.task_id for task in tasks}
    if unknown:
        raise ValueError(f"attempts at {min(unknown)!r}, which is none of its tasks")
    gathered = task_sampling.gathered(tasks, whole[:attempts], header["taken"], filtered=filtered)
    return Dump(
        step=header["step"],
        settings=header["settings"],
        rollouts=Rollouts(header["step"] - 1, gathered, tuple(whole[attempts:])),
        advantages=tuple(np.split(arrays["advantages"], ends[:-1])),
        trained=tuple(np.split(arrays["trained"], ends[:-1])),
        batches=header["batches"],
        metrics=dict(zip(header["metrics"], arrays["metric_values"].tolist(), strict=True)),
        before=header["before"],
        after=header["after"],
        pieces={int(token): text for token, text in header["pieces"].items()},
        scored_by=header["scored_by"],
        written_by=header["written_by"],
    )


def _segments(arrays: Mapping[str, np.ndarray]) -> list[Segment]:
    last: dict[Role, np.ndarray] = {}
    found: list[Segment] = []
    added, begins = 0, 0  # places in the long arrays
    for number in range(len(arrays["role"])):
        one = {name: arrays[name][number].item() for name in SEGMENT_ARRAYS}
        role, new = Role(one["role"]), one["prompt_length"] - one["shared"]
        own = slice(begins, begins + one["length"])
        rest = arrays["prompt_tokens"][added : added + new]
        prompt = np.concatenate([last.get(role, rest[:0])[: one["shared"]], rest])
        segment = Segment(
            role, prompt, arrays["tokens"][own], arrays["logprobs"][own], FINISH[one["finish"]],  # type: ignore[arg-type]
            one["policy_version"], one["turn"], one["cached_tokens"],
        )  # fmt: skip
        if (len(prompt), len(segment.tokens), len(segment.logprobs)) != (one["prompt_length"], *[one["length"]] * 2):
            raise ValueError(f"segment {number} is cut short")
        added, begins = added + new, own.stop
        last[role] = np.concatenate([prompt, segment.tokens])
        found.append(segment)
    return found


def _trajectory(values: Mapping[str, Any], reward: float, segments: tuple[Segment, ...]) -> Trajectory:
    scores = [
        TurnScore(score["reward"], tuple(score["verdicts"]), score["proceed"], tuple(score["words"]))
        for score in values["turn_scores"]
    ]
    told = {**values, "messages": tuple(values["messages"]), "turn_scores": tuple(scores)}
    return Trajectory(segments=segments, reward=reward, **told)


def _task(values: Mapping[str, Any]) -> Task:
    tuples = {name: tuple(values[name]) for name in ("messages", "tools", "user_turns", "conversation")}
    checklist = tuple(tuple(_item(item) for item in turn) for turn in values["checklist"])
    reference = tuple((ToolCall(**call), result) for call, result in values["reference"])
    return Task(**{**values, **tuples, "checklist": checklist, "reference": reference})


def _item(values: Mapping[str, Any]) -> CheckItem:
    tuples = {name: tuple(values[name]) for name in ("failure_examples", "evidence", "dependence")}
    return CheckItem(**{**values, **tuples})
