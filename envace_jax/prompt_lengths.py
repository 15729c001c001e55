"""Tasks that are too long for a run, found before it begins by measuring every prompt with the run's own tokenizer.

An attempt at a task that the limits cannot hold is masked, whatever the policy writes (`episode.start`): it costs its
place in the batch and teaches nothing. Such tasks are left out here, by name. Knows prompts and
tasks; no files, no devices, no parameters.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence

from envace_jax.chat import Chat
from envace_jax.episode import Limits, check_room
from envace_jax.roles import Prompts, PromptTooLong, act_prompt
from envace_jax.task_store import StoredTasks
from envace_jax.types import Need, Task

MANY = 10_000  # tasks; with more of them it is said how far the measuring has come
EVERY_S = 10.0  # seconds between two such lines
SHOWN = 3  # tasks that are named


@dataclasses.dataclass(frozen=True)
class TooLong:
    """A task that is left out: its place among the tasks that were read, and why, with its id, tokens and the limit."""

    index: int
    reason: str


def first_prompt_tokens(chat: Chat, task: Task, *, thinking: bool = True) -> int:
    """Tokens of a task's first ACT prompt: system text, tools, first user turn, and what opens the answer."""
    return len(act_prompt(Prompts(chat, thinking=thinking, max_act_prompt=sys.maxsize), task))


def leave_out_long(
    tasks: Sequence[Task], prompts: Prompts, limits: Limits, *, answered_by: Need, longest: int = 0
) -> tuple[Sequence[Task], list[TooLong]]:
    """The tasks that a run can play, in their order, and the others.

    The prompts' and the trajectory's limits decide as they do in `episode.start`; `longest`, if it is not 0, bounds the
    tokens of the first ACT prompt besides. Says how far it has come where there are many tasks.
    """
    kept: list[int] = []
    left_out: list[TooLong] = []
    told = time.monotonic()
    for index, task in enumerate(tasks):
        if len(tasks) > MANY and time.monotonic() - told > EVERY_S:
            told = time.monotonic()
            print(f"data.source: measured {index} of {len(tasks)} prompts", flush=True)
        try:
            _check(prompts, limits, task, answered_by, longest)
            kept.append(index)
        except PromptTooLong as error:
            left_out.append(TooLong(index, str(error)))
    if not left_out:
        return tasks, left_out
    return (tasks.chosen(kept) if isinstance(tasks, StoredTasks) else tuple(tasks[index] for index in kept)), left_out


def said(left_out: Sequence[TooLong], total: int) -> list[str]:
    """Lines about the tasks that are left out: how many, and the first of them by name."""
    if not left_out:
        return []
    lines = [f"data.source: left out {len(left_out)} of {total} tasks that are too long"]
    lines += [f"    task {task.index}: {task.reason}" for task in left_out[:SHOWN]]
    return lines + ["    ..."] * (len(left_out) > SHOWN)


def _check(prompts: Prompts, limits: Limits, task: Task, answered_by: Need, longest: int) -> None:
    tokens = len(act_prompt(prompts, task))
    if longest and tokens > longest:
        raise PromptTooLong(
            f"the first prompt of task {task.task_id!r} has {tokens} tokens; data.longest_prompt is {longest}"
        )
    check_room(prompts, limits, task, answered_by, tokens)
