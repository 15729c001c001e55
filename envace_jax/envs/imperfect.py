"""Plausible mistakes in the tiny world's conversations, for demonstrations that a base model is pre-trained on.

Every mistake keeps the format (a well-formed call, a result of the same domain, a short reply), so a model that learns
from such demonstrations errs when it samples while its most likely answer stays right. Knows nothing of tokens.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from types import ModuleType

from envace_jax.envs import domain_names, load_domain
from envace_jax.types import Json, Message, Task

Call = Mapping[str, Json]  # {"name", "arguments"}


def imperfect_step(message: Message, task: Task, rng: random.Random, rate: float) -> Message:
    """An assistant message of the task's conversation, with probability `rate` with one mistake in it.

    A message with calls gets a wrong argument, a wrong tool, a lost call, or becomes a reply. A reply gets a wrong
    number or name, or becomes another reply of the task. A mistake always changes the message.
    """
    if rng.random() >= rate:
        return message
    domain = load_domain(task.environment["name"]) if task.environment else None
    if domain is None:
        raise ValueError(f"task {task.task_id} has no environment, so there are no plausible mistakes for it")
    if not message.get("tool_calls"):
        return {**message, "content": _wrong_reply(message["content"], task, domain, rng)}
    calls = list(message["tool_calls"])
    kinds = ["argument", "argument", "argument", "tool", "skip"] + ["drop", "drop"] * (len(calls) > 1)
    kind, which = rng.choice(kinds), rng.randrange(len(calls))
    if kind == "skip":
        return {"role": "assistant", "content": rng.choice(_replies(task))}
    if kind == "drop":
        del calls[which]
    else:
        mistake = _wrong_argument if kind == "argument" else _wrong_tool
        calls[which] = mistake(calls[which], task, domain, rng)
    return {**message, "tool_calls": calls}


def imperfect_result(result: str, rng: random.Random, rate: float) -> str:
    """The JSON text of a tool result, with probability `rate` with a wrong value, a wrong field or a spurious error."""
    if rng.random() >= rate:
        return result
    value = json.loads(result)
    domain = _domain_of(value)
    while True:
        wrong = rng.choice(_RESULT_MISTAKES)(value, domain, rng)
        if wrong != value:
            return json.dumps(wrong, ensure_ascii=False)


def _wrong_argument(call: Call, task: Task, domain: ModuleType, rng: random.Random) -> Call:
    """Another value for one argument: half of the time one that the task speaks of, else any of its kind."""
    name = rng.choice(sorted(call["arguments"]))
    old = call["arguments"][name]
    kind = domain.VALUES[name]
    spoken = {value for other, _ in task.reference for value in other.arguments.values() if value in kind}
    near = sorted(spoken - {old})
    values = near if near and rng.random() < 0.5 else [value for value in kind if value != old]
    return {**call, "arguments": {**call["arguments"], name: rng.choice(values)}}


def _wrong_tool(call: Call, task: Task, domain: ModuleType, rng: random.Random) -> Call:
    """Another tool of the task; arguments of the same name keep their value, the others are drawn."""
    tool = rng.choice([tool["function"] for tool in task.tools if tool["function"]["name"] != call["name"]])
    arguments = {}
    for name in tool["parameters"]["properties"]:
        kept = call["arguments"].get(name)
        arguments[name] = kept if kept is not None else rng.choice(domain.VALUES[name])
    return {"name": tool["name"], "arguments": arguments}


def _wrong_reply(reply: str, task: Task, domain: ModuleType, rng: random.Random) -> str:
    """Another number, another name of the same kind, or another reply; never the same text."""
    numbers = [match.span() for match in re.finditer(r"\d+", reply)]
    words = [match.span() for match in re.finditer(r"[a-z]+", reply)]
    pools = [pool for pool in domain.VALUES.values() if isinstance(pool[0], str)]
    named = [(span, pool) for span in words for pool in pools if reply[slice(*span)] in pool]
    if numbers and (not named or rng.random() < 0.7):
        start, end = rng.choice(numbers)
        return f"{reply[:start]}{_other_number(int(reply[start:end]), rng)}{reply[end:]}"
    if named:
        (start, end), pool = rng.choice(named)
        return f"{reply[:start]}{rng.choice([word for word in pool if word != reply[start:end]])}{reply[end:]}"
    return rng.choice([other for other in (*_replies(task), "done.", "not enough.") if other != reply])


def _replies(task: Task) -> list[str]:
    return [
        message["content"]
        for message in task.conversation
        if message["role"] == "assistant" and not message.get("tool_calls")
    ]


def _other_number(number: int, rng: random.Random) -> int:
    """A number of the same kind near by: a multiple of ten or five stays one."""
    step = 10 if number >= 10 and number % 10 == 0 else 5 if number >= 10 and number % 5 == 0 else 1
    return rng.choice([other for k in range(-3, 4) if k and (other := number + k * step) >= 0])


def _wrong_value(result: Json, domain: ModuleType, rng: random.Random) -> Json:
    field = rng.choice(sorted(result))
    value = result[field]
    if field == "error":
        return {"error": rng.choice(domain.ERRORS)}
    if isinstance(value, list):
        extra = [hour for hour in domain.VALUES["hour"] if hour not in value]
        longer = sorted([*value, rng.choice(extra)])
        return {field: rng.choice([longer, *[value[:at] + value[at + 1 :] for at in range(len(value))]])}
    if isinstance(value, str):
        return {**result, field: rng.choice(domain.VALUES["name"])}
    return {**result, field: _other_number(value, rng)}


def _wrong_field(result: Json, domain: ModuleType, rng: random.Random) -> Json:
    """The values in other fields, or an error turned into a success."""
    if "error" in result:
        return {rng.choice(domain.FIELDS): rng.randrange(1, 10)}
    fields = rng.sample(domain.FIELDS, min(len(domain.FIELDS), len(result)))
    return dict(zip(fields, result.values(), strict=True))


def _spurious_error(result: Json, domain: ModuleType, rng: random.Random) -> Json:
    return {"error": rng.choice(domain.ERRORS)}


_RESULT_MISTAKES: tuple[Callable[[Json, ModuleType, random.Random], Json], ...] = (
    _wrong_value,
    _wrong_value,
    _wrong_field,
    _spurious_error,
)


def _domain_of(result: Json) -> ModuleType:
    """The first domain whose tools can give such a result."""
    for domain in map(load_domain, domain_names()):
        if set(result) <= set(domain.FIELDS) or result.get("error") in domain.ERRORS:
            return domain
    raise ValueError(f"no domain gives results like {json.dumps(result)}")
