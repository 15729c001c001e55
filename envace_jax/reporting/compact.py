"""A trajectory's record as the viewer gets it: small, and with what takes a look at the whole already worked out.

Which segment wrote which message, which recorded result belongs to a rehearsed one, and whether the two agree are found
here. Knows the record's fields (`metrics.trajectory_record`), old and new; no files, and nothing of how it is shown.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from envace_jax.json_values import check_depth, json_equal
from envace_jax.types import Json

_SURROGATE = re.compile("[\ud800-\udfff]")
TASK_FIELDS = ("user_turns", "checklist", "reference")
# What reading a record raises that no run wrote.
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError)


@dataclasses.dataclass(frozen=True)
class Compact:
    """A trajectory for the viewer.

    `row` is what lists, filters and orders need: step, task (its place in `Tables.tasks`), group (None in old files),
    attempt, reward (None where masked), failed, reason, compared and differing (rehearsed results with a recorded one,
    and how many of them differ from it), trained ("all", "none", "some", or None where the file does not say), and the
    tokens of each role. `body` is the JSON text of all the rest, read only when the trajectory is shown.
    """

    row: Mapping[str, Json]
    body: str


class Tables:
    """What many trajectories have in common, each once: tasks, and messages that the policy did not write."""

    def __init__(self) -> None:
        self.tasks: list[Json] = []
        self.messages: list[Json] = []
        self._places: dict[str, int] = {}  # by the text of what is kept

    def task(self, value: Json) -> int:
        return self._place(self.tasks, "task ", value)

    def message(self, value: Json) -> int:
        return self._place(self.messages, "message ", value)

    def sizes(self) -> tuple[int, int]:
        """To be given to `cut`, for what is added from here on."""
        return len(self.tasks), len(self.messages)

    def cut(self, sizes: tuple[int, int]) -> None:
        """Forgets what was added since."""
        del self.tasks[sizes[0] :], self.messages[sizes[1] :]
        self._places = {
            text: place
            for text, place in self._places.items()
            if place < (sizes[0] if text.startswith("task ") else sizes[1])
        }

    def _place(self, values: list[Json], kind: str, value: Json) -> int:
        text = kind + json_text(value)
        if text not in self._places:
            self._places[text] = len(values)
            values.append(value)
        return self._places[text]


def json_text(value: Json) -> str:
    """The shortest JSON text of a value; halves of surrogate pairs, which no UTF-8 can hold, become U+FFFD."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if _SURROGATE.search(text):
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def compact(record: Mapping[str, Any], tables: Tables) -> Compact:
    """The trajectory of one record. Raises one of `UNREADABLE` for what is none."""
    check_depth(record)
    messages, segments = list(record["messages"]), list(record["segments"])
    given = record.get("task") or {}
    known = {name: given[name] for name in TASK_FIELDS if name in given}
    reference = known.get("reference") or ()
    steps = align(messages, segments)
    compared = differing = 0
    calls: list[tuple[str, Json]] = []
    recorded = _Recorded(reference)
    for step, message in zip(steps, messages, strict=True):
        if message["role"] == "assistant":
            calls = list(_calls(message))
        elif message["role"] == "tool" and "call" in step and step["call"] < len(calls):
            place = recorded.place(*calls[step["call"]])
            if place is not None and message.get("rehearsed") is True:
                step["reference"] = place
                step["differs"] = not same_result(message.get("content") or "", recorded.result(place))
                compared, differing = compared + 1, differing + step["differs"]
        # Only what the policy, or whoever answers it, wrote differs from attempt to attempt.
        shared = message["role"] in ("system", "user")
        step["message"] = tables.message(message) if shared else _message(message)
    if "reference" in known:
        known["reference"] = [[call["name"], json_text(call["arguments"]), result] for call, result in reference]
    body = {
        "steps": steps,
        "turns": list(record.get("turns") or ()),
        "segments": [_segment(segment) for segment in segments],
    }
    row = {
        "step": int(record["step"]),
        "task": tables.task({"task_id": str(record["task_id"]), **known}),
        "group": _group(record),
        "attempt": int(record["attempt"]),
        "reward": None if record.get("reward") is None else round(float(record["reward"]), 4),
        "failed": record["status"] != "ok",
        "reason": str(record["reason"]),
        "compared": compared,
        "differing": differing,
        "trained": _trained(segments),
        "act_tokens": _tokens(segments, "act"),
        "rehearse_tokens": _tokens(segments, "rehearse"),
    }
    return Compact(row, json_text(body))


