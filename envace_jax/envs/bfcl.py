"""BFCL's multi-turn simulators as environments, and its single-turn entries as tasks without one.

The package bfcl-eval asks for other versions than ours, so it runs in worker processes (`bfcl_child.py`), in the
interpreter that ENVACE_BFCL_PYTHON names. A conversation's outcome is the verdict of BFCL's own checkers on its calls.
Knows no policies and no tokens. docs/environments.md says how to install it.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from envace_jax import json_values
from envace_jax.envs import Environment, count_execution, tool_error, worker
from envace_jax.futures import then
from envace_jax.types import CheckItem, Json, Message, MessageList, Task, ToolCall

PYTHON_VARIABLE = "ENVACE_BFCL_PYTHON"
WORKERS = 2
MEMORY_BYTES = 2 * worker.GIB  # address space, of which an idle worker uses a tenth
TIMEOUT_S = 60.0  # a call takes less than a millisecond
NEW_FUNCTIONS = "I have updated some more functions you can choose from. What about now?"  # BFCL's words
# BFCL's names of types -> JSON Schema's; whatever else there may be is a string.
TYPES = {
    "integer": "integer", "number": "number", "float": "number", "string": "string", "boolean": "boolean",
    "bool": "boolean", "array": "array", "list": "array", "tuple": "array", "dict": "object", "object": "object",
    "any": "string",
}  # fmt: skip


def tasks(source: str) -> list[Task]:
    """The tasks of a BFCL category, such as multi_turn_base, or of a file of the same form, whose answers lie in
    possible_answer/ beside it under the same name. Says the package's version.

    Raises ValueError in one line for anything else, and where the package cannot be used.
    """
    pool = _pool()
    print(f"bfcl:{source} from {package()}", flush=True)
    try:
        entries = pool.ask({"do": "entries", "source": os.path.expanduser(source)}).result()
        golds = [pool.ask({"do": "gold", "entry": entry}) if _has_gold_calls(entry) else None for entry in entries]
        results = [None if gold is None else gold.result() for gold in golds]
        return [task_of(entry, result) for entry, result in zip(entries, results, strict=True)]
    except worker.EnvironmentFault as fault:
        raise ValueError(f"bfcl:{source}: {fault}") from None


def _has_gold_calls(entry: Mapping[str, Any]) -> bool:
    return bool(entry["involved_classes"]) and "scenario" not in entry  # a memory's questions are answered in words


def package() -> str:
    """The benchmark's package and its version."""
    info = _pool().info
    return f"{info['package']} {info['version']}"


def open(spec: Mapping[str, Json]) -> Environment:
    """The environment of a task: `{"name": "bfcl", "state": its entry}`."""
    return _Environment(_pool().open(spec["state"]))


def score(task: Task, messages: MessageList) -> Future[float]:
    """BFCL's verdict, 0 or 1, on a conversation: 0 where it did not reach the last user turn.

    Of a single-turn entry only the first message's calls count. The future raises `worker.EnvironmentFault` where the
    verdict cannot be known.
    """
    assert task.environment is not None
    return then(verdict(task, messages), lambda found: float(found["valid"]))


def verdict(task: Task, messages: MessageList) -> Future[Json]:
    """`score` with BFCL's reason: {"valid": bool, "error_type": str}."""
    assert task.environment is not None
    conversation = messages[len(task.messages) :]
    replies = [message["content"] for message in conversation if _is_reply(message)]
    request = {
        "entry": task.environment["state"],
        "turns": turns_of(conversation),
        "reply": replies[-1] if replies else "",
    }
    return _pool().ask({"do": "score", **request})


def memory(task: Task, messages: MessageList = ()) -> Future[Json]:
    """What the memory of a task of memory_kv holds after a conversation, {"state", "text"}: for the next conversation
    to begin with (`with_memory`), and the system message that tells of it. Calls without results were not executed."""
    assert task.environment is not None
    results = [place for place, message in enumerate(messages) if message["role"] == "tool"]
    turns = turns_of(messages[len(task.messages) : results[-1] + 1] if results else ())
    return _pool().ask({"do": "memory", "entry": task.environment["state"], "turns": turns})


