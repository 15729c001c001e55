"""BFCL-v4 as a suite: conversations in this package's environments, verdicts by BFCL's own checkers (`envs/bfcl.py`).

Single-turn entries are asked for one message, whose calls are checked; multi-turn ones are played to their last user
turn; memory_kv's questions come after the ten conversations that are to be remembered, each of which begins with the
memory that the one before it left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from envace_jax.benchmarks import Case, Options, Outcome, Step, Suite, chosen_categories, subset
from envace_jax.benchmarks.scores import Attempt, category_figures
from envace_jax.config import UserError
from envace_jax.envs import bfcl, worker
from envace_jax.futures import done, then
from envace_jax.types import Json, Task, ToolCall, Trajectory

NON_LIVE = ("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance")
LIVE = (
    "live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance", "live_relevance",
)  # fmt: skip
MULTI_TURN = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
MEMORY = "memory_kv"
CATEGORIES = (*NON_LIVE, *LIVE, *MULTI_TURN, MEMORY)
# Of BFCL's categories those that cannot be run here, and why.
NOT_HERE = {
    "simple_java": "needs tree_sitter and its Java grammar",
    "simple_javascript": "needs tree_sitter and its JavaScript grammar",
    "web_search_base": "needs the internet and a search key",
    "web_search_no_snippet": "needs the internet and a search key",
    "memory_vector": "needs an embedding model from a hub",
    "memory_rec_sum": "not played here",
}
SMALL = {**dict.fromkeys(NON_LIVE + LIVE, 10), **dict.fromkeys(MULTI_TURN, 3), MEMORY: 5}  # cases of each
# BFCL fails whoever takes more than 20 messages with calls in a turn; a reply ends a turn, and 13 turns are the most.
STEPS = 13 * 22
# Group -> how its figure is made: "mean" of the parts' figures, or of all their cases ("pool").
GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "simple": ("mean", ("simple_python", "simple_java", "simple_javascript")),
    "non_live": ("mean", ("simple", "multiple", "parallel", "parallel_multiple")),
    "live": ("pool", ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")),
    "irrelevance_all": ("mean", ("irrelevance", "live_irrelevance")),
    "multi_turn": ("mean", MULTI_TURN),
    "web_search": ("mean", ("web_search_base", "web_search_no_snippet")),
    "memory": ("mean", ("memory_kv", "memory_vector", "memory_rec_sum")),
    "agentic": ("mean", ("web_search", "memory")),
}
WEIGHTS = {"non_live": 10, "live": 10, "irrelevance_all": 10, "multi_turn": 30, "agentic": 40}


def read(options: Options) -> Suite:
    """The cases of the categories asked for, by default all that can be run here."""
    missing = dict(NOT_HERE)
    cases: list[Case] = []
    asked = chosen_categories(options, CATEGORIES)
    for category in asked or CATEGORIES:
        try:
            cases += _memory_cases() if category == MEMORY else _cases(category)
        except ValueError as error:
            if asked or category != MEMORY or isinstance(error, worker.WorkerStartError):
                raise UserError(str(error)) from error
            missing[MEMORY] = str(error)
    missing |= {name: "not asked for" for name in CATEGORIES if asked and name not in asked}
    return Suite(bfcl.package(), subset(cases, options, SMALL), missing, steps=STEPS)


def _cases(category: str) -> list[Case]:
    single = category not in MULTI_TURN
    return [
        Case(task.task_id.removeprefix("bfcl:"), category, task, one_message=single) for task in bfcl.tasks(category)
    ]


def _memory_cases() -> list[Case]:
    """Conversations to be remembered, in a chain for each scenario, then the questions on it."""
    cases, last = [], dict[str, str]()
    for task in bfcl.tasks(MEMORY):
        name, scenario = task.task_id.removeprefix("bfcl:"), _state(task)["scenario"]
        cases.append(Case(name, MEMORY, task, scored="prereq" not in name, after=last.get(scenario, "")))
        if "prereq" in name:
            last[scenario] = name
    return sorted(cases, key=lambda case: case.scored)  # a scenario's questions all come after its last conversation


def begin(case: Case, carried: Json) -> Future[Task]:
    """The task with the memory that the case before it left, and the system message that tells of it."""
    if case.category != MEMORY:
        return done(case.task)
    task = bfcl.with_memory(case.task, carried)

    def told(found: Json) -> Task:
        rest = [message["content"] for message in task.messages if message["role"] == "system"]
        text = "\n\n".join([found["text"], *rest])
        others = tuple(message for message in task.messages if message["role"] != "system")
        return dataclasses.replace(task, messages=({"role": "system", "content": text}, *others))

    return then(bfcl.memory(task), told)


def outcome(case: Case, trajectory: Trajectory, state: Json) -> Future[Outcome]:
    """BFCL's verdict. As in BFCL a message without a call that can be read is one without calls."""
    task = case.task
    if not case.scored:
        return then(bfcl.memory(task, trajectory.messages), lambda found: Outcome(None, None, found["state"]))
    if not case.one_message and trajectory.reason != "done":
        return done(Outcome(0.0, {"error_type": f"ended: {trajectory.reason}"}))
    return then(
        bfcl.verdict(task, trajectory.messages),
        lambda found: Outcome(float(found["valid"]), {"error_type": found["error_type"]}),
    )


