"""A task as a record of the authors' format, in and out.

A record is the authors' row; ours adds `check` to checklist items, and `environment` and `task_id` to `extra_info`.
Knows nothing of files, tokens, policies or environments: what a task's environment means is not looked at. Every
malformed record is a ValueError that names the record and the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from envace_jax import json_values
from envace_jax.types import CheckItem, Json, Message, Task, ToolCall

WEIGHT_TOLERANCE = 1e-6
CHECK_FIELDS: dict[str, dict[str, type]] = {
    "call": {"name": str, "arguments": dict},
    "result": {"name": str, "field": str, "value": object},
    "reply": {"words": list},
    "no_call": {},
}  # kind -> its fields besides `kind`


def record_from_task(task: Task, index: int = 0) -> dict[str, Json]:
    """The record of a task that has a reference conversation; `task_from_record` gives the same task back."""
    if not task.conversation:
        raise ValueError(f"task {task.task_id} has no reference conversation, which a record needs")
    system = [dict(message) for message in task.messages]
    checklist = [[_item_to_record(item) for item in turn] for turn in task.checklist]
    extra: dict[str, Json] = {
        "index": index,
        "original_index": index,
        "task_id": task.task_id,
        "tools": json.dumps(task.tools, ensure_ascii=False),
        "messages": system + [_message_to_record(message) for message in task.conversation],
        "interaction_kwargs": {"checklist_list": [checklist]},
    }
    if task.environment is not None:
        extra["environment"] = task.environment
    return {
        "data_source": "envace_jax",
        "messages": [*system, {"role": "user", "content": task.user_turns[0]}],
        "extra_info": extra,
    }


def task_from_record(record: Mapping[str, Json], index: int, variant: int = 0) -> Task:
    """The task of a record in the authors' format, using checklist number `variant`.

    `index` is the record's place in its file, for the message of the ValueError that any malformed record raises.
    """
    try:
        return _task_from_record(record, variant)
    except ValueError as error:
        raise ValueError(f"record {index}: {error}") from None


def _task_from_record(record: Mapping[str, Json], variant: int) -> Task:
    json_values.check_writable(record)
    extra = _field(record, "extra_info", dict, "the record")
    tools = _parsed(_field(extra, "tools", str, "extra_info"), "extra_info.tools")
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise ValueError("extra_info.tools is not a list of OpenAI function schemas with a name")
    system, conversation, reference = _read_conversation(_field(extra, "messages", list, "extra_info"))
    user_turns = tuple(message["content"] for message in conversation if message["role"] == "user")
    opening = _field(record, "messages", list, "the record")
    if [_plain(message) for message in opening] != [*system, conversation[0]]:
        raise ValueError("messages is not the system message (if any) and first user message of extra_info.messages")
    environment = extra.get("environment")
    if environment is not None:
        _field(environment, "name", str, "extra_info.environment")
        if set(environment) != {"name", "state"}:
            raise ValueError("extra_info.environment is not {'name': ..., 'state': ...}")
    return Task(
        task_id=_task_id(record, extra),
        messages=tuple(system),
        tools=tuple(tools),
        user_turns=user_turns,
        checklist=_read_checklist(extra, variant, len(user_turns)),
        reference=tuple(reference),
        environment=environment,
        conversation=tuple(conversation),
    )


def _task_id(record: Mapping[str, Json], extra: Mapping[str, Json]) -> str:
    """Ours if the record has one, else made of the data source and the index, which is unique in the authors' files."""
    if "task_id" in extra:
        return _field(extra, "task_id", str, "extra_info")
    if "index" not in extra:
        raise ValueError("extra_info has no field 'index'")
    return f"{record.get('data_source', 'task')}/{extra['index']}"


