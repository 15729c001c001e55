"""A reward for faithful rehearsal that asks no environment: one reference result is held out and rehearsed.

The policy is asked for a call of a reference conversation, in its place there, with that call left out of the
examples, so that its result cannot be copied from them. What it writes is rewarded 1 where it matches the recorded
result, else 0. The samples are trained as REHEARSE segments in groups of their own: they move no baseline of the tasks,
nor the tasks theirs.
Knows prompts and a sampler; nothing of losses, batches or optimizers.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Sequence

import numpy as np

from envace_jax import roles
from envace_jax.config import RunConfig
from envace_jax.evaluate import RehearsedCall, calls_of, generate
from envace_jax.json_values import json_equal
from envace_jax.rollout import Player
from envace_jax.sampling import Sampler, SampleRequest
from envace_jax.task_store import StoredTasks
from envace_jax.types import Json, Params, Role, Segment, Task, ToolCall, Trajectory

REASON = "fidelity"  # of the trajectories made here
STREAM = 2  # tells the random numbers that choose calls from those that order tasks


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """A reference call whose result is to be rehearsed, and the prompt that asks for it."""

    task_id: str
    place: int  # in the task's reference
    prompt_tokens: np.ndarray  # i32[P]
    result: str  # the recorded one


def of_step(
    config: RunConfig, tasks: Sequence[Task], player: Player, prompts: roles.Prompts, step: int
) -> list[Trajectory]:
    """A step's rehearsals of held-out results of `tasks` (`rehearsable`), by who plays REHEARSE; none by default."""
    wanted = config.fidelity
    if not wanted.calls_per_step:
        return []
    held = hold_out(tasks, prompts, count=wanted.calls_per_step, seed=config.data.seed, step=step)
    return rehearse(
        player.sampler, player.params, held, prompts=prompts, attempts=wanted.attempts, threshold=wanted.threshold,
        max_tokens=config.limits.rehearse_response, temperature=config.sampler.temperature,
        top_p=config.sampler.top_p, seed=config.seed, step=step, first_group=-1 - step * wanted.calls_per_step,
    )  # fmt: skip


def rehearsable(config: RunConfig, tasks: Sequence[Task]) -> Sequence[Task]:
    """The tasks with a call to hold out, where the configuration holds any out."""
    if not config.fidelity.calls_per_step:
        return ()
    places = [place for place, task in enumerate(tasks) if can_be_held_out(task)]
    return tasks.chosen(places) if isinstance(tasks, StoredTasks) else tuple(tasks[place] for place in places)


def can_be_held_out(task: Task) -> list[int]:
    """Places of the task's reference calls, in a conversation, whose results a rehearsal could give: JSON, no errors.

    A task whose conversation makes other calls than its reference has none.
    """
    if not tells_reference(task):
        return []
    rehearsed = [roles.parse_rehearsal(roles.rehearsal_target(result)) for _, result in task.reference]
    return [place for place, (_, ok) in enumerate(rehearsed) if ok]


def tells_reference(task: Task) -> bool:
    """Whether the task has a reference conversation, and that makes the calls of its reference, at least one."""
    told = [
        call for message in task.conversation if message["role"] == "assistant" for call in roles.message_calls(message)
    ]
    known = [call for call, _ in task.reference]
    return 0 < len(told) == len(known) and all(map(_same_call, told, known))


def hold_out(tasks: Sequence[Task], prompts: roles.Prompts, *, count: int, seed: int, step: int) -> tuple[HeldOut, ...]:
    """One call of each of `count` tasks, drawn by seed and step alone from tasks that have one (`can_be_held_out`).

    A call whose prompt does not fit `prompts.max_rehearse_prompt` even without examples is left out.
    """
    generator = np.random.default_rng((seed, STREAM, step))
    held = []
    for number in generator.choice(len(tasks), size=min(count, len(tasks)), replace=False):
        task = tasks[number]
        place = int(generator.choice(can_be_held_out(task)))
        item = calls_of(task, task.conversation, prompts)[place]
        try:
            prompt = roles.rehearse_prompt(
                prompts, task, item.messages, item.act_text, item.call,
                reference=other_examples(item) if prompts.reference_examples else (),
            )  # fmt: skip
        except roles.PromptTooLong:
            continue
        held.append(HeldOut(task.task_id, place, np.asarray(prompt, np.int32), item.result))
    return tuple(held)


