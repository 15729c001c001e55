"""A task as a record of the authors' format, in and out.

A record is the authors' row; ours adds `check` to checklist items, and `environment`, `scenario` and `task_id` to
`extra_info`.
Knows nothing of files, tokens, policies or environments: what a task's environment means is not looked at. Every
malformed record is a ValueError that names the record and the reason.

What is refused is what contradicts itself or could not be used: see the messages below. Members that nothing here reads
are passed over, whatever they hold. Arguments that do not fit their tool's schema are no reason: collected schemas are
often loose or wrong, and the recorded tool answered. The profile (`data_profile.py`) counts them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from envace_jax import json_values
from envace_jax.types import CheckItem, Json, Message, Task, ToolCall

WEIGHT_TOLERANCE = 1e-6
READ_MEMBERS = ("messages", "extra_info", "data_source")
LONGEST_REASON = 300  # characters; what is quoted from a record may be of any length
# What an item may look at; the reward of a judged item about calls or results depends on it.
FOCUSES = (
    "assistant.tool_calls",
    "assistant.content.thinking",
    "assistant.content.user_visible_reply",
    "tool.content",
)
CHECK_FIELDS: dict[str, dict[str, type]] = {
    "call": {"name": str, "arguments": dict},
    "result": {"name": str, "field": str, "value": object},
    "reply": {"words": list},
    "no_call": {},
    "call_among": {"name": str, "arguments": dict},
    "not_called": {"names": list},
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
    if task.scenario:
        extra["scenario"] = task.scenario
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
        raise ValueError(f"record {index}: {_one_line(str(error))}") from None


def _task_from_record(record: Mapping[str, Json], variant: int) -> Task:
    if not isinstance(record, Mapping):
        raise ValueError("the record is not a JSON object")
    json_values.check_writable({name: record[name] for name in READ_MEMBERS if name in record})
    extra = _field(record, "extra_info", dict, "the record")
    tools = _read_tools(extra)
    names = {tool["function"]["name"] for tool in tools}
    system, conversation, reference = _read_conversation(_field(extra, "messages", list, "extra_info"))
    if unlisted := next((call.name for call, _ in reference if call.name not in names), None):
        raise ValueError(f"extra_info.messages: {unlisted!r} is called, and extra_info.tools has no such tool")
    user_turns = tuple(message["content"] for message in conversation if message["role"] == "user")
    scenario = _optional(extra, "scenario", str, "extra_info") or ""
    if scenario:
        user_turns = user_turns[:1]  # the simulated user says the others, in its own words
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
        checklist=_read_checklist(extra, variant, len(user_turns), names),
        reference=tuple(reference),
        environment=environment,
        conversation=tuple(conversation),
        scenario=scenario,
    )


def _task_id(record: Mapping[str, Json], extra: Mapping[str, Json]) -> str:
    """Ours if the record has one, else made of the data source and the index, which is unique in the authors' files."""
    if "task_id" in extra:
        if not (given := _field(extra, "task_id", str, "extra_info")).strip():
            raise ValueError("extra_info.task_id is empty")
        return given
    index = _field(extra, "index", (int, str), "extra_info")
    if isinstance(index, bool) or index == "":
        raise ValueError(f"extra_info.index is {json.dumps(index)}; a number or a text is needed")
    return f"{_optional(record, 'data_source', str, 'the record') or 'task'}/{index}"


def _read_tools(extra: Mapping[str, Json]) -> list[Json]:
    """The tools' schemas. A tool without `parameters` takes no arguments, as OpenAI has it."""
    tools = _parsed(_field(extra, "tools", str, "extra_info"), "extra_info.tools")
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise ValueError("extra_info.tools is not a list of OpenAI function schemas with a name")
    names: set[str] = set()
    for place, tool in enumerate(tools):
        where, function = f"extra_info.tools[{place}]", tool["function"]
        if not function["name"].strip():
            raise ValueError(f"{where}: the name is empty")
        if function["name"] in names:
            raise ValueError(f"{where}: the name {function['name']!r} is already taken by another tool")
        names.add(function["name"])
        _optional(function, "parameters", dict, where)
        _optional(function, "description", str, where)
        if tool.get("type", "function") != "function":
            raise ValueError(f"{where}: type is {json.dumps(tool['type'])}, not 'function'")
    return tools


def _read_conversation(
    messages: Sequence[Json],
) -> tuple[list[Message], list[Message], list[tuple[ToolCall, str]]]:
    """The system message (or nothing), the rest in our form, and (call, result text) in order."""
    conversation: list[Message] = []
    system: list[Message] = []
    reference: list[tuple[ToolCall, str]] = []
    waiting: list[tuple[ToolCall, str | None]] = []  # calls of the last assistant message without a result yet, and ids
    allowed: tuple[str, ...] = ("system", "user")
    for place, message in enumerate(messages):
        where = f"extra_info.messages[{place}]"
        role = _field(message, "role", str, where)
        if waiting and role != "tool":
            raise ValueError(f"{where}: the call of {waiting[0][0].name} before it has no result")
        if role not in allowed:
            raise ValueError(f"{where}: a message of role {role!r} where {' or '.join(allowed)} is due")
        if role == "tool":
            call, call_id = waiting.pop(0)
            content = _field(message, "content", str, where)
            _check_answers(message, call, call_id, where)
            reference.append((call, content))
            conversation.append({"role": "tool", "name": call.name, "content": content})
            allowed = ("tool",) if waiting else ("assistant",)
        elif role == "assistant":
            waiting = [_read_call(call, where) for call in _optional(message, "tool_calls", list, where) or ()]
            conversation.append(_assistant(message, [call for call, _ in waiting], where))
            allowed = ("tool",) if waiting else ("user",)
        else:
            (system if role == "system" else conversation).append({"role": role, "content": _text(message, where)})
            allowed = ("user",) if role == "system" else ("assistant",)
    if waiting:
        raise ValueError(f"extra_info.messages: the last call of {waiting[0][0].name} has no result")
    if not conversation or conversation[-1]["role"] != "assistant":
        raise ValueError("extra_info.messages does not end with an assistant message")
    return system, conversation, reference


