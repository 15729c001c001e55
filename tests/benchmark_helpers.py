"""A small benchmark of bank conversations, and a server that answers with whole messages, for tests of evaluations."""

from __future__ import annotations

import dataclasses
import json
import types
from concurrent.futures import Future

import scripted
from endpoint_server import FaultyServer

from envace_jax.benchmarks import Case, Outcome, Suite
from envace_jax.types import ToolCall


def cases(count: int = 6, turns: int = 2, **changes) -> tuple[Case, ...]:
    """Cases whose gold solution deposits their number, in categories "even" and "odd"."""
    return tuple(
        Case(f"c{number}", ("even", "odd")[number % 2], scripted.task(turns, f"bank{number}"), **changes)
        for number in range(count)
    )


def gold(case):
    turns = len(case.task.user_turns)
    return [(ToolCall("deposit", {"owner": "ann", "amount": case.case_id[1:]}),), *["done"] * turns]


def suite(given=None, **changes) -> Suite:
    return Suite("bank 1.0", cases() if given is None else tuple(given), {}, **changes)


def deposited(trajectory) -> int:
    """What the conversation's calls put into the bank."""
    found = 0
    for message in trajectory.messages:
        for call in message.get("tool_calls") or ():
            if call["function"]["name"] == "deposit":
                found += int(call["function"]["arguments"]["amount"])
    return found


def module(**changes):
    """A benchmark that is content with the right sum; `asked` are the cases that it was asked about."""
    asked = []

    def outcome(case, trajectory, state):
        asked.append(case.case_id)
        future: Future = Future()
        future.set_result(Outcome(float(deposited(trajectory) == int(case.case_id[1:])), {"state": state}))
        return future

    found = {
        "CATEGORIES": ("even", "odd"), "read": lambda options: suite(), "outcome": outcome, "gold": gold,
        "summary": lambda attempts: {}, "asked": asked,
    }  # fmt: skip
    return types.SimpleNamespace(**{**found, **changes})


def without_environment(case: Case) -> Case:
    return dataclasses.replace(case, task=dataclasses.replace(case.task, environment=None))


class ChatServer(FaultyServer):
    """As FaultyServer, where `answer(body)` gives the choice: {"message": ..., "finish_reason": ...}."""

    def reply(self, request, body, fault):
        status = int(fault.split()[1]) if fault and fault.startswith("status") else 200
        choice = {"finish_reason": "stop", **self.answer(body)}
        data = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)
