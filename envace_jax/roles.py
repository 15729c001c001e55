"""The prompts and answers of the policy's two roles, as token ids and text.

ACT continues the conversation with the tools in view; REHEARSE is asked, once per tool call, to play the tool and to
answer inside `<execution_result>` tags, from a prompt of its own. This module knows nothing of sampling, episodes or
rewards, and keeps no state.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from envace_jax.chat import CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN, Chat, render_call
from envace_jax.json_values import check_writable, json_equal
from envace_jax.types import Json, Message, Task, ToolCall

RESULT_OPEN = "<execution_result>"
RESULT_CLOSE = "</execution_result>"
ERROR_KEY = "error_tool_call"  # a result object with this key says that the call could not be executed at all
NOTE_TITLE = "# Notes from your own rehearsal of this task"  # what a task's note is called in full prompts
OMITTED_MARKER = "[earlier lines of the conversation are left out here]"

Reference = Sequence[tuple[ToolCall, str]]

# The procedure follows method.md ("What is trained"); the wording is ours.
FULL_SYSTEM = f"""\
You play the tools of a software system. An assistant talks with a user and calls tools; for one of its calls you \
write down exactly what the tool would return. You never talk to the user and you never continue the assistant's work.

Go through these checks in order:
1. Format: the call is well-formed, with a tool name and an object of arguments.
2. Tool: the name is one of the tools listed under "Tools".
3. Arguments: every required argument is there, each has the type and one of the values that the schema allows, and \
no argument is unknown to the schema.
4. Result: if all three hold, write what the tool returns. It must fit the tool's description, the example results, \
and everything that the conversation has established: what was created, changed or removed earlier stays so. If the \
tool itself would refuse (say, an unknown id or too little money), return the refusal as that tool would word it.

If check 1, 2 or 3 fails, return {{"{ERROR_KEY}": {{"code": "...", "message": "...", "details": "..."}}}} where \
code is malformed_call, unknown_tool or invalid_arguments.