def _read_conversation(
    messages: Sequence[Json],
) -> tuple[list[Message], list[Message], list[tuple[ToolCall, str]]]:
    """The system message (or nothing), the rest in our form, and (call, result text) in order."""
    conversation: list[Message] = []
    system: list[Message] = []
    reference: list[tuple[ToolCall, str]] = []
    waiting: list[ToolCall] = []  # calls of the last assistant message that have no result yet
    allowed: tuple[str, ...] = ("system", "user")
    for place, message in enumerate(messages):
        where = f"extra_info.messages[{place}]"
        role = _field(message, "role", str, where)
        if waiting and role != "tool":
            raise ValueError(f"{where}: the call of {waiting[0].name} before it has no result")
        if role not in allowed:
            raise ValueError(f"{where}: a message of role {role!r} where {' or '.join(allowed)} is due")
        if role == "tool":
            call = waiting.pop(0)
            content = _field(message, "content", str, where)
            if message.get("name", call.name) != call.name:
                raise ValueError(f"{where}: a result of {message['name']} where one of {call.name} is due")
            reference.append((call, content))
            conversation.append({"role": "tool", "name": call.name, "content": content})
            allowed = ("tool",) if waiting else ("assistant",)
        elif role == "assistant":
            waiting = [_read_call(call, where) for call in _optional(message, "tool_calls", list, where) or ()]
            conversation.append(_assistant(message, waiting, where))
            allowed = ("tool",) if waiting else ("user",)
        else:
            (system if role == "system" else conversation).append({"role": role, "content": _text(message, where)})
            allowed = ("user",) if role == "system" else ("assistant",)
    if waiting:
        raise ValueError(f"extra_info.messages: the last call of {waiting[0].name} has no result")
    if not conversation or conversation[-1]["role"] != "assistant":
        raise ValueError("extra_info.messages does not end with an assistant message")
    return system, conversation, reference


def _assistant(message: Mapping[str, Json], calls: Sequence[ToolCall], where: str) -> Message:
    if not calls:
        return {"role": "assistant", "content": _text(message, where)}
    tool_calls = [{"name": call.name, "arguments": call.arguments} for call in calls]
    content = _optional(message, "content", str, where) or ""
    return {"role": "assistant", "content": content, "tool_calls": tool_calls}


def _read_call(call: Json, where: str) -> ToolCall:
    function = _field(call, "function", dict, f"{where}.tool_calls")
    name = _field(function, "name", str, f"{where}.tool_calls.function")
    text = _field(function, "arguments", str, f"{where}: the call of {name}")
    arguments = _parsed(text, f"{where}: arguments of {name}")
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: arguments of {name} are not a JSON object")
    return ToolCall(name, arguments)


def _read_checklist(extra: Mapping[str, Json], variant: int, turns: int) -> tuple[tuple[CheckItem, ...], ...]:
    kwargs = _field(extra, "interaction_kwargs", dict, "extra_info")
    variants = _field(kwargs, "checklist_list", list, "extra_info.interaction_kwargs")
    if not 0 <= variant < len(variants):
        raise ValueError(f"checklist variant {variant} was asked for; the record has {len(variants)}")
    checklist = variants[variant]
    if not isinstance(checklist, list) or len(checklist) != turns:
        raise ValueError(f"the checklist does not have one list of items for each of the {turns} user turns")
    read = []
    for turn, items in enumerate(checklist):
        where = f"checklist of turn {turn}"
        if not isinstance(items, list) or not items:
            raise ValueError(f"the {where} is empty or not a list")
        read.append(tuple(_read_item(item, f"{where}, item {place}", len(items)) for place, item in enumerate(items)))
        total = sum(item.weight for item in read[-1])
        if not abs(total - 1) <= WEIGHT_TOLERANCE:  # written so that NaN is refused too
            raise ValueError(f"the weights of the {where} sum to {total}, not 1")
        _refuse_circles(read[-1], where)
    return tuple(read)


