"""FinMCP-Bench's tool F1 on a data file of one's own: the data may not be passed on, so none is here.

At every assistant message of a recorded conversation the policy is asked to go on from the recorded history (teacher
forcing), for one message. Only the tools' names count: over a sample's messages the names called are a multiset, and
hits, extras and omissions are summed over all samples before precision and recall are taken (micro F1).

The file holds JSON lines or a JSON list. A sample has `messages` (OpenAI's form, with the recorded calls and results)
and `tools` (OpenAI's function schemas, or the JSON text of them), itself or in `extra_info`, and may have `id` and
`type` (single_tool, multi_tool or multi_turn; told from the conversation where it is not said).
"""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from envace_jax import data, roles
from envace_jax.benchmarks import Case, Options, Outcome, Step, Suite, calls_in, chosen_categories, subset
from envace_jax.benchmarks.scores import Attempt, bootstrap
from envace_jax.config import UserError
from envace_jax.futures import done
from envace_jax.types import CheckItem, Json, Message, Task, ToolCall, Trajectory

CATEGORIES = ("single_tool", "multi_tool", "multi_turn")
NEEDED = (
    "FinMCP-Bench's data is not part of this package (CC-BY-NC-SA, not to be passed on): give your own copy by "
    "--data=FILE.jsonl, samples with `messages` and `tools` (docs/benchmarks.md)"
)


def read(options: Options) -> Suite:
    """A case for every assistant message of every sample."""
    if not options.data:
        raise UserError(NEEDED)
    path = Path(options.data).expanduser()
    if not path.is_file():
        raise UserError(f"--data={options.data}: no such file. {NEEDED}")
    asked = chosen_categories(options, CATEGORIES)
    cases: list[Case] = []
    taken = set[str]()
    for number, (where, sample) in enumerate(data.read_entries(path)):
        try:
            if isinstance(sample, ValueError):
                raise sample
            own = cases_of(sample, number)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"--data: {where}: {_reason(error)}") from None
        if own and sample_of(own[0].case_id) in taken:
            raise UserError(f"--data: {where}: the id {sample_of(own[0].case_id)!r} is already taken")
        taken |= {sample_of(case.case_id) for case in own}
        cases += [case for case in own if not asked or case.category in asked]
    if not cases:
        raise UserError(f"--data={options.data}: no sample has an assistant message")
    missing = {name: "no sample in the file" for name in CATEGORIES if name not in {case.category for case in cases}}
    return Suite("FinMCP tool F1 of this package", _subset(cases, options), missing, steps=1)


def _subset(cases: Sequence[Case], options: Options) -> tuple[Case, ...]:
    """As `benchmarks.subset`, by samples: a sample is whole or left out."""
    firsts = [case for case in cases if case.case_id.endswith("/0")]
    samples = [Case(sample_of(case.case_id), case.category, case.task) for case in firsts]
    kept = {case.case_id for case in subset(samples, options, dict.fromkeys(CATEGORIES, 10))}
    return tuple(case for case in cases if sample_of(case.case_id) in kept)


def sample_of(case_id: str) -> str:
    """The sample that a case is a message of."""
    return case_id.rpartition("/")[0]


def cases_of(sample: Mapping[str, Any], number: int) -> list[Case]:
    """The cases of a sample, `ID/0`, `ID/1`, ... Raises ValueError, KeyError or TypeError for what is no sample."""
    inside = sample.get("extra_info") or {}
    messages = [_message(message) for message in _member(sample, inside, "messages")]
    tools = _member(sample, inside, "tools")
    tools = tuple(_tool(tool) for tool in (json.loads(tools) if isinstance(tools, str) else tools))
    name = str(sample.get("id", inside.get("index", number)))
    category = sample.get("type") or _kind(messages)
    if category not in CATEGORIES:
        raise ValueError(f"type {category!r}; accepted: {', '.join(CATEGORIES)}")
    cases: list[Case] = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            task = _point(f"finmcp:{name}/{len(cases)}", messages[:place], tools, roles.message_calls(message))
            cases.append(Case(f"{name}/{len(cases)}", category, task, one_message=True))
    return cases


def _member(sample: Mapping[str, Any], inside: Mapping[str, Any], name: str) -> Any:
    found = inside.get(name) or sample.get(name)
    if not found:
        raise ValueError(f"no {name}")
    return found


