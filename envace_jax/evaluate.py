"""Measures a policy: success in the executable environment, and how faithfully it rehearses that environment.

Success is strict: the whole checklist holds and the environment ends in the state that the reference calls lead to. A
benchmark's own environment says itself how a conversation came out (`envs`, process modules).
Knows tasks, a sampler and parameters; nothing of training. Fidelity never runs an environment: it compares
with the recorded results of the reference calls.
`python -m envace_jax.evaluate` measures a checkpoint on a benchmark (`benchmarks/command.py`).
"""

from __future__ import annotations

import collections
import dataclasses
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from envace_jax import hosts, roles
from envace_jax.envs import load_process, make_environment
from envace_jax.episode import Limits, Reason
from envace_jax.json_values import json_equal
from envace_jax.responders import Real
from envace_jax.rollout import rollout
from envace_jax.sampling import Sample, Sampler, SampleRequest, sample_all
from envace_jax.types import Json, Message, Params, Task, ToolCall, Trajectory
from envace_jax.users import User

FULL_REWARD = 1.0 - 1e-6
# Evaluations draw from streams of random numbers that no training step uses.
SUCCESS_STREAM, FIDELITY_STREAM = -1, -2


@dataclasses.dataclass(frozen=True)
class Success:
    """One evaluation. `per_task` is the mean outcome of each task's attempts, f64[tasks]; nan where all failed.

    An outcome is 1 where an attempt solved its task and 0 where not, or what the benchmark's score says.
    """

    rate: float  # mean over tasks
    reward: float  # mean reward over attempts
    per_task: np.ndarray
    reasons: Mapping[str, int]  # why attempts ended
    trajectories: tuple[Trajectory, ...]


def success(
    sampler: Sampler,
    params: Params,
    tasks: Sequence[Task],
    *,
    reward: Any,
    prompts: roles.Prompts,
    limits: Limits,
    samples: int,
    temperature: float,
    top_p: float,
    seed: int,
    user: User | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> Success:
    """Attempts every task `samples` times in its executable environment (temperature 0 is greedy).

    An attempt whose outcome cannot be known, by a fault while it is scored, is masked like one that failed under way.
    Of several processes each scores its own attempts (`rollout`), and all get all outcomes.
    Raises ValueError for a task that has no executable environment.
    """
    for task in tasks:
        _process_of(task)
    responder = Real(make_environment)
    trajectories = rollout(
        sampler, params, tasks, attempts=samples, responder=responder, reward=reward, prompts=prompts, limits=limits,
        seed=seed, step=SUCCESS_STREAM, temperature=temperature, top_p=top_p, user=user, progress=progress,
    )  # fmt: skip
    solved = np.full(len(trajectories), np.nan)  # stays nan where something outside failed: that is no failure to solve
    for outcomes in hosts.exchange(_outcomes(trajectories, tasks, samples, responder)):
        for index, outcome in outcomes.items():
            if isinstance(outcome, str):
                trajectories[index] = dataclasses.replace(
                    trajectories[index], status="failed", reward=float("nan"), reason=outcome
                )
            else:
                solved[index] = outcome
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.status == "ok"]
    per_task = _mean_of_known(solved.reshape(len(tasks), samples))
    responder.close()
    return Success(
        rate=float(np.nanmean(per_task)) if np.isfinite(per_task).any() else float("nan"),
        reward=float(np.mean(rewards)) if rewards else float("nan"),
        per_task=per_task,
        reasons=dict(collections.Counter(end_reason(trajectory) for trajectory in trajectories)),
        trajectories=tuple(trajectories),
    )


def _process_of(task: Task) -> Any:
    """The process module that scores a task's conversations itself, or None."""
    if task.environment is None:
        raise ValueError(f"task {task.task_id!r} has no executable environment, so its success cannot be measured")
    return load_process(task.environment["name"])


def _outcomes(
    trajectories: Sequence[Trajectory], tasks: Sequence[Task], samples: int, responder: Real
) -> dict[int, float | str]:
    """How this process's own attempts came out, by index; for one whose score cannot be had, the fault. Those that
    failed under way are left out."""
    outcomes: dict[int, float | str] = {}
    asked = {}
    for position, task in enumerate(tasks):
        if not hosts.owns(position):
            continue
        process = _process_of(task)
        goal = None if process else reference_state(task)
        for index in range(position * samples, (position + 1) * samples):
            trajectory = trajectories[index]
            if trajectory.status != "ok":
                continue
            if process is None:
                outcomes[index] = float(is_solved(trajectory, responder.final_state(index), goal))
            elif trajectory.reason == Reason.DONE:
                asked[index] = process.score(task, trajectory.messages)
            else:
                outcomes[index] = 0.0  # it never came to its end, whatever it had done by then
    for index, future in asked.items():
        try:
            outcomes[index] = float(future.result())
        except Exception as error:  # whatever failed outside masks this attempt and no other
            outcomes[index] = " ".join(f"fault: {type(error).__name__}: {error}".split())[:300]
    return outcomes


