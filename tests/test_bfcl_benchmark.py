"""BFCL and tau2 as suites: groups by hand, and gold, garbage and idle policies by the whole evaluation's path.

What needs the packages runs where ENVACE_BFCL_PYTHON and ENVACE_TAU2_PYTHON name interpreters that have them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types

import benchmark_helpers as bank
import pytest
import scripted
from test_bfcl import WAIT, with_package

from envace_jax.benchmarks import Options, bfcl, command, policies, runner, tau2
from envace_jax.benchmarks.scores import Attempt
from envace_jax.config import UserError
from envace_jax.types import ToolCall

CHAT = scripted.tiny_chat()
with_tau2 = pytest.mark.skipif(
    not os.environ.get("ENVACE_TAU2_PYTHON"), reason="tau2 has an interpreter of its own: set ENVACE_TAU2_PYTHON"
)


def shares(module, options, script, folder):
    """Each category's share of cases that a script solves, in percent, and the suite."""
    suite = module.read(options)
    store = runner.Store(folder / "t.jsonl")
    policy, known = policies.scripted("x", suite.cases, script, CHAT)
    suite = dataclasses.replace(suite, cases=known)
    attempts = runner.measure(module, suite, policy, store, trials=1, seed=0)
    store.close()
    found = runner.figures(module, attempts, store, 1)
    assert found["masked"] == 0
    return {name: row["score"] for name, row in found["categories"].items()}, suite


# --- groups ---


def scored(**figures):
    """Attempts whose categories have these shares of 4 cases, or of as many as a pair says."""
    attempts = []
    for category, value in figures.items():
        share, count = value if isinstance(value, tuple) else (value, 4)
        attempts += [Attempt(f"{category}{n}", category, 0, float(n < share * count)) for n in range(count)]
    return attempts


def test_groups_are_weighed_as_in_bfcl():
    everything = scored(
        simple_python=1.0, simple_java=0.5, simple_javascript=0.0, multiple=0.5, parallel=1.0, parallel_multiple=0.0,
        live_simple=(1.0, 10), live_multiple=(0.0, 30), live_parallel=(1.0, 8), live_parallel_multiple=(0.5, 2),
        irrelevance=1.0, live_irrelevance=0.5, live_relevance=0.0, multi_turn_base=1.0, multi_turn_miss_func=0.5,
        multi_turn_miss_param=0.5, multi_turn_long_context=0.0, web_search_base=1.0, web_search_no_snippet=0.0,
        memory_kv=1.0, memory_vector=0.5, memory_rec_sum=0.0,
    )  # fmt: skip
    groups = bfcl.summary(everything)["groups"]
    figures = {name: group["score"] for name, group in groups.items()}
    assert figures["simple"] == 50.0 and figures["non_live"] == 50.0  # of 50, 50, 100 and 0
    assert figures["live"] == pytest.approx(100 * 19 / 50)  # by cases, not by categories
    assert (figures["irrelevance_all"], figures["multi_turn"], figures["agentic"]) == (75.0, 50.0, 50.0)
    assert figures["overall"] == pytest.approx(0.1 * 50 + 0.1 * 38 + 0.1 * 75 + 0.3 * 50 + 0.4 * 50)
    assert not any(group["missing"] for group in groups.values())


def test_missing_groups_are_missing_not_0():
    groups = bfcl.summary(scored(multi_turn_base=1.0, irrelevance=0.5, live_irrelevance=0.5))["groups"]
    assert groups["irrelevance_all"] == {"score": 50.0, "partial": 50.0, "missing": []}
    assert groups["multi_turn"]["score"] is None and groups["multi_turn"]["partial"] == 100.0
    assert groups["multi_turn"]["missing"] == [
        "multi_turn_miss_func",
        "multi_turn_miss_param",
        "multi_turn_long_context",
    ]
    assert groups["agentic"] == {"score": None, "partial": None, "missing": ["web_search", "memory"]}
    assert groups["overall"]["score"] is None and groups["overall"]["missing"] == [
        "non_live",
        "live",
        "multi_turn",
        "agentic",
    ]
    assert groups["overall"]["partial"] == pytest.approx((30 * 100 + 10 * 50) / 40)


