"""Playing a suite: what a killed run does again, faults that are no scores, chains of cases, and figures by hand."""

from __future__ import annotations

import json
import types
from concurrent.futures import Future

import benchmark_helpers as bank
import numpy as np
import pytest
import scripted

from envace_jax import benchmarks
from envace_jax.benchmarks import Case, Options, Outcome, policies, remote, runner, scores, table
from envace_jax.benchmarks.scores import Attempt
from envace_jax.config import UserError
from envace_jax.endpoint import Endpoint, EndpointSettings
from envace_jax.rehearsal import Memory, Settings
from envace_jax.types import ToolCall

CHAT = scripted.tiny_chat()


@pytest.fixture(autouse=True)
def bank_environment(monkeypatch):
    monkeypatch.setattr(policies, "make_environment", scripted.Bank)
    monkeypatch.setattr(policies, "load_process", lambda name: None)
    monkeypatch.setattr(remote, "benign_environment", scripted.Bank)


def measured(folder, module=None, given=None, script=bank.gold, trials=1, policy=None, seed=0, **changes):
    """The attempts at a suite by a script, kept in `folder`."""
    suite = bank.suite(given, **changes)
    store = runner.Store(folder / "t.jsonl")
    try:
        chosen = policy or policies.scripted("x", suite.cases, script, CHAT)[0]
        return runner.measure(module or bank.module(), suite, chosen, store, trials=trials, seed=seed)
    finally:
        store.close()


def records(folder):
    lines = [json.loads(line) for line in (folder / "t.jsonl").read_text().splitlines()]
    return sorted(lines, key=lambda record: (record["case"], record["trial"]))


# --- scripts ---


def test_a_script_plays_gold_and_garbage_through_the_same_rollout(tmp_path):
    good = measured(tmp_path / "good")
    bad = measured(tmp_path / "bad", script=policies.garbage)
    assert [attempt.score for attempt in good] == [1.0] * 6 and not any(attempt.masked for attempt in good)
    assert [attempt.score for attempt in bad] == [1.0] + [0.0] * 5  # the first case's gold is to deposit nothing
    kept = records(tmp_path / "good")[3]
    said = [message["role"] for message in kept["trajectory"]["messages"]]
    assert said == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert kept["detail"] == {"state": {"ann": 5 + 3}}  # the environment was executed for real
    assert kept["tokens"] == sum(len(segment["tokens"]) for segment in kept["trajectory"]["segments"]) > 0


def test_cases_asked_for_one_message_end_after_it_and_execute_nothing(tmp_path):
    given = [bank.without_environment(case) for case in bank.cases(2, one_message=True)]
    assert [attempt.score for attempt in measured(tmp_path, given=given)] == [1.0, 1.0]
    assert [record["reason"] for record in records(tmp_path)] == ["assistant_limit"] * 2
    assert all(len(record["trajectory"]["segments"]) == 1 for record in records(tmp_path))


def test_the_limit_of_messages_is_the_suites(tmp_path):
    measured(tmp_path, steps=2)
    assert {record["reason"] for record in records(tmp_path)} == {"assistant_limit"}


def test_every_trial_is_played_with_a_seed_of_its_own(tmp_path):
    seeds = []
    whole = policies.scripted("x", bank.suite().cases, bank.gold, CHAT)[0]
    policy = types.SimpleNamespace(play=lambda cases, **told: (seeds.append(told["seed"]), whole.play(cases, **told)))
    measured(tmp_path, policy=policy, trials=3, seed=40)
    assert seeds == [40, 41, 42] and {record["seed"] for record in records(tmp_path)} == {40, 41, 42}


def test_cases_that_begin_alike_are_played_one_after_another(tmp_path):
    def told(case, system):
        message = {"role": "system", "content": system}
        return policies.dataclasses.replace(case, task=policies.dataclasses.replace(case.task, messages=(message,)))

    given = [told(case, "AB"[number % 2]) for number, case in enumerate(bank.cases(6))]
    order = []
    whole = policies.scripted("x", given, bank.gold, CHAT)[0]
    policy = types.SimpleNamespace(
        play=lambda cases, **more: (order.extend(case.case_id for case in cases), whole.play(cases, **more))
    )
    found = measured(tmp_path, given=given, policy=policy)
    assert order == ["c0", "c2", "c4", "c1", "c3", "c5"]
    assert [attempt.case_id for attempt in found] == [f"c{number}" for number in range(6)]


