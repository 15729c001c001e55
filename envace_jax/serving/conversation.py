"""The prompt of an OpenAI-style conversation as token ids, the same as Qwen3's chat template makes.

Checks of what messages mean together are here too; of what each is by itself, in `protocol.py`. Knows no HTTP.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping, Sequence
from typing import Any

from envace_jax.chat import THINK_CLOSE, THINK_OPEN, Chat, render_call
from envace_jax.json_values import check_writable
from envace_jax.roles import below
from envace_jax.types import Json, Message, ToolCall

NOTE = "note"  # the role of a note after tool results: it is written as a user's message, and begins no turn


def plain(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages with texts for contents: parts are put together, a missing content is empty; `developer` is
    `system`. The arguments of calls become JSON texts."""
    found: list[Message] = []
    for message in messages:
        role = "system" if message["role"] == "developer" else message["role"]
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        made: dict[str, Any] = {"role": role, "content": content or ""}
        if role == "assistant":
            if message.get("reasoning_content") is not None:
                made["reasoning_content"] = message["reasoning_content"]
            if message.get("tool_calls"):
                made["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
        if role == "tool":
            made |= {key: message[key] for key in ("tool_call_id", "name") if message.get(key) is not None}
        found.append(made)
    return found


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    own = {"id": call["id"]} if call.get("id") is not None else {}
    return own | {"type": "function", "function": {"name": function["name"], "arguments": text or "{}"}}


Problem = tuple[str, str]  # (parameter, what is wrong with it)


def problem(messages: Sequence[Message], tools: Sequence[Mapping[str, Json]]) -> Problem | None:
    """The first message that cannot stand where it does, or tool that cannot be told from another.

    As at OpenAI, the results of all calls of a message follow it, each by its id; ids may be left out.
    """
    names: set[str] = set()
    for place, name in enumerate(tool["function"]["name"] for tool in tools):
        if name in names:
            return f"tools.{place}", f"a tool called {name!r} is there already"
        names.add(name)
    # Ids of calls whose results are due, in order, and how often (only None, for no id, may be so twice); None: not
    # even a call. The dict that gives its first key soon however many were taken away.
    open_: collections.OrderedDict[str | None, int] | None = None
    for place, message in enumerate([*messages, {"role": "end"}]):
        where = f"messages.{place}"
        if message["role"] == "tool":
            given = message.get("tool_call_id")
            if open_ is None:
                return where, "a message of role 'tool' must follow an assistant message with 'tool_calls'"
            if given not in open_ and None not in open_ and (given is not None or not open_):
                return f"{where}.tool_call_id", f"no call before it that waits for a result has the id {given!r}"
            answered = given if given in open_ else None if None in open_ else next(iter(open_))
            open_[answered] -= 1
            if not open_[answered]:
                del open_[answered]
            continue
        if open_:
            missing = next(iter(open_))
            return f"messages.{place - 1}", f"a message of role 'tool' must answer each call; missing: {missing!r}"
        open_ = None
        if message.get("tool_calls"):
            counts = collections.Counter(call.get("id") for call in message["tool_calls"])
            open_ = collections.OrderedDict(counts)
            wrong = _wrong_call(where, message["tool_calls"])
            if wrong is not None:
                return wrong
    return None


def _wrong_call(where: str, calls: Sequence[Mapping[str, Any]]) -> Problem | None:
    ids = collections.Counter(call["id"] for call in calls if "id" in call)
    for number, call in enumerate(calls):
        if "id" in call and ids[call["id"]] > 1:
            return f"{where}.tool_calls.{number}.id", f"two calls have the id {call['id']!r}"
        value: Json = None
        try:
            value = json.loads(call["function"]["arguments"])
            check_writable(value, "arguments")
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            return f"{where}.tool_calls.{number}.function.arguments", "expected the JSON text of an object"
    return None


def prompt(
    chat: Chat,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Json]],
    thinking: bool,
    as_sampled: bool = False,
    begun: Sequence[int] = (),
) -> list[int]:
    """Token ids up to the assistant message that is to come, for messages as `plain` gives them.

    `begun` are tokens that it is to begin with; it has no thoughts then, and what was said before stands as ever.

    As in the template, thoughts of assistant messages stay only after the last user message; with `as_sampled` they
    are written as a rollout's stream has them (`roles.Prompts`).
    """
    first = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    tokens = chat.system(first, tools)
    last_query = max((at for at, message in enumerate(messages) if _is_query(message)), default=len(messages) - 1)
    results: list[str] = []
    for place, message in enumerate(messages):
        role = message["role"]
        if role == "system" and place:
            tokens += chat.system(message["content"], [])
        elif role in ("user", NOTE):
            tokens += chat.user(message["content"])
        elif role == "assistant":
            content, reasoning = _thoughts(message)
            if as_sampled:
                reasoning = reasoning or None
            elif place <= last_query or not (reasoning or place == len(messages) - 1):
                reasoning = None
            body = chat.assistant(content, reasoning, [call_text(call) for call in message.get("tool_calls") or ()])
            empty = as_sampled and not thinking and reasoning is None
            tokens += [*chat.assistant_prefix(thinking=not empty), *body, *chat.close(body)]
        elif role == "tool":
            results.append(message["content"])
            if place + 1 == len(messages) or messages[place + 1]["role"] != "tool":
                tokens += chat.tool_results(results)
                results = []
    return [*tokens, *chat.assistant_prefix(thinking=thinking and not begun), *begun]