def _read_item(item: Json, where: str, count: int) -> CheckItem:
    weight = _field(item, "weight", (int, float), where)
    dependence = _optional(item, "dependence", list, where) or []
    if isinstance(weight, bool) or weight < 0:
        raise ValueError(f"{where}: the weight {weight!r} is not a number of at least 0")
    if not all(type(other) is int and 0 <= other < count for other in dependence):
        raise ValueError(f"{where}: dependence {dependence!r} does not name items of the same turn")
    evidence = _optional(item, "evidence", list, where) or []
    return CheckItem(
        question=_field(item, "question", str, where),
        weight=float(weight),
        focus_on=_optional(item, "focus_on", str, where) or "",
        pass_condition=_optional(item, "pass_condition", str, where) or "",
        failure_examples=tuple(_optional(item, "failure_examples", list, where) or ()),
        evidence=tuple(_field(entry, "snippet", str, f"{where}: evidence") for entry in evidence),
        required_for_next_turn=_optional(item, "required_for_next_turn", bool, where) or False,
        dependence=tuple(dependence),
        check=_read_check(item.get("check"), where),
    )


def _read_check(check: Json, where: str) -> Mapping[str, Json] | None:
    if check is None:
        return None
    kind = _field(check, "kind", str, f"{where}: check")
    if kind not in CHECK_FIELDS:
        raise ValueError(f"{where}: unknown check kind {kind!r}; there are: {', '.join(CHECK_FIELDS)}")
    fields = CHECK_FIELDS[kind]
    for name, expected in fields.items():
        _field(check, name, expected, f"{where}: check")
    if unknown := sorted(set(check) - set(fields) - {"kind"}):
        raise ValueError(f"{where}: a check of kind {kind} has no field {unknown[0]!r}")
    words = check["words"] if kind == "reply" else ["none"]
    if not words or not all(isinstance(word, str) and word.strip() for word in words):
        raise ValueError(f"{where}: the words of a reply check are not texts, or there are none")
    return check


def _refuse_circles(items: Sequence[CheckItem], where: str) -> None:
    """An item that depends on itself, by whatever way, could never be judged."""
    settled: set[int] = set()
    while len(settled) < len(items):
        ready = {place for place, item in enumerate(items) if settled.issuperset(item.dependence)}
        if ready == settled:
            raise ValueError(f"the {where} has items that depend on each other in a circle")
        settled = ready


def _message_to_record(message: Message) -> dict[str, Json]:
    if not message.get("tool_calls"):
        return dict(message)
    calls = [
        {
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)},
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _item_to_record(item: CheckItem) -> dict[str, Json]:
    record: dict[str, Json] = {
        "question": item.question,
        "focus_on": item.focus_on,
        "pass_condition": item.pass_condition,
        "failure_examples": list(item.failure_examples),
        "evidence": [{"snippet": snippet} for snippet in item.evidence],
        "weight": item.weight,
        "required_for_next_turn": item.required_for_next_turn,
        "dependence": list(item.dependence),
    }
    if item.check is not None:
        record["check"] = dict(item.check)
    return record


def _field(holder: Json, name: str, kinds: Any, where: str) -> Any:
    """`holder[name]`, checked to be there and of the kind expected."""
    if not isinstance(holder, Mapping):
        raise ValueError(f"{where} is not a JSON object")
    if name not in holder:
        raise ValueError(f"{where} has no field {name!r}")
    if not isinstance(holder[name], kinds):
        wanted = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        raise ValueError(f"{where}: {name} is of type {type(holder[name]).__name__}, not {wanted}")
    return holder[name]


def _optional(holder: Mapping[str, Json], name: str, kind: Any, where: str) -> Any:
    """As `_field`, or None where the field is absent or null."""
    return None if holder.get(name) is None else _field(holder, name, kind, where)


def _text(message: Mapping[str, Json], where: str) -> str:
    content = _field(message, "content", str, where)
    if not content.strip():
        raise ValueError(f"{where}: the {message['role']} message is empty")
    return content


def _plain(message: Json) -> Message:
    return {"role": _field(message, "role", str, "messages"), "content": _field(message, "content", str, "messages")}


def _is_tool(tool: Json) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _parsed(text: str, where: str) -> Json:
    """The value of a JSON text inside the record. Escapes in it are read only here, so it is checked anew."""
    try:
        value = json_values.parse(text)
    except ValueError as error:
        raise ValueError(f"{where} is {error}") from None
    json_values.check_writable(value, where)
    return value