def _group(record: Mapping[str, Any]) -> int | None:
    group = record.get("group_id")
    if group is not None and type(group) is not int:
        raise TypeError(f"group_id is {group!r:.40}, not a whole number")
    return group


def align(messages: Sequence[Mapping[str, Any]], segments: Sequence[Mapping[str, Any]]) -> list[dict[str, Json]]:
    """For each message {"segment": which segment wrote it, "call": which call of the message before it answers}.

    Either is missing where there is none: user messages, what a task's messages held before the first segment, and
    results from outside. Segments that no message came of (a rehearsal that was cut short) stay unnamed.
    """
    acts = [place for place, segment in enumerate(segments) if segment["role"] == "act"]
    rehearsals = iter([place for place, segment in enumerate(segments) if segment["role"] == "rehearse"])
    spoken = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    # Every ACT segment became a message, and what was given stands before them.
    writers = dict(zip(reversed(spoken), reversed(acts), strict=False))
    steps: list[dict[str, Json]] = []
    answered = 0
    for place, message in enumerate(messages):
        step: dict[str, Json] = {}
        if message["role"] == "assistant":
            answered = 0
            if place in writers:
                step["segment"] = writers[place]
        elif message["role"] == "tool":
            step["call"] = answered
            answered += 1
            writer = next(rehearsals, None) if message.get("rehearsed") is True else None
            if writer is not None:
                step["segment"] = writer
        steps.append(step)
    return steps


def same_result(rehearsed: str, recorded: str) -> bool:
    """Whether two results are equal as JSON, or as texts where one is none."""
    try:
        return json_equal(json.loads(rehearsed), json.loads(recorded))
    except (ValueError, RecursionError):
        return rehearsed == recorded


class _Recorded:
    """Which reference result answers a call: of equal calls the first the first, and the last all that are left."""

    def __init__(self, reference: Sequence[Any]) -> None:
        self._reference = reference
        self._used: set[int] = set()

    def place(self, name: str, arguments: Json) -> int | None:
        found = [
            place
            for place, (call, _) in enumerate(self._reference)
            if call["name"] == name and json_equal(call["arguments"], arguments)
        ]
        chosen = next((place for place in found if place not in self._used), found[-1] if found else None)
        if chosen is not None:
            self._used.add(chosen)
        return chosen

    def result(self, place: int) -> str:
        return str(self._reference[place][1])


def _calls(message: Mapping[str, Any]) -> list[tuple[str, Json]]:
    calls = []
    for entry in message.get("tool_calls") or ():
        function = entry.get("function", entry)
        arguments = function["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                pass  # compared as the text that it is
        calls.append((function["name"], arguments))
    return calls


def _message(message: Mapping[str, Any]) -> dict[str, Json]:
    """The message with "calls", (name, JSON text of the arguments) each, in place of "tool_calls". As a text arguments
    keep numbers that a browser's own are too short for."""
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = [(name, value if isinstance(value, str) else json_text(value)) for name, value in _calls(message)]
    return kept | {"calls": calls} if calls else kept


def _segment(segment: Mapping[str, Any]) -> dict[str, Json]:
    """Log-probabilities as whole hundredths; the text of all tokens at once, and the length of each in UTF-16 units,
    as a browser counts. Without the tokens' texts their ids take the place."""
    kept = {
        name: segment[name]
        for name in ("role", "turn", "finish_reason", "policy_version", "prompt_length", "advantage", "trained")
        if name in segment
    }
    if kept.get("advantage") is not None:
        kept["advantage"] = round(float(kept["advantage"]), 4)
    pieces = segment.get("pieces")
    if pieces is not None:
        kept["text"] = "".join(pieces)
        kept["lengths"] = [len(piece.encode("utf-16-le", "surrogatepass")) // 2 for piece in pieces]
    else:
        kept["tokens"] = list(segment["tokens"])
    kept["logprobs"] = [None if value is None else round(100 * value) for value in segment.get("logprobs") or ()]
    return kept


def _trained(segments: Sequence[Mapping[str, Any]]) -> str | None:
    told = {segment.get("trained") for segment in segments}
    if not told or None in told:
        return None
    return "some" if len(told) == 2 else "all" if told == {True} else "none"


def _tokens(segments: Sequence[Mapping[str, Any]], role: str) -> int:
    return sum(len(segment["tokens"]) for segment in segments if segment["role"] == role)
