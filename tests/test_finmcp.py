"""FinMCP's tool F1: the figures by hand, teacher forcing, and what is said of a file that cannot be used."""

from __future__ import annotations

import json

import pytest
import scripted

from envace_jax.benchmarks import Options, finmcp, policies, runner
from envace_jax.benchmarks.scores import Attempt
from envace_jax.config import UserError
from envace_jax.roles import Prompts, act_prompt
from envace_jax.types import ToolCall

CHAT = scripted.tiny_chat()
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("quote", "fund")
]


def called(*names):
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def said(role, content):
    return {"role": role, "content": content}


ONE = [said("user", "price?"), called("quote"), said("tool", '{"price": 7}'), said("assistant", "It is 7.")]
MANY = [
    said("system", "Be right."), said("user", "first"), called("quote", "quote", "fund"), said("tool", '{"a": 1}'),
    said("tool", '{"a": 2}'), said("tool", '{"a": 3}'), said("assistant", "So."), said("user", "second"),
    called("fund"),
]  # fmt: skip


def written(tmp_path, *samples):
    path = tmp_path / "data.jsonl"
    path.write_text("".join((s if isinstance(s, str) else json.dumps(s)) + "\n" for s in samples))
    return str(path)


@pytest.fixture
def data(tmp_path):
    return written(
        tmp_path, {"id": "a", "messages": ONE, "tools": TOOLS},
        {"extra_info": {"index": 5, "messages": MANY, "tools": json.dumps(TOOLS)}, "messages": MANY[:2]},
    )  # fmt: skip


def play(data, tmp_path, script):
    suite = finmcp.read(Options(data=data))
    store = runner.Store(tmp_path / "t.jsonl")
    policy = policies.scripted("x", suite.cases, script, CHAT)[0]
    attempts = runner.measure(finmcp, suite, policy, store, trials=1, seed=0)
    store.close()
    return (
        attempts,
        finmcp.summary(attempts)["tool_f1"],
        [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()],
    )


def test_the_published_row():
    """Qwen3-4B on single-tool samples: of 173 tools called 109 are among the 145 wanted; F1 68.55."""
    assert round(finmcp.tool_f1(109, 173, 145)["f1"], 2) == 68.55
    assert finmcp.tool_f1(0, 0, 5) == {"precision": 0.0, "recall": 0.0, "f1": 0.0} == finmcp.tool_f1(0, 5, 0)


def test_names_are_multisets_over_a_sample_and_sums_over_samples():
    assert finmcp.tool_counts(["a", "a", "b"], ["a", "b", "b", "c"]) == (2, 3, 4)
    attempts = [
        Attempt("s/0", "multi_turn", 0, 0.0, False, {"called": ["a"], "wanted": ["b"]}),
        Attempt("s/1", "multi_turn", 0, 0.0, False, {"called": ["b"], "wanted": ["a"]}),  # right over the sample
        Attempt("t/0", "single_tool", 0, 0.0, False, {"called": ["a", "a"], "wanted": ["a"]}),
        Attempt("u/0", "single_tool", 0, None, True),
        Attempt("u/1", "single_tool", 0, 1.0, False, {"called": [], "wanted": []}),
    ]  # fmt: skip
    found = finmcp.summary(attempts)["tool_f1"]
    assert (found["multi_turn"]["hits"], found["multi_turn"]["f1"], found["multi_turn"]["samples"]) == (2, 100.0, 1)
    assert (found["all"]["hits"], found["all"]["called"], found["all"]["wanted"]) == (3, 4, 3)
    assert found["all"]["f1"] == pytest.approx(100 * 2 * (3 / 4) / (3 / 4 + 1))
    assert found["single_tool"]["samples"] == 1  # a sample with a masked message is left out whole


def test_trials_of_a_sample_make_no_interval_narrower():
    def attempts(trials):
        return [
            Attempt(f"s{n}/0", "single_tool", trial, 0.0, False, {"called": ["a"], "wanted": ["ab"[n % 3 == 0]]})
            for n in range(12)
            for trial in range(trials)
        ]

    one, three = (finmcp.summary(attempts(trials))["tool_f1"]["all"] for trials in (1, 3))
    assert one["interval"] == three["interval"] and one["interval"][0] < one["f1"] == three["f1"] < one["interval"][1]
    assert (one["samples"], three["samples"], three["called"]) == (12, 12, 36)