def test_a_memory_holds_what_was_executed_and_no_more(monkeypatch):
    """A conversation may end by a message whose calls nobody executed: one that was cut, or had too many calls."""
    asked = []
    monkeypatch.setattr(bfcl.bfcl, "_pool", lambda: types.SimpleNamespace(ask=asked.append))
    task = scripted.task(environment={"name": "bfcl", "state": {}})

    def calling(*values):
        calls = [{"function": {"name": "add", "arguments": {"value": value}}} for value in values]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    user, result = {"role": "user", "content": "hi"}, {"role": "tool", "content": "{}"}
    talk = [*task.messages, user, calling(1, 2), result, result, calling(3), result]
    for end in ([calling(4, 5)], [{"role": "assistant", "content": "<tool_call>"}], []):
        bfcl.bfcl.memory(task, [*talk, *end])
        assert asked[-1]["turns"] == [[[["add", {"value": 1}], ["add", {"value": 2}]], [["add", {"value": 3}]]]]
    bfcl.bfcl.memory(task, [*task.messages, user, calling(4)])
    assert asked[-1]["turns"] == []


# --- with the packages ---


@with_package
def test_gold_scores_100_and_garbage_0(tmp_path):
    options = Options(categories=("multi_turn_base", "simple_python"), subset="first:50")
    assert shares(bfcl, options, bfcl.gold, tmp_path / "g")[0] == {"multi_turn_base": 100.0, "simple_python": 100.0}
    assert shares(bfcl, options, policies.garbage, tmp_path / "b")[0] == {"multi_turn_base": 0.0, "simple_python": 0.0}


@with_package
def test_irrelevance_is_about_any_call_at_all(tmp_path):
    options = Options(categories=("irrelevance", "live_relevance"), subset="first:5")
    assert shares(bfcl, options, policies.noop, tmp_path / "n")[0] == {"irrelevance": 100.0, "live_relevance": 0.0}
    assert shares(bfcl, options, policies.garbage, tmp_path / "g")[0] == {"irrelevance": 0.0, "live_relevance": 100.0}


@with_package
def test_a_call_that_is_refused_is_an_error_and_the_conversation_goes_on(tmp_path):
    def script(case):
        return [(ToolCall("unheard_of", {}),), *bfcl.gold(case)]

    options = Options(categories=("multi_turn_base",), subset="first:2")
    assert shares(bfcl, options, script, tmp_path)[0] == {"multi_turn_base": 100.0}
    line = json.loads((tmp_path / "t.jsonl").read_text().splitlines()[0])
    first = next(message for message in line["trajectory"]["messages"] if message["role"] == "tool")
    assert json.loads(first["content"]) == {"error": "no tool is called unheard_of"}


@with_package
def test_a_memory_is_handed_on_and_asked_about(tmp_path):
    def script(case):
        if case.scored:
            return [(ToolCall("core_memory_retrieve", {"key": "name"}),), "I see."]
        if case.after:
            return ["Noted."] * len(case.task.user_turns)
        return [(ToolCall("core_memory_add", {"key": "name", "value": "Michael"}),), "Noted."]

    try:
        found, suite = shares(bfcl, Options(categories=("memory_kv",), subset="first:1"), script, tmp_path)
    except UserError as error:
        pytest.skip(str(error))
    lines = {line["case"]: line for line in map(json.loads, (tmp_path / "t.jsonl").read_text().splitlines())}
    last = lines["memory_kv_0-customer-0"]["trajectory"]["messages"]
    assert '"name": "Michael"' in last[0]["content"] and last[0]["role"] == "system"
    assert [json.loads(m["content"]) for m in last if m["role"] == "tool"] == [{"value": "Michael"}]
    assert len(suite.cases) == 11 and found == {"memory_kv": 0.0}  # "I see." is no answer
    right = shares(bfcl, Options(categories=("memory_kv",), subset="first:2"), bfcl.gold, tmp_path / "gold")[0]
    assert right == {"memory_kv": 100.0}