def gold(case: Case) -> list[Step] | None:
    """The gold calls of every turn in one message each, then a reply; a memory's answers are given without it."""
    if case.category == MEMORY:
        answers = _state(case.task)["ground_truth"]
        return [str(answers[0])] if case.scored else ["Noted."] * len(case.task.user_turns)
    if case.one_message:
        return [_single_turn_answer(case)]
    calls = [call for call, _ in case.task.reference]
    steps: list[Step] = []
    for turn in case.task.checklist:
        count = sum((item.check or {}).get("kind") == "call" for item in turn)
        if count:
            steps.append(tuple(calls[:count]))
            calls = calls[count:]
        steps.append("Done.")
    return steps


def _single_turn_answer(case: Case) -> Step:
    """A message that the entry's answer accepts."""
    if "irrelevance" in case.category:
        return "None of these tools can do that."
    answers = _state(case.task)["ground_truth"]
    if answers is None:  # relevance: any call will do
        return (ToolCall(case.task.tools[0]["function"]["name"], {}),)
    required = {
        tool["function"]["name"]: tool["function"]["parameters"].get("required", ()) for tool in case.task.tools
    }
    calls = [(name.replace(".", "_"), given) for answer in answers for name, given in answer.items()]
    return tuple(ToolCall(name, _accepted(given, required.get(name, ()))) for name, given in calls)


def _accepted(arguments: Mapping[str, Any], required: Collection[str] = ()) -> dict[str, Json]:
    """The first value accepted for each argument. Those that an answer may be without are left out, unless the schema
    requires them: a few entries do both."""
    given = {name: options for name, options in arguments.items() if "" not in options or name in required}
    return {name: _first(next((option for option in options if option != ""), "")) for name, options in given.items()}


def _first(value: Any) -> Json:
    """A value of an answer: members of objects have lists of what is accepted, also inside lists."""
    if isinstance(value, Mapping):
        return _accepted(value) if all(isinstance(options, list) for options in value.values()) else dict(value)
    return [_first(item) for item in value] if isinstance(value, list) else value


def summary(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """BFCL's groups and its overall figure, in percent. A group with a part that did not run is missing, and its
    figure over the others stands apart as `partial`; BFCL itself counts what is missing as 0."""
    figures: dict[str, float | None] = {}
    counts: dict[str, int] = {}
    for category in dict.fromkeys(attempt.category for attempt in attempts):
        found = category_figures([attempt for attempt in attempts if attempt.category == category], 1)
        figures[category], counts[category] = found["score"], found["cases_scored"]
    groups: dict[str, Any] = {}
    partial = dict(figures)
    for name, (kind, parts) in GROUPS.items():
        there = [part for part in parts if partial.get(part) is not None]
        weights = [counts.get(part, 1) if kind == "pool" else 1 for part in there]
        value = _weighted([partial[part] for part in there], weights)
        partial[name] = value
        lacking = [part for part in parts if figures.get(part) is None]
        figures[name] = None if lacking else value
        groups[name] = {"score": figures[name], "partial": value, "missing": lacking}
    lacking = [name for name in WEIGHTS if figures.get(name) is None]
    there = [name for name in WEIGHTS if partial.get(name) is not None]
    as_bfcl = sum(WEIGHTS[name] * (partial.get(name) or 0.0) for name in WEIGHTS) / sum(WEIGHTS.values())
    groups["overall"] = {
        "score": None if lacking else as_bfcl,
        "partial": _weighted([partial[name] for name in there], [WEIGHTS[name] for name in there]),
        "missing": lacking,
    }
    return {"groups": groups}


def _weighted(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    total = sum(weights)
    return (
        sum(weight * (value or 0.0) for value, weight in zip(values, weights, strict=True)) / total if total else None
    )


def _state(task: Task) -> Mapping[str, Json]:
    assert task.environment is not None
    return task.environment["state"]
