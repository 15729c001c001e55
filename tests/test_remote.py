"""A policy behind an address has the conversations that one in this process has: ends, faults, seeds, thoughts."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future

import benchmark_helpers as bank
import pytest
import scripted
from test_benchmarks import CHAT, asked_at, bank_environment, measured, numbered, records, wire_answer  # noqa: F401

from envace_jax.benchmarks import policies, remote
from envace_jax.episode import Limits
from envace_jax.types import ToolCall

ANN = ToolCall("balance", {"owner": "ann"})
WRITTEN = scripted.calling(ANN)


class Talker(policies.Curt):
    """A simulated user that says `words` in order, then None; `trials` are the seeds that it was asked to play for."""

    def __init__(self, *words):
        super().__init__()
        self.words, self.trials = words, []

    def of_trial(self, seed):
        self.trials.append(seed)
        return self

    def answer(self, task, messages):
        said = sum(message["role"] == "user" for message in messages)
        future: Future = Future()
        future.set_result(self.words[said] if said < len(self.words) else None)
        return future


def both(tmp_path, given, script, *, limits=None, user=None, **changes):
    """The records of the same script in this process and behind an address."""
    given = [numbered(case) for case in given]
    bounds = limits or {}
    local = policies.scripted("x", given, script, CHAT)[0]
    local = dataclasses.replace(local, limits=dataclasses.replace(local.limits, **bounds), user=user)
    measured(tmp_path / "here", given=given, policy=local, **changes)
    by_number = {case.case_id: case for case in given}
    with bank.ChatServer(wire_answer(lambda number: script(by_number[number]))).running() as url:
        policy = dataclasses.replace(asked_at(url), limits=Limits(**bounds), user=user)
        measured(tmp_path / "there", given=given, policy=policy, **changes)
    return records(tmp_path / "here"), records(tmp_path / "there")


def simulated(case):
    task = dataclasses.replace(case.task, user_turns=("",), scenario="You want money.")
    return dataclasses.replace(case, task=task)


@pytest.mark.parametrize(
    ("steps", "turns", "changes", "reason"),
    [
        ([(ANN,), "done"], 2, {}, "done"),
        ([(ToolCall("nowhere", {}),), "done"], 1, {}, "tool_error"),
        ([(ANN, ToolCall("nowhere", {})), "done"], 1, {}, "tool_error"),
        ([(ToolCall("vague", {}),), "done"], 1, {}, "fault: ValueError: a JSON str; a tool result is an object"),
        ([(ToolCall("broken", {}),), "done"], 1, {}, "fault: ConnectionError: the bank is on fire"),
        (['Well.\n<tool_call>\n{"name": "balance"'], 1, {}, "malformed_call"),
        ([f"Well.\n{WRITTEN}", "done"], 1, {}, "done"),  # a server that does not look for calls
        ([(ANN,) * 3, "done"], 1, {"limits": {"parallel_calls": 2}}, "too_many_calls"),
        ([(ANN,) * 2, "done"], 1, {"limits": {"parallel_calls": 2}}, "done"),
        (["one", "two"], 3, {"limits": {"user_turns": 2}}, "user_limit"),
        (["one"], 2, {"reward": scripted.Judge(0.5, proceed=False)}, "required_item"),
        (["one"], 1, {"reward": scripted.Judge(0.5, proceed=False)}, "done"),
        ([(ANN,), "one", "two"], 1, {"user": Talker("hi", "and?")}, "done"),
        (["one", "two"], 1, {"user": Talker("hi", "and?", "and?"), "limits": {"user_turns": 2}}, "user_limit"),
        (["one"], 1, {"user": Talker("hi", " ")}, "fault: ValueError: the simulated user's message is empty"),
        (["one"], 1, {"user": Talker()}, "fault: ValueError: the simulated user ended the conversation before"),
        ([(ANN,)], 1, {"steps": 2}, "assistant_limit"),
    ],
)  # fmt: skip
def test_conversations_end_behind_an_address_as_in_this_process(tmp_path, steps, turns, changes, reason):
    given = bank.cases(1, turns=turns)
    given = [simulated(case) for case in given] if "user" in changes else given
    (here,), (there,) = both(tmp_path, given, lambda case: steps, **changes)
    assert here["reason"].startswith(reason) and here["reason"] == there["reason"]
    assert (here["status"], here["score"]) == (there["status"], there["score"])
    ours, theirs = here["trajectory"], there["trajectory"]
    assert ours["messages"] == theirs["messages"] and ours["reward"] == theirs["reward"]


@pytest.mark.parametrize("status", ["400", "413"])
def test_a_conversation_that_outgrows_the_servers_context_ends_by_its_length(tmp_path, status):
    given = [numbered(case) for case in bank.cases(3)]

    def fault(number, body):
        first = len(body["messages"]) == 2
        if "c2" in body["messages"][0]["content"]:
            return None if first else "status 401"  # which says nothing of lengths
        return f"status {status}" if first == ("c1" in body["messages"][0]["content"]) else None

    server = bank.ChatServer(wire_answer(lambda number: [(ANN,), "done"]), fault)
    with server.running() as url:
        found = measured(tmp_path, given=given, policy=asked_at(url))
    assert [attempt.masked for attempt in found] == [False, True, True]
    assert records(tmp_path)[0]["reason"] == "length" and records(tmp_path)[0]["trajectory"]["reward"] == 0.0
    assert f"HTTP status {status}" in records(tmp_path)[1]["reason"]


def test_a_message_that_was_cut_ends_by_its_length_whatever_is_wrong_with_its_call(tmp_path):
    calls = [{"id": "x", "type": "function", "function": {"name": "deposit", "arguments": "{no"}}]
    told = {"message": {"role": "assistant", "content": "", "tool_calls": calls}, "finish_reason": "length"}
    with bank.ChatServer(lambda body: told).running() as url:
        measured(tmp_path, given=[numbered(case) for case in bank.cases(1)], policy=asked_at(url))
    assert records(tmp_path)[0]["reason"] == "length"


def test_thoughts_are_sent_back(tmp_path):
    def answer(body):
        return {"message": {"role": "assistant", "content": "so", "reasoning_content": f"hm {len(body['messages'])}"}}

    server = bank.ChatServer(answer)
    with server.running() as url:
        measured(tmp_path, given=[numbered(case) for case in bank.cases(1, turns=3)], policy=asked_at(url))
    thoughts = [
        [message.get("reasoning_content") for message in body["messages"] if message["role"] == "assistant"]
        for body in server.bodies
    ]
    assert thoughts == [[], ["hm 2"], ["hm 2", "hm 4"]]


def seeds(tmp_path, rehearsal=None, seed=3):
    """The seeds of requests, by case and number of messages before."""
    given = [numbered(case) for case in bank.cases(3, turns=2)]
    server = bank.ChatServer(wire_answer(lambda number: [(ANN,), "done"]))
    with server.running() as url:
        policy = asked_at(url)
        request = {**policy.request, **({"rehearsal": rehearsal} if rehearsal else {})}
        measured(tmp_path, given=given, policy=dataclasses.replace(policy, request=request), seed=seed)
    return {
        (body["messages"][0]["content"], sum(message["role"] == "assistant" for message in body["messages"])): body[
            "seed"
        ]
        for body in server.bodies
    }


def test_every_message_of_every_task_has_a_seed_of_its_own(tmp_path):
    """A server may draw by the seed alone."""
    found = seeds(tmp_path / "one")
    assert len(found) == len(set(found.values())) == 9 and all(0 <= value < 2**31 for value in found.values())
    assert found == seeds(tmp_path / "two") and not set(found.values()) & set(
        seeds(tmp_path / "three", seed=4).values()
    )
    assert remote.seed_of(3, "bank0", 0) == 316871234  # in every process


def test_with_rehearsal_a_turn_has_one_seed_by_which_a_server_finds_its_memory(tmp_path):
    found = seeds(tmp_path, {"mode": "parallel", "n": 2})
    by_case = {}
    for (case, place), value in found.items():
        by_case.setdefault(case, {})[place] = value
    assert all(turn[0] == turn[1] != turn[2] for turn in by_case.values())
    assert len(set(found.values())) == 6


class Faulty(scripted.Bank):
    """Does not open, or does not say its state, where its spec says so."""

    def __init__(self, spec):
        if "closed" in spec["state"]:
            raise OSError("closed today")
        super().__init__(spec)

    def state(self):
        if "mute" in self.balances:
            raise OSError("no statement")
        return super().state()


@pytest.mark.parametrize("steps", [["nothing"], [(ANN,), "done"]])
@pytest.mark.parametrize("what", ["closed", "mute"])
def test_an_environment_that_fails_when_it_opens_or_ends_masks_its_conversation_alone(
    tmp_path, monkeypatch, steps, what
):
    monkeypatch.setattr(policies, "make_environment", Faulty)
    monkeypatch.setattr(remote, "benign_environment", Faulty)
    given = list(bank.cases(3, turns=1))
    broken = {"name": "bank", "state": {what: 1, "ann": 5}}
    given[1] = dataclasses.replace(given[1], task=dataclasses.replace(given[1].task, environment=broken))
    for found in both(tmp_path, given, lambda case: steps):
        assert [record["status"] for record in found] == ["ok", "failed", "ok"]
        assert found[1]["reason"].startswith("fault: OSError") and found[1]["score"] is None
        assert found[0]["detail"]["state"] == {"ann": 5}


def test_a_user_plays_every_trial_by_itself(tmp_path):
    """Here and behind an address; `test_users.py` says what that means of what is kept."""
    user = Talker("hi")
    both(
        tmp_path, [simulated(case) for case in bank.cases(2, turns=1)], lambda case: ["so"], user=user, trials=2, seed=8
    )
    assert user.trials == [8, 9, 8, 9]