def is_solved(trajectory: Trajectory, state: Json, goal: Json) -> bool:
    """Whether an attempt met its whole checklist and left the environment as the reference calls leave it."""
    return trajectory.status == "ok" and trajectory.reward >= FULL_REWARD and json_equal(state, goal)


def end_reason(trajectory: Trajectory) -> str:
    """Why it ended, as one word; a fault's message is left out."""
    return trajectory.reason.split(":")[0]


def reference_state(task: Task) -> Json:
    """The environment's state after the task's reference calls."""
    if task.environment is None:
        raise ValueError(f"task {task.task_id!r} has no executable environment, so its success cannot be measured")
    environment = make_environment(task.environment)
    for call, _ in task.reference:
        environment.call(call.name, call.arguments)
    return environment.state()


@dataclasses.dataclass(frozen=True)
class RehearsedCall:
    """A reference call in its place: the conversation before it, the act message that makes it, and its result."""

    task: Task
    messages: tuple[Message, ...]
    act_text: str
    call: ToolCall
    result: str


def calls_of(task: Task, conversation: Sequence[Message], prompts: roles.Prompts) -> list[RehearsedCall]:
    """The reference calls of a reference conversation (user, assistant and tool messages in order)."""
    found = []
    results = iter(result for _, result in task.reference)
    for index, message in enumerate(conversation):
        calls = roles.message_calls(message) if message["role"] == "assistant" else []
        body = prompts.chat.assistant(message.get("content") or "", calls=calls) if calls else []
        for call in calls:
            text = prompts.chat.decode(body[:-1])  # as in a rollout, without the id that ended the message
            found.append(RehearsedCall(task, tuple(conversation[:index]), text, call, next(results)))
    return found


def fidelity(
    sampler: Sampler,
    params: Params,
    calls: Sequence[RehearsedCall],
    *,
    prompts: roles.Prompts,
    max_tokens: int,
    temperature: float,
    seed: int,
    reference_examples: bool,
) -> float:
    """Share of calls whose rehearsed result equals the recorded one as JSON, with or without examples in the prompt."""
    requests = []
    for index, item in enumerate(calls):
        prompt = roles.rehearse_prompt(
            prompts, item.task, item.messages, item.act_text, item.call,
            reference=item.task.reference if reference_examples else (),
        )  # fmt: skip
        key = (seed & 0x7FFFFFFF, FIDELITY_STREAM, zlib.crc32(item.task.task_id.encode()) & 0x7FFFFFFF, 0, index)
        requests.append(SampleRequest(index, prompt, max_tokens, key, temperature, 1.0))
    matches = 0
    for sample in generate(sampler, params, requests):
        text, ok = roles.parse_rehearsal(prompts.chat.decode(sample.tokens.tolist()))
        matches += ok and _same_result(text, calls[sample.request_id].result)
    return matches / len(calls) if calls else float("nan")


def agreement(trajectories: Iterable[Trajectory], tasks: Mapping[str, Task]) -> float:
    """Share of rehearsed results that equal a reference result, among the calls that the task's reference makes too.

    A measure of fidelity that costs nothing during training: it needs no environment.
    """
    equal = total = 0
    for trajectory in trajectories:
        reference = tasks[trajectory.task_id].reference
        waiting: list[ToolCall] = []
        for message in trajectory.messages:
            if message["role"] == "assistant":
                waiting = roles.message_calls(message)
            elif message["role"] == "tool" and waiting:
                call = waiting.pop(0)
                results = [result for known, result in reference if _same_call(call, known)]
                if results:
                    total += 1
                    equal += any(_same_result(message["content"], result) for result in results)
    return equal / total if total else float("nan")


def generate(sampler: Sampler, params: Params, requests: Sequence[SampleRequest]) -> list[Sample]:
    """`sample_all` with caches that may be of other weights forgotten."""
    sampler.reset()
    return sample_all(sampler, params, requests)


def _same_call(one: ToolCall, other: ToolCall) -> bool:
    return one.name == other.name and json_equal(one.arguments, other.arguments)


def _same_result(one: str, other: str) -> bool:
    """Whether two results are one JSON value; a recorded result may also be any text, which then only equals itself."""
    if one == other:
        return True
    try:
        return json_equal(json.loads(one), json.loads(other))
    except (ValueError, RecursionError):
        return False


def _mean_of_known(values: np.ndarray) -> np.ndarray:
    known = np.isfinite(values)
    counts = known.sum(axis=1)
    return np.where(counts > 0, np.where(known, values, 0.0).sum(axis=1) / np.maximum(counts, 1), np.nan)


if __name__ == "__main__":
    from envace_jax.benchmarks import command

    raise SystemExit(command.run(sys.argv))