def with_memory(task: Task, state: Json) -> Task:
    """The task beginning with a memory, `state` of `memory`; None is an empty one."""
    assert task.environment is not None
    entry = task.environment["state"]
    (name,) = entry["involved_classes"]
    begun = {**entry, "initial_config": {name: {"memory": state}}}
    return dataclasses.replace(task, environment={"name": "bfcl", "state": begun})


def _is_reply(message: Message) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


@functools.cache
def _pool() -> worker.WorkerPool:
    python = os.environ.get(PYTHON_VARIABLE) or sys.executable
    folder = tempfile.TemporaryDirectory(prefix="envace-bfcl-")  # the package makes folders wherever it is told
    try:
        pool = worker.WorkerPool(
            Path(__file__).with_name("bfcl_child.py"), python, workers=WORKERS, memory_bytes=MEMORY_BYTES,
            timeout_s=TIMEOUT_S, variables={"BFCL_PROJECT_ROOT": folder.name, "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
    except worker.WorkerStartError as error:
        folder.cleanup()
        raise worker.WorkerStartError(f"{error} ({PYTHON_VARIABLE} names the interpreter that has it)") from None
    atexit.register(folder.cleanup)
    atexit.register(pool.close)  # the last one registered goes first
    return pool


class _Environment:
    """One entry's simulators, in a worker."""

    def __init__(self, episode: worker.WorkerEpisode):
        self._episode = episode

    def call(self, name: str, arguments: Mapping[str, Json]) -> Json | Future[Json]:
        count_execution()
        if (problem := _unwritable(arguments)) is not None:
            return tool_error("invalid_arguments", f"the arguments do not fit {name}", [problem])
        return self._episode.call(name, arguments)

    def state(self) -> Future[Json]:
        """The public attributes of every simulator."""
        return self._episode.state()

    def close(self) -> None:
        self._episode.close()


def turns_of(messages: MessageList) -> list[list[list[list[Json]]]]:
    """[turn][step][call] = [name, arguments] of a conversation; what cannot be written is left out as it never ran."""
    turns: list[list[list[list[Json]]]] = []
    for message in messages:
        if message["role"] == "user":
            turns.append([])
        elif message["role"] == "assistant":
            calls = [_call_of(call) for call in message.get("tool_calls") or ()]
            turns[-1].append([call for call in calls if _unwritable(call[1]) is None])
    return turns


def _call_of(call: Mapping[str, Json]) -> list[Json]:
    function = call.get("function", call)
    arguments = function["arguments"]
    return [function["name"], json.loads(arguments) if isinstance(arguments, str) else dict(arguments)]


def _unwritable(arguments: Json) -> str | None:
    """Why arguments cannot be sent as JSON, or None."""
    try:
        json_values.check_writable(arguments, "arguments")
        json.dumps(arguments)
    except ValueError as error:  # of numbers with thousands of digits too
        return str(error)
    return None


# --- tasks ---


def task_of(entry: Mapping[str, Any], gold: Sequence[Sequence[Sequence[Any]]] | None) -> Task:
    """Our task from an entry of the child's and what its gold calls give, where they can be executed."""
    if gold is None:
        kept = ("id", "function", "missed", "involved_classes", "initial_config", "ground_truth", "scenario")
        state = {name: entry[name] for name in kept if name in entry}
        checklist: tuple[tuple[CheckItem, ...], ...] = (_single_turn_items(entry),) * len(entry["question"])
    else:
        state = {name: entry[name] for name in ("id", "involved_classes", "initial_config", "ground_truth")}
        state["function"] = [{"name": document["name"]} for document in _documents(entry)]
        state["missed"] = {}
        checklist = tuple(_items([_check("call", name, arguments) for name, arguments, _ in turn]) for turn in gold)
    system, user_turns = _opening(entry)
    return Task(
        task_id=f"bfcl:{entry['id']}",
        messages=system,
        tools=tuple(tool_of(document) for document in entry["function"]),
        user_turns=user_turns,
        checklist=checklist,
        reference=tuple(
            (ToolCall(_name(name), arguments), json.dumps(result, ensure_ascii=False))
            for turn in gold or ()
            for name, arguments, result in turn
        ),
        environment={"name": "bfcl", "state": state},
    )


def _opening(entry: Mapping[str, Any]) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """The system message, if any, and the user turns. Raises ValueError where more was said before a user turn."""
    system: list[Message] = []
    turns = []
    for number, messages in enumerate(entry["question"]):
        missed = entry["missed"].get(str(number))
        if missed is not None:  # as BFCL does where functions are given in the prompt
            documents = [tool_of(document)["function"] for document in missed]
            turns.append(f"{json.dumps(documents, ensure_ascii=False)}\n{NEW_FUNCTIONS}")
            continue
        if number == 0 and messages and messages[0]["role"] == "system":
            system, messages = [{"role": "system", "content": messages[0]["content"]}], messages[1:]
        if not messages or any(message["role"] not in ("user", "assistant") for message in messages):
            raise ValueError(f"bfcl:{entry['id']}: turn {number} has no user message or one of another role")
        turns.append(_joined(messages))
    return tuple(system), tuple(turns)


def _joined(messages: Sequence[Message]) -> str:
    """One user message; a few live entries hold a whole conversation, which is then written out."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _documents(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Of all functions, those that are held back at first among them."""
    return [*entry["function"], *(document for missed in entry["missed"].values() for document in missed)]


def _single_turn_items(entry: Mapping[str, Any]) -> tuple[CheckItem, ...]:
    if "scenario" in entry:  # how it is scored is no matter of calls
        return (CheckItem("Is the question answered?", 1.0),)
    if "irrelevance" in entry["id"]:
        return _items([])
    if entry["ground_truth"] is None:
        return (CheckItem("Is one of the tools called?", 1.0),)
    return _items(
        [_check("call_among", name, accepted) for call in entry["ground_truth"] for name, accepted in call.items()]
    )


def _check(kind: str, name: str, arguments: Json) -> Mapping[str, Json]:
    return {"kind": kind, "name": _name(name), "arguments": arguments}


def _items(checks: Sequence[Mapping[str, Json]]) -> tuple[CheckItem, ...]:
    """Gold calls as items of equal weight; where there are none, that no tool is called."""
    if not checks:
        return (CheckItem("Is no tool called?", 1.0, check={"kind": "no_call"}),)
    questions = [
        f"Is {check['name']} called with these arguments: {json.dumps(check['arguments'])}?" for check in checks
    ]
    return tuple(
        CheckItem(question, 1 / len(checks), focus_on="assistant.tool_calls", check=check)
        for question, check in zip(questions, checks, strict=True)
    )


def _name(name: str) -> str:
    """As it is called: dots are no part of a tool's name elsewhere."""
    return name.replace(".", "_")


def tool_of(document: Mapping[str, Any]) -> Mapping[str, Json]:
    """The OpenAI schema of a BFCL function, with what it says of the result."""
    parameters = {**_schema(document["parameters"]), "type": "object"}
    return {"type": "function", "function": {**document, "name": _name(document["name"]), "parameters": parameters}}


def _schema(schema: Mapping[str, Any]) -> dict[str, Json]:
    made = {**schema, "type": TYPES.get(schema.get("type", "string"), "string")}
    if isinstance(schema.get("properties"), Mapping):
        made["properties"] = {name: _property(value) for name, value in schema["properties"].items()}
    if isinstance(schema.get("items"), Mapping):
        made["items"] = _schema(schema["items"])
    return made


def _property(schema: Mapping[str, Any]) -> dict[str, Json]:
    made = _schema(schema)
    if schema.get("type") == "float":
        made |= {"format": "float", "description": f"{schema.get('description', '')} This is a float type value."}
    return made