Answer with one non-empty JSON object, or a JSON array, between tags and with nothing after them:
{RESULT_OPEN}
{{"field": "value"}}
{RESULT_CLOSE}"""
COMPACT_SYSTEM = "Simulate the tools."  # for models so small that every prompt token costs


class PromptTooLong(ValueError):
    """A prompt exceeds its limit even after all that may be left out was left out."""


class NoResult(ValueError):
    """A REHEARSE answer holds no result. `result` is the structured error that takes its place."""

    def __init__(self, code: str, message: str, source: str):
        super().__init__(message)
        self.result = _error_result(code, message, source)


@dataclasses.dataclass(frozen=True)
class Question:
    """A REHEARSE prompt in the two forms in which a model can be asked; their text is the same."""

    messages: tuple[Message, ...]  # the system and the user message, for a model behind an endpoint
    tokens: list[int]  # the same up to the answer, for a model in this process


@dataclasses.dataclass(frozen=True)
class Prompts:
    """How prompts are written.

    `style` is "full" (the method's sections) or "compact" (for tiny models). `max_act_prompt` bounds the first ACT
    prompt of a task and `max_rehearse_prompt` every REHEARSE prompt, in tokens. `reference_examples` puts the task's
    reference calls and results into the REHEARSE prompt. `as_sampled` writes given assistant messages as a rollout's
    stream has them, all thoughts in their places and empty ones where there are none and the policy does not think;
    Qwen3's template leaves these out.
    """

    chat: Chat
    style: Literal["full", "compact"] = "full"
    thinking: bool = True
    max_act_prompt: int = 12_000
    max_rehearse_prompt: int = 12_000
    reference_examples: bool = True
    as_sampled: bool = False

    def __post_init__(self) -> None:
        if self.style not in ("full", "compact"):
            raise ValueError(f"prompt style {self.style!r} is unknown; accepted: 'full', 'compact'")
        for name in ("max_act_prompt", "max_rehearse_prompt"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1 token")


def act_prompt(prompts: Prompts, task: Task, opening: str | None = None) -> list[int]:
    """Token ids up to the policy's first assistant message: system text, tools, first user turn, assistant prefix.

    What the task says was spoken before stands before the user turn, or is all there is where the task has none.
    `opening` takes the place of the task's own first user turn. A task's note follows the system text, or what was said
    last.

    Nothing is cut: a task without its tools or its rules is another task. Raises PromptTooLong beyond
    `max_act_prompt`, for which a note does not count, and ValueError for a task without user turns whose messages do
    not end where an assistant goes on.
    """
    tokens = _act_prompt(prompts, task, opening, "")
    if len(tokens) > prompts.max_act_prompt:
        raise PromptTooLong(
            f"the first prompt of task {task.task_id!r} has {len(tokens)} tokens; max_act_prompt is "
            f"{prompts.max_act_prompt}"
        )
    return _act_prompt(prompts, task, opening, task.note) if task.note else tokens


def _act_prompt(prompts: Prompts, task: Task, opening: str | None, note: str) -> list[int]:
    chat = prompts.chat
    system = next((message["content"] for message in task.messages if message["role"] == "system"), None)
    said = [message for message in task.messages if message["role"] != "system"]
    if task.user_turns:
        said.append({"role": "user", "content": task.user_turns[0] if opening is None else opening})
    elif not said or said[-1]["role"] not in ("user", "tool"):
        raise ValueError(
            f"task {task.task_id!r} has no user turns; at least one is needed, or messages that end with a user's "
            "message or tool results"
        )
    note = titled(prompts, note)
    after: list[int] = []
    if note and task.note_place == "system":
        system = below(system, note)
    elif note and said[-1]["role"] == "user":
        said[-1] = {**said[-1], "content": below(said[-1]["content"], note)}
    elif note:  # no turn of its own: the thoughts of the one under way stay
        after = chat.user(note)
    return [
        *chat.system(system, list(task.tools)),
        *_spoken(prompts, said),
        *after,
        *chat.assistant_prefix(thinking=prompts.thinking),
    ]


def titled(prompts: Prompts, note: str) -> str:
    """A note as it stands in a prompt; an empty one is none."""
    return f"{NOTE_TITLE}\n{note}" if note and prompts.style == "full" else note


def below(text: str | None, note: str) -> str:
    """A text with a note at its end."""
    return f"{text}\n\n{note}" if text else note


def _spoken(prompts: Prompts, messages: Sequence[Message]) -> list[int]:
    """Token ids of messages that are given. Thoughts are kept in what follows the last user message, as in Qwen3's
    template, or with `as_sampled` everywhere."""
    chat = prompts.chat
    tokens: list[int] = []
    results: list[str] = []
    last_user = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for place, message in enumerate(messages):
        if message["role"] == "user":
            tokens += chat.user(message["content"])
        elif message["role"] == "assistant":
            thoughts = message.get("reasoning_content") if prompts.as_sampled or place > last_user else None
            body = chat.assistant(message.get("content") or "", thoughts or None, message_calls(message))
            empty = prompts.as_sampled and not prompts.thinking and not thoughts
            tokens += [*chat.assistant_prefix(thinking=not empty), *body, *chat.close(body)]
        elif message["role"] == "tool":
            results.append(message["content"])
            if [other["role"] for other in messages[place + 1 : place + 2]] != ["tool"]:
                tokens += chat.tool_results(results)
                results = []
    return tokens


def rehearse_prompt(
    prompts: Prompts,
    task: Task,
    messages: Sequence[Message],
    act_text: str,
    call: ToolCall,
    *,
    reference: Reference | None = None,
) -> list[int]:
    """The token ids of `rehearse_question`: system text, one user text, assistant prefix."""
    return rehearse_question(prompts, task, messages, act_text, call, reference=reference).tokens


def rehearse_question(
    prompts: Prompts,
    task: Task,
    messages: Sequence[Message],
    act_text: str,
    call: ToolCall,
    *,
    reference: Reference | None = None,
) -> Question:
    """What asks a model, the policy or another, to play the tool for one call.

    Args:
      messages: the conversation before the assistant message that calls; system messages are left out.
      act_text: that assistant message as generated.
      call: the call to answer.
      reference: example calls and results; by default the task's own if `prompts.reference_examples`.

    What stays the same within a trajectory comes first, so that kept caches can be reused. If the tokens exceed
    `max_rehearse_prompt`, the oldest lines of the conversation are dropped, as few as possible; if that is not enough,
    also the examples least like the call. Raises PromptTooLong if it does not fit without any of them.
    """
    if reference is None:
        reference = task.reference if prompts.reference_examples else ()
    lines = _conversation_lines(messages, flat=prompts.style == "compact")
    least_alike = _least_alike_first(reference, call)

    @functools.cache  # nearly always nothing is left out, and what was measured is what is asked
    def without(lines_dropped: int, examples_dropped: int = 0) -> Question:
        # By place, not by value: the reference may hold the same example twice.
        examples = [reference[place] for place in sorted(least_alike[examples_dropped:])]
        return _question(prompts, task, examples, lines[lines_dropped:], lines_dropped > 0, act_text, call)

    limit = prompts.max_rehearse_prompt
    fewest = _fewest(len(lines), lambda count: len(without(count).tokens) <= limit)
    if fewest is not None:
        return without(fewest)
    fewest = _fewest(len(reference), lambda count: len(without(len(lines), count).tokens) <= limit)
    if fewest is not None:
        return without(len(lines), fewest)
    least = len(without(len(lines), len(reference)).tokens)
    raise PromptTooLong(
        f"the rehearse prompt for {call.name!r} in task {task.task_id!r} has {least} tokens without any conversation "
        f"or example; max_rehearse_prompt is {limit}"
    )


def check_rehearse_room(prompts: Prompts, task: Task, name: str | None = None) -> None:
    """Raises PromptTooLong where REHEARSE prompts of the task do not fit, however little the policy writes.

    `max_rehearse_prompt` must hold the tools and a right call: the longest one that the task's reference makes, or one
    without arguments to a tool that it does not call. An overlong prompt is the policy's doing only where this much
    fits. `name` is the tool whose calls are looked at, by default any.
    """
    calls = [ToolCall(_function(tool)["name"], {}) for tool in task.tools] + [call for call, _ in task.reference]
    calls = [call for call in calls if name in (None, call.name)] or [ToolCall("", {})]

    def characters(call: ToolCall) -> int:  # of what differs between the calls; counting every one's tokens takes long
        asked = _asked(task, call) if prompts.style == "full" else ()
        return len(render_call(call)) + sum(map(len, asked))

    longest = max(calls, key=characters)
    message = f"{CALL_OPEN}\n{render_call(longest)}\n{CALL_CLOSE}"
    least = len(_question(prompts, task, (), (), True, message, longest).tokens)
    if least > prompts.max_rehearse_prompt:
        raise PromptTooLong(
            f"prompts.max_rehearse_prompt={prompts.max_rehearse_prompt} cannot hold the {least} tokens that asking for "
            f"{longest.name!r} in task {task.task_id!r} takes at least; raise it, or shorten the tools' schemas"
        )


def _fewest(most: int, fits: Callable[[int], bool]) -> int | None:
    """The smallest count in 0..most that fits, if leaving out more always fits where less does; None if none does."""
    if fits(0):
        return 0
    if not fits(most):
        return None
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def parse_rehearsal(text: str) -> tuple[str, bool]:
    """Reads a REHEARSE answer into (canonical result text, ok).

    Where `read_rehearsal` finds no result, the result is the JSON text of `{"error_tool_call": {"code", "message",
    "details"}}` and ok is False; an answer that is itself such an error object is kept, and is not ok either.
    """
    try:
        result = read_rehearsal(text)
    except NoResult as missing:
        return missing.result, False
    return result, not is_error_result(result)


def read_rehearsal(text: str) -> str:
    """The canonical result text of a REHEARSE answer; a structured error is a result. Raises NoResult without one.

    The result is the JSON between the first opening and the last closing tag, a non-empty object or an array. What
    stands before and after the tags is passed over, though the prompt asks for none; so are thoughts that open the
    text, with any tags in them, which must be closed.
    """
    answer = text
    if text.lstrip().startswith(THINK_OPEN):  # elsewhere the tags are part of a result or of a stray text
        _, thought, answer = text.partition(THINK_CLOSE)
        if not thought:
            raise NoResult("no_result", "the thinking was not closed", text)
    _, opened, rest = answer.partition(RESULT_OPEN)
    body, closed, _ = rest.rpartition(RESULT_CLOSE)
    if not opened or not closed:
        tag = RESULT_CLOSE if opened else RESULT_OPEN
        raise NoResult("no_result", f"the answer has no {tag}", answer)
    try:
        result = canonical_result(body)
    except ValueError as error:
        raise NoResult("invalid_result", str(error), body) from None
    if result == "{}":
        raise NoResult("invalid_result", "the object is empty", body)
    return result


def rehearsal_target(result_text: str) -> str:
    """The answer that REHEARSE should give for a known result: the inverse of `parse_rehearsal`."""
    return f"{RESULT_OPEN}\n{result_text}\n{RESULT_CLOSE}"


def canonical_result(text: str) -> str:
    """The one way to write a tool result: `json.dumps(value, ensure_ascii=False)` of a JSON object or array.

    Raises ValueError, in one line, for anything else, for numbers that JSON cannot hold (nan, infinity), for text that
    cannot be encoded in UTF-8, and for nesting so deep that what compares or writes the result later could not follow.
    """
    try:
        value = json.loads(text)
        check_writable(value, "the result")
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict | list):
        raise ValueError(f"a JSON {type(value).__name__}; a tool result is an object or an array")
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def is_error_result(result_text: str) -> bool:
    """Whether a tool result says that the call could not be executed (a domain's own refusal is an ordinary result)."""
    try:
        value = json.loads(result_text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and ERROR_KEY in value


def message_calls(message: Message) -> list[ToolCall]:
    """The calls of an assistant message: `tool_calls[].function.{name, arguments}`, arguments an object or its text."""
    calls = []
    for entry in message.get("tool_calls") or ():
        function = entry.get("function", entry)
        arguments = function["arguments"]
        calls.append(ToolCall(function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments))
    return calls


def call_entries(calls: Sequence[ToolCall], as_text: bool = False) -> list[dict[str, Json]]:
    """The calls as `tool_calls` of a message, the inverse of `message_calls`; arguments as JSON text on a wire."""

    def arguments(call: ToolCall) -> Json:
        return json.dumps(dict(call.arguments), ensure_ascii=False) if as_text else dict(call.arguments)

    return [{"type": "function", "function": {"name": call.name, "arguments": arguments(call)}} for call in calls]


def _error_result(code: str, message: str, source: str) -> str:
    details = source.strip().encode("utf-8", "replace").decode("utf-8")[:200]
    return json.dumps({ERROR_KEY: {"code": code, "message": message, "details": details}}, ensure_ascii=False)


def _question(
    prompts: Prompts,
    task: Task,
    examples: Reference,
    lines: Sequence[str],
    shortened: bool,
    act_text: str,
    call: ToolCall,
) -> Question:
    """The REHEARSE prompt that holds just these examples and lines of the conversation."""
    write = _full_text if prompts.style == "full" else _compact_text
    text = write(task, examples, lines, shortened, act_text, call)
    if prompts.thinking:
        text += "\n/think"
    system = FULL_SYSTEM if prompts.style == "full" else COMPACT_SYSTEM
    tokens = [
        *prompts.chat.system(system, []),
        *prompts.chat.user(text),
        *prompts.chat.assistant_prefix(thinking=prompts.thinking),
    ]
    return Question(({"role": "system", "content": system}, {"role": "user", "content": text}), tokens)


def _full_text(
    task: Task, reference: Reference, lines: Sequence[str], shortened: bool, act_text: str, call: ToolCall
) -> str:
    conversation = [OMITTED_MARKER, *lines] if shortened else lines
    return _sections(
        ("# Tools", [_json(_function(tool)) for tool in task.tools]),
        ("\n# Example calls and results", _example_lines(reference)),
        ("\n# Conversation so far", conversation),
        ("\n# The assistant's message", [act_text]),
        ("\n# The call to answer", _asked(task, call)),
    )


def _asked(task: Task, call: ToolCall) -> list[str]:
    schema = next((tool for tool in map(_function, task.tools) if tool["name"] == call.name), None)
    return [
        f"Name: {call.name}",
        f"Schema: {_json(schema) if schema is not None else 'none, no such tool is listed'}",
        f"Arguments: {_json(dict(call.arguments))}",
    ]


def _compact_text(
    task: Task, reference: Reference, lines: Sequence[str], shortened: bool, act_text: str, call: ToolCall
) -> str:
    del shortened, act_text  # a tiny model reads neither
    tools = [{key: tool[key] for key in ("name", "parameters") if key in tool} for tool in map(_function, task.tools)]
    return _sections(
        ("TOOLS", [_json(tool) for tool in tools]),
        ("HISTORY", lines),
        ("EXAMPLES", _example_lines([reference[place] for place in _least_alike_first(reference, call)])),
        ("CALL", [render_call(call)]),
    )


def _least_alike_first(reference: Reference, call: ToolCall) -> list[int]:
    """Places of the examples: of the called tool last, with most arguments in common after the others; else in order.

    A tiny model looks an example up far more easily where it is near.
    """

    def similarity(place: int) -> tuple[bool, int]:
        other = reference[place][0]
        shared = sum(
            name in other.arguments and json_equal(other.arguments[name], value)
            for name, value in call.arguments.items()
        )
        return other.name == call.name, shared

    return sorted(range(len(reference)), key=similarity)


def _sections(*sections: tuple[str, Sequence[str]]) -> str:
    return "\n".join("\n".join([title, *lines]) for title, lines in sections if lines)


def _example_lines(reference: Reference) -> list[str]:
    return [f"{render_call(call)} => {result}" for call, result in reference]


def _conversation_lines(messages: Sequence[Message], *, flat: bool) -> list[str]:
    """One line per user message, call with its result, and reply; `flat` also takes line breaks out of the texts."""
    entries: list[str] = []
    waiting: list[str] = []  # calls of the last assistant message whose results come next, in order
    for message in messages:
        content = message.get("content") or ""
        if message["role"] == "user":
            entries.append(f"user: {content}")
        elif message["role"] == "assistant":
            if content:
                entries.append(f"reply: {content}")
            waiting = [render_call(call) for call in message_calls(message)]
        elif message["role"] == "tool":
            entries.append(f"{waiting.pop(0) if waiting else message.get('name', 'tool')} => {content}")
    if flat:
        return [" ".join(entry.splitlines()) for entry in entries]
    return [line for entry in entries for line in entry.split("\n")]


def _function(tool: Mapping[str, Json]) -> Mapping[str, Json]:
    return tool.get("function", tool)


def _json(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)