def test_every_assistant_message_is_asked_for_from_the_recorded_history(data, tmp_path):
    attempts, f1, lines = play(data, tmp_path, policies.garbage)
    assert [attempt.case_id for attempt in attempts] == ["a/0", "a/1", "5/0", "5/1", "5/2"]
    assert [attempt.category for attempt in attempts] == ["single_tool"] * 2 + ["multi_turn"] * 3
    assert attempts[2].detail == {"called": ["qzx_garbage"], "wanted": ["quote", "quote", "fund"]}
    assert attempts[3].detail["wanted"] == [] and f1["all"]["f1"] == 0.0 and f1["all"]["called"] == 5
    talk = {line["case"]: line["trajectory"]["messages"] for line in lines}
    assert all("qzx" not in json.dumps(messages[:-2]) for messages in talk.values())  # never the policy's own history
    read = {name: "\n".join(message["content"] for message in messages) for name, messages in talk.items()}
    assert '{"a": 3}' in read["5/1"] and "So." not in read["5/1"] and "second" not in read["5/1"]
    assert read["5/2"].count("second") == 1 and "So." in read["5/2"]


def test_a_case_goes_on_after_recorded_results():
    task = finmcp.cases_of({"id": "m", "messages": MANY, "tools": TOOLS}, 0)[1].task
    assert not task.user_turns and [message["role"] for message in task.messages][:3] == ["system", "user", "assistant"]
    prompt = act_prompt(Prompts(CHAT), task)
    results = CHAT.tool_results(['{"a": 1}', '{"a": 2}', '{"a": 3}'])
    assert prompt[-len(results) - len(CHAT.assistant_prefix()) :] == [*results, *CHAT.assistant_prefix()]


def test_the_gold_calls_score_100_and_nothing_0(data, tmp_path):
    assert play(data, tmp_path / "gold", finmcp.gold)[1]["all"]["f1"] == 100.0
    assert play(data, tmp_path / "noop", policies.noop)[1]["all"] | {"interval": 0} == {
        "hits": 0, "called": 0, "wanted": 5, "precision": 0.0, "recall": 0.0, "f1": 0.0, "interval": 0, "samples": 2,
    }  # fmt: skip
    half = play(data, tmp_path / "half", lambda case: [(ToolCall("quote", {}),)])[1]["all"]
    # Five messages call quote: sample a has it once too often, sample 5 has three where two are wanted.
    assert (half["hits"], half["called"], half["wanted"]) == (3, 5, 5) and half["f1"] == pytest.approx(60.0)


def test_a_subset_has_whole_samples(data):
    assert [case.case_id for case in finmcp.read(Options(data=data, subset="first:1")).cases][:2] == ["a/0", "a/1"]
    only = finmcp.read(Options(data=data, categories=("multi_turn",)))
    assert {case.category for case in only.cases} == {"multi_turn"} and set(only.missing) == {
        "single_tool",
        "multi_tool",
    }


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        ("{", "line 1: not JSON"), ({"tools": TOOLS}, "line 1: no messages"), ({"messages": ONE}, "no tools"),
        ({"messages": ONE, "tools": "{"}, "line 1: Expecting"),
        ({"messages": [said("robot", "x")], "tools": TOOLS}, "role 'robot'"),
        ({"messages": [called("quote")], "tools": TOOLS}, "follows neither a user message nor tool results"),
        ({"messages": [{"role": "user", "content": ["x"]}], "tools": TOOLS}, "is a list, no text"),
        ({"messages": ONE, "tools": TOOLS, "type": "odd"}, "type 'odd'; accepted: single_tool"),
        ({"messages": ONE, "tools": [{"function": {}}]}, "no 'name'"), ("[1]", "line 1"),
        ({"messages": [said("user", "x")], "tools": TOOLS}, "no sample has an assistant message"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, sample, reason):
    with pytest.raises(UserError, match=reason) as error:
        finmcp.read(Options(data=written(tmp_path, sample)))
    assert "\n" not in str(error.value)


def test_absent_data_is_said_plainly(tmp_path):
    with pytest.raises(UserError, match="not part of this package.*--data=FILE"):
        finmcp.read(Options())
    with pytest.raises(UserError, match="no such file"):
        finmcp.read(Options(data=str(tmp_path / "nothing")))
    same = {"id": "a", "messages": ONE, "tools": TOOLS}
    with pytest.raises(UserError, match="line 2: the id 'a' is already taken"):
        finmcp.read(Options(data=written(tmp_path, same, same)))