def _message(message: Any) -> Message:
    """A message in our form. Raises ValueError for another role, or text that is none."""
    role, content = message["role"], message.get("content") or ""
    if role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"a message of role {role!r}; accepted: system, user, assistant, tool")
    if not isinstance(content, str):
        raise ValueError(f"the content of a {role} message is a {type(content).__name__}, no text")
    calls = roles.call_entries(roles.message_calls(message))
    return {"role": role, "content": content} | ({"tool_calls": calls} if calls else {})


def _tool(tool: Any) -> Mapping[str, Json]:
    if "function" not in tool:
        tool = {"type": "function", "function": tool}
    if not isinstance(tool["function"]["name"], str):
        raise ValueError("a tool's name is no text")
    return tool


def _kind(messages: Sequence[Message]) -> str:
    """The type of a sample by its conversation: several user messages, else several calls, else one."""
    if sum(message["role"] == "user" for message in messages) > 1:
        return "multi_turn"
    return "multi_tool" if len(calls_in(messages)) > 1 else "single_tool"


def _point(task_id: str, history: Sequence[Message], tools: Any, calls: Sequence[ToolCall]) -> Task:
    """The task to write the message after a history. Raises ValueError for a history that nobody goes on from."""
    if not history or history[-1]["role"] not in ("user", "tool"):
        raise ValueError("an assistant message follows neither a user message nor tool results")
    return Task(
        task_id=task_id,
        messages=tuple(history),
        tools=tools,
        user_turns=(),  # it goes on from where the messages end
        checklist=((CheckItem("Are the recorded tools called?", 1.0),),),
        reference=tuple((call, "{}") for call in calls),
    )


def _reason(error: Exception) -> str:
    return f"no {error.args[0]!r}" if isinstance(error, KeyError) else " ".join(str(error).split())[:300]


def outcome(case: Case, trajectory: Trajectory, state: Json) -> Future[Outcome]:
    """Which tools were called and which should have been. The score is whether these are the same."""
    wanted = [call.name for call, _ in case.task.reference]
    written = [message for message in trajectory.messages if message["role"] == "assistant"]
    called = calls_in(written[-1:])
    same = collections.Counter(called) == collections.Counter(wanted)
    return done(Outcome(float(same), {"called": called, "wanted": wanted}))


def gold(case: Case) -> list[Step] | None:
    """The recorded calls."""
    return [tuple(call for call, _ in case.task.reference) or "Done."]


def tool_counts(called: Sequence[str], wanted: Sequence[str]) -> tuple[int, int, int]:
    """Of a sample: hits, names called, and names wanted."""
    hits = (collections.Counter(called) & collections.Counter(wanted)).total()
    return hits, len(called), len(wanted)


def tool_f1(hits: int, called: int, wanted: int) -> dict[str, float]:
    """Precision, recall and F1 in percent; each is 0 where it would divide by 0."""
    precision, recall = (hits / count if count else 0.0 for count in (called, wanted))
    f1 = 2 * precision * recall / (precision + recall) if hits else 0.0
    return {"precision": 100 * precision, "recall": 100 * recall, "f1": 100 * f1}


def summary(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Micro tool F1 of every type of sample and of all, with a bootstrap interval over samples, each with all of its
    trials. A trial of a sample with a masked message is left out whole."""
    found = {}
    for name in (*dict.fromkeys(attempt.category for attempt in attempts), "all"):
        by_sample: dict[str, np.ndarray] = {}
        own = [attempt for attempt in attempts if name in ("all", attempt.category)]
        for (sample, _), names in _samples(own).items():
            by_sample[sample] = by_sample.get(sample, 0) + np.array(tool_counts(*names), np.int64)
        counts = np.array(list(by_sample.values()), np.int64).reshape(-1, 3)
        if len(counts):
            hits, called, wanted = counts.sum(axis=0).tolist()
            ends = bootstrap(counts, lambda sums: tool_f1(*sums.tolist())["f1"])
            found[name] = {"hits": hits, "called": called, "wanted": wanted, **tool_f1(hits, called, wanted)}
            found[name] |= {"interval": list(ends), "samples": len(counts)}
    return {"tool_f1": found}


def _samples(attempts: Sequence[Attempt]) -> dict[tuple[str, int], tuple[list[str], list[str]]]:
    """(sample, trial) -> all names called and wanted."""
    found: dict[tuple[str, int], tuple[list[str], list[str]]] = {}
    lost = {(sample_of(attempt.case_id), attempt.trial) for attempt in attempts if attempt.masked}
    for attempt in attempts:
        key = (sample_of(attempt.case_id), attempt.trial)
        if key not in lost:
            called, wanted = found.setdefault(key, ([], []))
            called += attempt.detail["called"]
            wanted += attempt.detail["wanted"]
    return found