def with_note(messages: Sequence[Message], note: str, place: str) -> list[Message]:
    """The messages with a note for the policy alone: at the end of the system text, or of what was said last."""
    changed = list(messages)
    if place == "system":
        if not changed or changed[0]["role"] != "system":
            return [{"role": "system", "content": note}, *changed]
        changed[0] = {**changed[0], "content": below(changed[0]["content"], note)}
    elif changed[-1]["role"] == "user":
        changed[-1] = {**changed[-1], "content": below(changed[-1]["content"], note)}
    else:
        changed.append({"role": NOTE, "content": note})
    return changed


def _is_query(message: Message) -> bool:
    text = message["content"]
    return message["role"] == "user" and not (text.startswith("<tool_response>") and text.endswith("</tool_response>"))


def _thoughts(message: Message) -> tuple[str, str | None]:
    """(content, thoughts) of an assistant message, the thoughts perhaps written into the content."""
    content = message["content"]
    if "reasoning_content" in message:
        return content, message["reasoning_content"]
    if THINK_CLOSE not in content:
        return content, ""
    before = content.split(THINK_CLOSE)[0].rstrip("\n").split(THINK_OPEN)[-1].lstrip("\n")
    return content.split(THINK_CLOSE)[-1].lstrip("\n"), before


def call_text(call: Mapping[str, Any]) -> str:
    """The JSON text of a call whose arguments are a JSON text, which stays as it is."""
    function = call["function"]
    return f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {function["arguments"]}}}'


def forced_beginning(chat: Chat, tools: Sequence[Mapping[str, Json]], name: str | None = None) -> list[int]:
    """Tokens that an answer begins with so that it calls the tool `name`, or with None any of the tools.

    As far as the calls that could come agree, token by token: what the model goes on from is then a text as it would
    have written it itself.
    """
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    possible = [chat.call_opening(text) for function in functions for text in _possible_calls(function)]
    shortest = min(map(len, possible))
    agreed = next((at for at in range(shortest) if len({tokens[at] for tokens in possible}) > 1), shortest)
    least = len(chat.call_opening(""))
    while agreed > least and chat.decode(possible[0][:agreed]).endswith("\ufffd"):  # no half a character
        agreed -= 1
    if name is not None:
        named = f'{{"name": {json.dumps(name, ensure_ascii=False)}'
        if named not in chat.decode(possible[0][:agreed]):
            return chat.call_opening(f'{named}, "arguments":')
    return possible[0][: max(agreed, least)]


def _possible_calls(function: Mapping[str, Any]) -> list[str]:
    """Texts of calls of a tool that differ in what comes first of the arguments.

    A schema may be any JSON object: what cannot be read of it forbids nothing.
    """
    schema = function.get("parameters") or {}
    properties, required = schema.get("properties"), schema.get("required")
    names = list(properties) if isinstance(properties, Mapping) else []
    values: tuple[Json, ...] = ("", 1, {})
    beginnings = [{name: value} for name in [*names, "a", "b"] for value in values]
    if not (isinstance(required, list) and required):
        beginnings.append({})
    return [render_call(ToolCall(function["name"], arguments)) for arguments in beginnings]