def _check_answers(message: Mapping[str, Json], call: ToolCall, call_id: str | None, where: str) -> None:
    """Refuses a result whose name or id is another call's: results stand in the order of the calls."""
    name = _optional(message, "name", str, where)
    if name not in (None, call.name):
        raise ValueError(f"{where}: a result of {name} where one of {call.name} is due")
    answered = _optional(message, "tool_call_id", str, where)
    if call_id is not None and answered not in (None, call_id):
        raise ValueError(f"{where}: a result of the call {answered!r} where one of {call_id!r} is due")


def _assistant(message: Mapping[str, Json], calls: Sequence[ToolCall], where: str) -> Message:
    if not calls:
        return {"role": "assistant", "content": _text(message, where)}
    tool_calls = [{"name": call.name, "arguments": call.arguments} for call in calls]
    content = _optional(message, "content", str, where) or ""
    return {"role": "assistant", "content": content, "tool_calls": tool_calls}


def _read_call(call: Json, where: str) -> tuple[ToolCall, str | None]:
    """A call and its id, if it has one."""
    function = _field(call, "function", dict, f"{where}.tool_calls")
    name = _field(function, "name", str, f"{where}.tool_calls.function")
    text = _field(function, "arguments", str, f"{where}: the call of {name}")
    arguments = _parsed(text, f"{where}: arguments of {name}")
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: arguments of {name} are not a JSON object")
    return ToolCall(name, arguments), _optional(call, "id", str, f"{where}.tool_calls")


def _read_checklist(
    extra: Mapping[str, Json], variant: int, turns: int, tools: AbstractSet[str]
) -> tuple[tuple[CheckItem, ...], ...]:
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
        placed = enumerate(items)
        read.append(tuple(_read_item(item, f"{where}, item {place}", len(items), tools) for place, item in placed))
        total = sum(item.weight for item in read[-1])
        if not abs(total - 1) <= WEIGHT_TOLERANCE:  # written so that NaN is refused too
            raise ValueError(f"the weights of the {where} sum to {total}, not 1")
        _refuse_circles(read[-1], where)
    return tuple(read)


def _read_item(item: Json, where: str, count: int, tools: AbstractSet[str]) -> CheckItem:
    weight = _field(item, "weight", (int, float), where)
    dependence = _optional(item, "dependence", list, where) or []
    if isinstance(weight, bool) or not 0 <= weight <= 1 + WEIGHT_TOLERANCE:
        raise ValueError(f"{where}: the weight {weight!r} is not a number from 0 to 1")
    if not _field(item, "question", str, where).strip():
        raise ValueError(f"{where}: the question is empty")
    if (focus := _optional(item, "focus_on", str, where) or "") not in ("", *FOCUSES):
        raise ValueError(f"{where}: focus_on is {focus!r}; accepted: {', '.join(FOCUSES)}")
    examples = _optional(item, "failure_examples", list, where) or []
    if not all(isinstance(example, str) for example in examples):
        raise ValueError(f"{where}: failure_examples are not texts")
    if not all(type(other) is int and 0 <= other < count for other in dependence):
        raise ValueError(f"{where}: dependence {dependence!r} does not name items of the same turn")
    evidence = _optional(item, "evidence", list, where) or []
    return CheckItem(
        question=item["question"],
        weight=float(weight),
        focus_on=focus,
        pass_condition=_optional(item, "pass_condition", str, where) or "",
        failure_examples=tuple(examples),
        evidence=tuple(_field(entry, "snippet", str, f"{where}: evidence") for entry in evidence),
        required_for_next_turn=_optional(item, "required_for_next_turn", bool, where) or False,
        dependence=tuple(dependence),
        check=_read_check(item.get("check"), where, tools),
    )


def _read_check(check: Json, where: str, tools: AbstractSet[str]) -> Mapping[str, Json] | None:
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
    if kind == "call_among" and not all(isinstance(options, list) for options in check["arguments"].values()):
        raise ValueError(f"{where}: the arguments of a call_among check are not lists of what is accepted")
    for name in {"words", "names"} & set(fields):
        if not check[name] or not all(isinstance(text, str) and text.strip() for text in check[name]):
            raise ValueError(f"{where}: the {name} of a {kind} check are not texts, or there are none")
    if "name" in fields and check["name"] not in tools:
        raise ValueError(f"{where}: the check is of {check['name']!r}, and extra_info.tools has no such tool")
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


def _one_line(text: str) -> str:
    """The text without line breaks, and with its middle left out where it is very long."""
    text = " ".join(text.split())
    if len(text) <= LONGEST_REASON:
        return text
    return f"{text[: LONGEST_REASON // 2]} ... {text[-LONGEST_REASON // 2 :]}"