def other_examples(item: RehearsedCall) -> tuple[tuple[ToolCall, str], ...]:
    """The task's reference without the call, wherever it stands: the same call twice would give the result away."""
    return tuple((call, result) for call, result in item.task.reference if not _same_call(call, item.call))


def rehearse(
    sampler: Sampler,
    params: Params,
    held: Sequence[HeldOut],
    *,
    prompts: roles.Prompts,
    attempts: int,
    threshold: float,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    step: int,
    first_group: int = -1,
) -> list[Trajectory]:
    """`attempts` rehearsals of every held-out call, each a trajectory of one REHEARSE segment with reward 0 or 1.

    Group ids count down from `first_group`: negative ones are no task's. What is sampled follows from seed, step, task,
    place and attempt alone.
    """
    requests = [
        SampleRequest(
            request_id=number * attempts + attempt,
            prompt_tokens=item.prompt_tokens.tolist(),
            max_tokens=max_tokens,
            # The name is hashed with a prefix: no attempt at the task draws these numbers.
            key_ids=(seed, step, zlib.crc32(f"{REASON} {item.task_id}".encode()) & 0x7FFFFFFF, attempt, item.place),
            temperature=temperature,
            top_p=top_p,
        )
        for number, item in enumerate(held)
        for attempt in range(attempts)
    ]
    samples = sorted(generate(sampler, params, requests), key=lambda sample: sample.request_id)
    trajectories = []
    for sample in samples:
        number, attempt = divmod(sample.request_id, attempts)
        item = held[number]
        segment = Segment(
            role=Role.REHEARSE,
            prompt_tokens=item.prompt_tokens,
            tokens=np.asarray(sample.tokens, np.int32),
            logprobs=np.asarray(sample.logprobs, np.float32),
            finish_reason=sample.finish_reason,
            policy_version=step,
        )
        text, ok = roles.parse_rehearsal(prompts.chat.decode(segment.tokens.tolist()))
        reward = float(ok and matches(text, item.result, threshold))
        trajectories.append(
            Trajectory(item.task_id, first_group - number, attempt, (segment,), reward, "ok", REASON)
        )  # fmt: skip
    return trajectories


def metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean reward (nan without any), number of held-out calls, samples and their tokens."""
    return {
        "fidelity_reward": float(np.mean([t.reward for t in trajectories])) if trajectories else float("nan"),
        "fidelity_calls": float(len({t.group_id for t in trajectories})),
        "fidelity_samples": float(len(trajectories)),
        "fidelity_tokens": float(sum(len(s.tokens) for t in trajectories for s in t.segments)),
    }


# --- how alike two results are ---


def matches(rehearsed: str, recorded: str, threshold: float) -> bool:
    """Whether a rehearsed result counts as the recorded one: equal as JSON, or `similarity` of at least `threshold`."""
    try:
        one, other = json.loads(rehearsed), json.loads(recorded)
        return json_equal(one, other) or similarity(one, other) >= threshold
    except (ValueError, RecursionError):
        return rehearsed == recorded


def similarity(one: Json, other: Json) -> float:
    """Share of leaves that two JSON values have in common, of all that either has; in [0, 1].

    A leaf is a string, number, boolean, null or empty container at its path of member names and list places.
    """
    left, right = _leaves(one), _leaves(other)
    common = sum(path in right and json_equal(value, right[path]) for path, value in left.items())
    return common / len(left.keys() | right.keys())


def _leaves(value: Json) -> dict[tuple[str | int, ...], Json]:
    leaves = {}
    # A list of what is still to be seen, not recursion: the policy may nest deeper than Python recurses.
    unseen: list[tuple[tuple[str | int, ...], Json]] = [((), value)]
    while unseen:
        path, current = unseen.pop()
        if isinstance(current, dict | list) and current:
            members = current.items() if isinstance(current, dict) else enumerate(current)
            unseen += [((*path, step), child) for step, child in members]
        else:
            leaves[path] = current
    return leaves


def _same_call(one: ToolCall, other: ToolCall) -> bool:
    return one.name == other.name and json_equal(one.arguments, other.arguments)