@with_package
def test_categories_that_cannot_run_are_named():
    suite = bfcl.read(Options(categories=("simple_python",), subset="first:1"))
    assert "internet" in suite.missing["web_search_base"] and suite.missing["multiple"] == "not asked for"
    with pytest.raises(UserError, match="there is no 'simple_java'; there are: simple_python"):
        bfcl.read(Options(categories=("simple_java",)))
    assert (
        bfcl.bfcl.score(suite.cases[0].task, [*suite.cases[0].task.messages, {"role": "user", "content": "x"}]).result(
            WAIT
        )
        == 0
    )


@with_tau2
def test_tau2s_gold_solves_what_has_one(tmp_path):
    options = Options(categories=("mock", "mock_solo", "telecom_small"), with_user=True)
    found, suite = shares(tau2, options, tau2.gold, tmp_path / "g")
    assert found["mock_solo"] == found["telecom_small"] == 100.0 and found["mock"] == pytest.approx(100 * 8 / 9)
    lines = map(json.loads, (tmp_path / "g" / "t.jsonl").read_text().splitlines())
    assert [line["case"] for line in lines if line["score"] == 0] == [
        "mock/update_task_with_history_and_env_assertions"
    ]
    (unsolved,) = [case for case in suite.cases if case.case_id == "mock/update_task_with_history_and_env_assertions"]
    assert not unsolved.task.reference  # it asserts a status, and lists no action that would bring it about
    done = (ToolCall("update_task_status", {"task_id": "task_2", "status": "completed"}),)
    solved = shares(tau2, options, lambda case: [done, "Done."] if case == unsolved else None, tmp_path / "s")[0]
    assert solved == {"mock": 100.0}
    idle = shares(tau2, options, policies.noop, tmp_path / "n")[0]
    assert idle == {"mock": pytest.approx(100 / 9), "mock_solo": 0.0, "telecom_small": 0.0}
    assert shares(tau2, options, policies.garbage, tmp_path / "b")[0]["telecom_small"] == 0.0


@with_tau2
def test_sets_with_a_user_need_one():
    with pytest.raises(UserError, match="mock needs a language model for the user: --config.user.urls"):
        tau2.read(Options(categories=("mock",)))
    suite = tau2.read(Options(subset="first:1"))
    assert {case.category for case in suite.cases} == {"mock_solo", "telecom_small"}
    assert "language model" in suite.missing["airline"] and "tools of its own" in suite.missing["telecom"]


@with_tau2
def test_a_served_policy_and_a_served_user_meet_in_tau2(tmp_path):
    def answer(body):
        heard = body["messages"][0]["content"]
        if body["model"] == "user":  # opens with a wish, and is content with any answer
            said = "###STOP###" if body["messages"][-1]["content"] == "It is done." else "Add a task, please."
            return {"message": {"role": "assistant", "content": said}}
        assert "agent" in heard.lower() and body["tools"]
        return {"message": {"role": "assistant", "content": "It is done."}}

    server = bank.ChatServer(answer)
    with server.running() as url:
        flags = [
            "--benchmark=tau2",
            "--categories=mock",
            "--model=agent",
            f"--server={url}",
            f"--out={tmp_path / 'out'}",
        ]
        user = [f"--config.user.urls=('{url}',)", "--config.user.model=user", "--nobaselines"]
        assert command.run(["evaluate", *flags, *user]) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert found["masked"] == 0 and found["categories"]["mock"]["score"] == pytest.approx(100 / 9)
    assert len((tmp_path / "out" / "user_messages.jsonl").read_text().splitlines()) >= 4
    lines = [json.loads(line) for line in (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()]
    opened = [
        line for line in lines if any(m["content"] == "Add a task, please." for m in line["trajectory"]["messages"])
    ]
    assert len(opened) == 3 and {line["reason"] for line in lines} == {"done"}
