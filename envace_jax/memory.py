"""What is written of rehearsed attempts: their layout as text, and the prompt by which the policy makes notes of them.

Knows tasks, trajectories and prompts; nothing of samplers, budgets or modes (`rehearsal.py`).
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable, Sequence

from envace_jax.chat import END_OF_TEXT, MESSAGE_END, THINK_CLOSE, THINK_OPEN, render_call
from envace_jax.episode import Reason
from envace_jax.roles import Prompts, message_calls
from envace_jax.types import Message, Task, ToolCall, Trajectory

CUT = " [...]"
LINE_LIMITS = (None, 2000, 500, 120)  # characters of a result or reply that are shown, tried in this order

SYSTEM = """\
You prepare an assistant for a task that it is about to carry out with real tools. It has rehearsed the task in \
private: it made the calls and imagined every result itself, so nothing has been executed, and values that appear only \
in imagined results may be wrong.

Write notes for the assistant that help it to do the task right the first time:
- the calls to make, in order, with the arguments that the user's words, the instructions and the real results fix;
- what has to be looked up first, because it was only imagined in the rehearsal;
- what the attempts did wrong or left out, and which is right where they differ;
- what decides between two ways to go on, and what the reply to the user has to say.

Write the notes alone: short lines, no call, no greeting."""


def transcript(task: Task, attempts: Sequence[Trajectory], prompts: Prompts) -> str:
    """The attempts themselves as a memory: how often each course was taken, the most frequent last.

    In the compact style only that one, as one line for each call, for models that can read no more.
    """
    courses: dict[str, list[Trajectory]] = collections.defaultdict(list)
    for attempt in attempts:
        courses[json.dumps([render_call(call) for call in _calls(_own(task, attempt))])].append(attempt)
    ranked = sorted(courses.values(), key=lambda same: (_finished(same), len(same)))  # sorted() keeps the order of ties
    if not ranked:
        return ""
    if prompts.style == "compact":
        return compact_lines(_calls(_own(task, ranked[-1][0])))
    parts = []
    for same in ranked:
        head = f"{len(same)} of {len(attempts)} attempts went like this; every result is imagined:"
        parts.append("\n".join([head, *lines(_own(task, same[0]), None), _end_line(same[0])]))
    return "\n\n".join(parts)


def compact_lines(calls: Iterable[ToolCall]) -> str:
    """A memory in the compact style: a line for each call."""
    return "\n".join(map(render_call, calls))


def question(
    task: Task, attempts: Sequence[Trajectory], before: str, prompts: Prompts, most_tokens: int
) -> list[int] | None:
    """The prompt by which the policy writes its memory, i32[P] as a list; `before` is the memory that it revises.

    Where it has more than `most_tokens` tokens, results and replies are shown shortened, then the first attempts are
    left out; None where it does not fit even so. It is asked for without thoughts, of which there may be more than
    tokens for it.
    """
    prompts = dataclasses.replace(prompts, thinking=False)

    def write(first: int, limit: int | None) -> list[int]:
        return _full(task, attempts, first, before, limit, prompts)

    choices = [(0, limit) for limit in LINE_LIMITS] + [(first, LINE_LIMITS[-1]) for first in range(1, len(attempts))]
    return next((tokens for first, limit in choices if len(tokens := write(first, limit)) <= most_tokens), None)


def read(text: str) -> str:
    """The memory in what the policy wrote: the text outside its thoughts, with any calls that it quotes."""
    for stop in (MESSAGE_END, END_OF_TEXT):
        text = text.removesuffix(stop)
    return text.rpartition(THINK_CLOSE)[2].partition(THINK_OPEN)[0].strip()


def replayed(task: Task, last: Trajectory, otherwise: str) -> str:
    """The memory of a model that can only act: the calls of a last attempt, for which it had `otherwise` to read.

    That one stands where the attempt did not end with a reply.
    """
    return compact_lines(_calls(_own(task, last))) if last.reason == Reason.DONE else otherwise


def _full(
    task: Task, attempts: Sequence[Trajectory], first: int, before: str, limit: int | None, prompts: Prompts
) -> list[int]:
    system = next((message["content"] for message in task.messages if message["role"] == "system"), "")
    said = [message for message in task.messages if message["role"] != "system"]
    said += [{"role": "user", "content": text} for text in task.user_turns[:1]]
    sections = [
        ("# The assistant's instructions", [system] if system else []),
        ("# Tools", [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in task.tools]),
        ("# Conversation so far, its results real", lines(said, limit)),
    ]
    for number, attempt in enumerate(attempts[first:], first + 1):
        title = f"# Rehearsed attempt {number} of {len(attempts)}, its results imagined"
        sections.append((title, [*lines(_own(task, attempt), limit), _end_line(attempt)]))
    sections.append(("# Notes so far, to be revised", [before] if before else []))
    text = "\n\n".join("\n".join([title, *body]) for title, body in sections if body)
    text += "\n\nWrite the notes now."
    chat = prompts.chat
    return [*chat.system(SYSTEM, []), *chat.user(text), *chat.assistant_prefix(thinking=prompts.thinking)]


def lines(messages: Sequence[Message], limit: int | None) -> list[str]:
    """A line for each user message, call with its result, and reply, each text cut to `limit` characters."""
    entries: list[str] = []
    waiting: list[str] = []  # calls whose results come next, in order
    for message in messages:
        content = _cut(message.get("content") or "", limit)
        if message["role"] == "user":
            entries.append(f"user: {content}")
        elif message["role"] == "assistant":
            entries += [f"call: {call}" for call in waiting]
            waiting = [_cut(render_call(call), limit) for call in message_calls(message)]
            entries += [f"reply: {content}"] if content else []
        elif message["role"] == "tool":
            entries.append(f"call: {waiting.pop(0) if waiting else message.get('name', 'tool')}\nresult: {content}")
    return entries + [f"call: {call}" for call in waiting]


def _own(task: Task, attempt: Trajectory) -> Sequence[Message]:
    """The messages that an attempt added to the task's own."""
    return attempt.messages[len(task.messages) + len(task.user_turns[:1]) :]


def _calls(messages: Sequence[Message]) -> list[ToolCall]:
    return [call for message in messages for call in message_calls(message)]


def _finished(attempts: Sequence[Trajectory]) -> bool:
    return any(attempt.reason == Reason.DONE for attempt in attempts)


def _end_line(attempt: Trajectory) -> str:
    return "(ended with a reply)" if attempt.reason == Reason.DONE else f"(stopped: {attempt.reason})"


def _cut(text: str, limit: int | None) -> str:
    return text if limit is None or len(text) <= limit else text[:limit] + CUT