# --- going on ---


class Killed(BaseException):
    pass


def killed_after(count):
    """A policy that is killed once so many conversations are over."""
    suite, left = bank.suite(), [count]
    whole = policies.scripted("x", suite.cases, bank.gold, CHAT)[0]

    def play(cases, *, on_end, **options):
        def ended(*told):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            on_end(*told)

        whole.play(cases, on_end=ended, **options)

    return types.SimpleNamespace(about=whole.about, play=play)


@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_a_killed_run_goes_on_and_ends_as_an_unbroken_one(tmp_path, count):
    unbroken = measured(tmp_path / "one", trials=2)
    with pytest.raises(Killed):
        measured(tmp_path / "two", trials=2, policy=killed_after(count))
    path = tmp_path / "two" / "t.jsonl"
    done = len(path.read_text().splitlines())
    assert done == count
    with path.open("a") as file:  # the kill came while a line was written
        file.write('{"case": "c1", "tri')
    module = bank.module()
    assert measured(tmp_path / "two", module, trials=2) == unbroken
    assert len(module.asked) == 12 - count  # what was done is not played again
    assert records(tmp_path / "two") == records(tmp_path / "one")


def test_faults_are_recorded_never_scored_and_tried_again(tmp_path):
    broken = {"c1", "c4"}

    def outcome(case, trajectory, state):
        if case.case_id == "c4" and "c4" in broken:
            raise ConnectionError("the checker\nis gone")
        future: Future = Future()
        if case.case_id in broken:
            future.set_exception(TimeoutError("no verdict"))
        else:
            future.set_result(Outcome(1.0))
        return future

    first = measured(tmp_path, bank.module(outcome=outcome))
    assert [attempt.score for attempt in first] == [1.0, None, 1.0, 1.0, None, 1.0]
    assert [attempt.masked for attempt in first] == [False, True, False, False, True, False]
    reasons = {record["case"]: record["reason"] for record in records(tmp_path) if record["status"] == "failed"}
    assert reasons == {"c1": "fault: TimeoutError: no verdict", "c4": "fault: ConnectionError: the checker is gone"}
    figures = scores.category_figures([attempt for attempt in first if attempt.category == "odd"], 1)
    assert (figures["score"], figures["masked"], figures["cases"], figures["cases_scored"]) == (100.0, 1, 3, 2)
    broken.clear()
    module = bank.module(outcome=outcome)
    again = measured(tmp_path, module)
    assert [attempt.score for attempt in again] == [1.0] * 6 and len(records(tmp_path)) == 8


def test_an_environment_that_fails_masks_its_conversation_alone(tmp_path):
    def script(case):
        return [(ToolCall("broken", {}),), "done"] if case.case_id == "c2" else bank.gold(case)

    found = measured(tmp_path, script=script)
    assert [attempt.score for attempt in found] == [1.0, 1.0, None, 1.0, 1.0, 1.0]


def chain(count=4, other=()):
    """Cases that each begin with what the one before left, then `other`."""
    linked = bank.cases(count, turns=1)
    return [
        Case(
            case.case_id, case.category, case.task, scored=number == count - 1, after=f"c{number - 1}" if number else ""
        )
        for number, case in enumerate(linked)
    ] + list(other)


def chained(failing=()):
    """A benchmark whose cases are told what was left, a text, and leave it longer."""
    heard = {}

    def begin(case, carried):
        heard[case.case_id] = carried
        future: Future = Future()
        future.set_result(case.task)
        return future

    def outcome(case, trajectory, state):
        future: Future = Future()
        if case.case_id in failing:
            future.set_exception(TimeoutError("gone"))
        else:
            future.set_result(Outcome(1.0 if case.scored else None, None, (heard[case.case_id] or "") + case.case_id))
        return future

    return bank.module(outcome=outcome, begin=begin), heard


def test_cases_begin_with_what_the_one_before_left_also_after_a_kill(tmp_path):
    module, heard = chained()
    attempts = measured(tmp_path, module, chain())
    assert heard == {"c0": None, "c1": "c0", "c2": "c0c1", "c3": "c0c1c2"}
    assert [(attempt.case_id, attempt.score) for attempt in attempts] == [("c3", 1.0)]
    lines = (tmp_path / "t.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "t.jsonl").write_text("".join(lines[:2]))
    module, heard = chained()
    assert measured(tmp_path, module, chain()) == attempts and heard == {"c2": "c0c1", "c3": "c0c1c2"}


def test_what_comes_after_a_failed_case_is_masked_and_nothing_else(tmp_path):
    module, heard = chained(failing={"c1"})
    other = bank.cases(6, turns=1)[5]
    attempts = measured(tmp_path, module, chain(other=[other]))
    assert [(attempt.case_id, attempt.score, attempt.masked) for attempt in attempts] == [
        ("c3", None, True), ("c5", 1.0, False),
    ]  # fmt: skip
    assert "c2" not in heard and records(tmp_path)[2]["reason"] == runner.BEFORE_FAILED


def test_a_task_that_cannot_begin_is_masked_alone(tmp_path):
    def begin(case, carried):
        future: Future = Future()
        if case.case_id == "c1":
            future.set_exception(TimeoutError("gone"))
        else:
            future.set_result(case.task)
        return future

    attempts = measured(tmp_path, bank.module(begin=begin))
    assert [attempt.masked for attempt in attempts] == [False, True, False, False, False, False]
    assert records(tmp_path)[1]["reason"] == "fault: TimeoutError: gone"


def test_it_is_said_how_conversations_ended_that_others_rest_on(tmp_path):
    given = chain()
    calling = (ToolCall("nowhere", {}),)
    module, heard = chained()
    attempts = measured(tmp_path, module, given, lambda case: [calling] if case.case_id == "c1" else ["done"])
    store = runner.Store(tmp_path / "t.jsonl")
    found = runner.figures(module, attempts, store, 1)
    store.close()
    assert heard["c2"] == "c0c1"  # it counts, as far as it came
    assert found["unscored_ended"] == {"done": 2, "tool_error": 1} and found["ended"] == {"done": 1}
    told = "\n".join(table.lines({"benchmark": "x", "results": found}))
    assert "conversations that questions rest on ended: done 2, tool_error 1" in told


# --- rehearsal ---


@pytest.fixture
def rehearsals(monkeypatch):
    """In place of rehearsals: each group of tasks that was to be rehearsed, by id and user turns."""
    groups = []

    def rehearse(player, tasks, settings, **_):
        assert settings == "settings"
        groups.append([(task.task_id, task.user_turns) for task in tasks])
        counts = {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 1}
        return [types.SimpleNamespace(text=f"about {task.task_id}", **counts) for task in tasks]

    def with_memory(task, text, settings):
        assert text == f"about {task.task_id}"
        return policies.dataclasses.replace(task, tools=(*task.tools, scripted.tool("remembered")))

    monkeypatch.setattr(policies, "rehearse", rehearse)
    monkeypatch.setattr(policies, "with_memory", with_memory)
    return groups


def test_with_rehearsal_tasks_are_rehearsed_first_and_played_with_the_memory(tmp_path, rehearsals, monkeypatch):
    monkeypatch.setattr(policies.Script, "slots", 1)  # four cases at a time
    shown = []
    written = policies.Script._written
    monkeypatch.setattr(
        policies.Script, "_written", lambda self, r: (shown.append(CHAT.decode(r.prompt_tokens)), written(self, r))[1]
    )
    policy = policies.scripted("x", bank.suite().cases, bank.gold, CHAT)[0]
    policy = policies.dataclasses.replace(policy, rehearsal="settings")
    assert all(attempt.score == 1.0 for attempt in measured(tmp_path, policy=policy))
    assert [[name for name, _ in group] for group in rehearsals] == [
        ["bank0", "bank1", "bank2", "bank3"],
        ["bank4", "bank5"],
    ]
    assert shown and all("remembered" in prompt for prompt in shown)
    told = {"memory": "about bank0", "prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 1}
    assert records(tmp_path)[0]["rehearsed"] == told


def test_rehearsals_that_left_no_memory_are_counted(tmp_path, monkeypatch):
    def rehearse(player, tasks, settings, **_):
        return [Memory("" if task.task_id in ("bank1", "bank4") else "look first") for task in tasks]

    monkeypatch.setattr(policies, "rehearse", rehearse)
    policy = policies.scripted("x", bank.suite().cases, bank.gold, CHAT)[0]
    policy = policies.dataclasses.replace(policy, rehearsal=Settings())
    attempts = measured(tmp_path, policy=policy)
    store = runner.Store(tmp_path / "t.jsonl")
    found = runner.figures(bank.module(), attempts, store, 1)
    store.close()
    assert found["empty_memories"] == 2 and all(attempt.score == 1.0 for attempt in attempts)
    assert "2 rehearsals left no memory" in "\n".join(table.lines({"benchmark": "x", "results": found}))


def test_a_user_speaks_first_before_anything_is_rehearsed(tmp_path, rehearsals):
    """A task that a simulated user opens is rehearsed from what it said; one whose user fails is masked alone."""

    class User(policies.Curt):
        def answer(self, task, messages):
            if task.task_id == "bank1":
                future: Future = Future()
                future.set_exception(ConnectionError("nobody"))
                return future
            return super().answer(task, messages)

    given = [
        policies.dataclasses.replace(
            case, task=policies.dataclasses.replace(case.task, user_turns=("",), scenario="You want money.")
        )
        for case in bank.cases(3, turns=1)
    ]
    scripted_policy = policies.scripted("x", given, bank.gold, CHAT)[0]
    policy = policies.dataclasses.replace(scripted_policy, rehearsal="settings", user=User())
    found = measured(tmp_path, given=given, policy=policy)
    assert [(attempt.score, attempt.masked) for attempt in found] == [(1.0, False), (None, True), (1.0, False)]
    assert rehearsals == [[("bank0", ("Please help me.",)), ("bank2", ("Please help me.",))]]
    assert [record["rehearsed"] is None for record in records(tmp_path)] == [False, True, False]


# --- a policy behind an address ---


def wire_answer(script):
    """What a server answers that plays a script: the message after as many assistant messages as it is shown."""

    def answer(body):
        spoken = sum(message["role"] == "assistant" for message in body["messages"])
        number = next(m["content"] for m in body["messages"] if m["role"] == "system").split()[-1]
        steps = script(number)
        step = steps[min(spoken, len(steps) - 1)]
        if isinstance(step, str):
            return {"message": {"role": "assistant", "content": step}}
        calls = [
            {"id": "x", "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
            for call in step
        ]
        return {"message": {"role": "assistant", "content": None, "tool_calls": calls}}

    return answer


def numbered(case):
    """The case with its number in the system message, by which a server knows it."""
    system = {"role": "system", "content": f"You serve bank {case.case_id}"}
    return policies.dataclasses.replace(case, task=policies.dataclasses.replace(case.task, messages=(system,)))


def asked_at(url, **changes):
    settings = {"model": "m", "concurrency": 3, "retries": 0, "backoff_s": 0.0, "timeout_s": 20.0}
    return remote.Remote({}, Endpoint(EndpointSettings((url,), **settings)), request={"max_tokens": 9}, **changes)


def test_a_server_has_the_same_conversations_as_a_script_in_this_process(tmp_path):
    given = [numbered(case) for case in bank.cases()]
    server = bank.ChatServer(
        wire_answer(lambda number: bank.gold(types.SimpleNamespace(case_id=number, task=given[0].task)))
    )
    with server.running() as url:
        there = measured(tmp_path / "there", given=given, policy=asked_at(url), seed=3)
    here = measured(tmp_path / "here", given=given)
    assert [attempt.score for attempt in there] == [attempt.score for attempt in here] == [1.0] * 6

    def talk(folder):
        wanted = ("role", "content", "tool_calls")
        return [
            [{name: message.get(name) for name in wanted} for message in record["trajectory"]["messages"]]
            for record in records(folder)
        ]

    assert talk(tmp_path / "there") == talk(tmp_path / "here")
    body = server.bodies[-1]
    assert body["max_tokens"] == 9 and body["tools"][0]["function"]["name"] == "balance"
    results = [message for body in server.bodies for message in body["messages"] if message["role"] == "tool"]
    assert results and all(message["tool_call_id"].startswith("call_") for message in results)


def test_a_servers_fault_masks_and_its_malformed_call_does_not(tmp_path):
    given = [numbered(case) for case in bank.cases(3)]

    def answer(body):
        calls = [{"id": "x", "type": "function", "function": {"name": "deposit", "arguments": "{no"}}]
        return {"message": {"role": "assistant", "content": "", "tool_calls": calls}}

    def fault(number, body):
        return "status 500" if "c1" in body["messages"][0]["content"] else None

    with bank.ChatServer(answer, fault).running() as url:
        found = measured(tmp_path, given=given, policy=asked_at(url))
    assert [(attempt.score, attempt.masked) for attempt in found] == [(1.0, False), (None, True), (0.0, False)]
    assert [record["reason"].split(":")[0] for record in records(tmp_path)] == [
        "malformed_call",
        "fault",
        "malformed_call",
    ]


# --- subsets ---


def test_subsets_take_the_first_of_each_category_and_what_they_come_after(tmp_path):
    known = [*chain(4), *bank.cases(9)[4:]]
    listed = tmp_path / "ids"
    listed.write_text("c3\n\nc8\n")

    def ids(text):
        return [case.case_id for case in benchmarks.subset(known, Options(subset=text), {"even": 1})]

    assert ids("all") == [case.case_id for case in known]
    assert ids("first:1") == ["c0", "c1", "c2", "c3", "c4"]  # c3 is the first odd one that is scored
    assert ids("small") == ["c0", "c1", "c2", "c3", "c4", "c5", "c7"]
    assert ids(str(listed)) == ["c0", "c1", "c2", "c3", "c8"]
    listed.write_text("c3\nc0\n")  # which is not scored
    for text, reason in [
        (str(listed), "line 2: no case of these categories has the id 'c0'"), ("first:0", "at least 1"),
        ("first:x", "first:N"), ("nothing", "an id on each line"),
    ]:  # fmt: skip
        with pytest.raises(UserError, match=reason):
            ids(text)


# --- figures ---


def test_wilson_intervals_by_hand():
    # 8 of 10: (0.8 + 1.9208/10 -+ 1.96 sqrt(0.016 + 0.0096)) / 1.38416, in the textbook's rounding
    low, high = scores.wilson(0.8, 10)
    assert (low, high) == pytest.approx((0.4902, 0.9433), abs=2e-4)
    assert scores.wilson(0.0, 50) == pytest.approx((0.0, 3.8416 / 53.8416), abs=1e-4)
    assert scores.wilson(1.0, 50)[1] == 1.0


def test_trials_of_a_case_are_one_case_and_masked_ones_are_none():
    values = [("a", 0, 1.0), ("a", 1, 0.0), ("b", 0, 1.0), ("b", 1, None), ("c", 0, None), ("c", 1, None)]
    attempts = [Attempt(name, "x", trial, score, score is None) for name, trial, score in values]
    found = scores.category_figures(attempts, 2)
    assert found["score"] == 75.0 and found["cases"] == 3 and found["cases_scored"] == 2 and found["masked"] == 3
    assert found["by_trial"] == [100.0, 0.0]
    assert found["interval"] == [100 * end for end in scores.wilson(0.75, 2)]
    nothing = scores.category_figures(attempts[4:], 2)
    assert nothing["score"] is None and nothing["interval"] is None and nothing["by_trial"] == [None, None]


def test_pass_hat_by_hand():
    values = {"a": [1, 1, 0, 0], "b": [1, 1, 1, 1]}  # of a's 6 pairs one is all right
    attempts = [Attempt(n, "x", t, float(v), False) for n, row in values.items() for t, v in enumerate(row)]
    found = scores.pass_hat(attempts, 4)
    assert found == pytest.approx({"pass^1": 75.0, "pass^2": 100 * (1 / 6 + 1) / 2, "pass^3": 50.0, "pass^4": 50.0})


def test_bootstrap_intervals_hold_the_figure_and_are_a_point_where_all_samples_agree():
    counts = np.array([[1, 2], [2, 2], [0, 1], [3, 4]])
    low, high = scores.bootstrap(counts, lambda sums: sums[0] / sums[1])
    assert 0 <= low < 6 / 9 < high <= 1
    assert scores.bootstrap(np.array([[1, 2]] * 5), lambda sums: sums[0] / sums[1]) == (0.5, 0.5)
