"""The checklist reward against verdicts worked by hand."""

from __future__ import annotations

import json

import pytest

from envace_jax.json_values import json_equal
from envace_jax.rewards import RewardUnavailable
from envace_jax.rewards.checklist import ChecklistReward, read_turn, says
from envace_jax.types import CheckItem, Task

CALL = {"kind": "call", "name": "balance", "arguments": {"name": "bob"}}
RESULT = {"kind": "result", "name": "balance", "field": "balance", "value": 120}
REPLY = {"kind": "reply", "words": ["bob", "120"]}
ERROR = {"error_tool_call": {"code": "unknown_tool", "message": "no", "details": None}}


def item(weight, check, **more):
    return CheckItem(question="q", weight=weight, check=check, **more)


def score(items, messages):
    task = Task("t", (), (), ("hello",), (tuple(items),))
    return ChecklistReward().score_turn(task, 0, messages).result(timeout=0)


def step(*calls):
    """An assistant message with these (name, arguments, result) calls and its tool messages."""
    message = {"role": "assistant", "content": "", "tool_calls": [{"name": n, "arguments": a} for n, a, _ in calls]}
    return [message, *({"role": "tool", "name": n, "content": json.dumps(r)} for n, _, r in calls)]


def reply(text):
    return [{"role": "assistant", "content": text}]


BOB = ("balance", {"name": "bob"}, {"balance": 120})
ANN = ("balance", {"name": "ann"}, {"balance": 45})


def test_weights_of_the_items_that_hold_are_summed():
    items = [item(0.4, CALL), item(0.2, RESULT), item(0.4, REPLY)]
    assert score(items, step(BOB) + reply("Bob has 120.")) == score(items, step(ANN) + step(BOB) + reply("bob 120"))
    full = score(items, step(BOB) + reply("bob has 120."))
    assert full.reward == 1.0 and full.verdicts == (True, True, True) and full.proceed
    wrong = score(items, step(BOB) + reply("bob has 130."))
    assert wrong.reward == pytest.approx(0.6) and wrong.verdicts == (True, True, False)
    other = score(items, step(("balance", {"name": "bob"}, {"balance": 90})) + reply("bob has 120."))
    assert other.reward == pytest.approx(0.8) and other.verdicts == (True, False, True)
    assert score(items, []).reward == 0.0


def test_all_items_holding_is_exactly_one_whatever_the_rounding():
    items = [item(1 / 7, CALL) for _ in range(7)]
    assert score(items, step(BOB)).reward == 1.0


def test_an_item_holds_if_any_step_or_parallel_call_passes_it():
    items = [item(0.5, CALL), item(0.5, RESULT)]
    assert score(items, step(ANN) + step(ANN, BOB)).reward == 1.0
    assert score(items, step(ANN)).reward == 0.0


def test_results_belong_to_their_own_call():
    """bob's 120 comes from the other tool here, so the result item of `balance` does not hold."""
    mixed = step(("balance", {"name": "bob"}, {"balance": 7}), ("price", {"item": "lamp"}, {"balance": 120}))
    assert score([item(1.0, RESULT)], mixed).reward == 0.0


@pytest.mark.parametrize(
    ("arguments", "holds"),
    [
        ({"n": 1.0, "flag": True}, True),
        ({"flag": True, "n": 1}, True),
        ({"n": 1, "flag": 1}, False),
        ({"n": True, "flag": True}, False),
        ({"n": "1", "flag": True}, False),
        ({"n": 1}, False),
        ({"n": 1, "flag": True, "more": None}, False),
    ],
)
def test_arguments_are_compared_as_json_values(arguments, holds):
    check = {"kind": "call", "name": "f", "arguments": {"n": 1, "flag": True}}
    assert score([item(1.0, check)], step(("f", arguments, {}))).reward == float(holds)


def test_json_equality_reaches_into_lists_and_objects():
    assert json_equal([1, {"a": [2.0, None]}], [1.0, {"a": [2, None]}])
    assert not json_equal([1, 2], [1]) and not json_equal([1, 2], [2, 1])
    assert not json_equal(None, False) and not json_equal(0, False) and not json_equal("", None)


def test_a_missing_result_field_is_not_null():
    check = {"kind": "result", "name": "f", "field": "x", "value": None}
    assert score([item(1.0, check)], step(("f", {}, {"x": None}))).reward == 1.0
    assert score([item(1.0, check)], step(("f", {}, {"y": None}))).reward == 0.0
    assert score([item(1.0, check)], step(("f", {}, ["x"]))).reward == 0.0


def test_calls_and_results_fail_in_a_step_whose_result_is_an_error_but_not_in_others():
    items = [item(0.5, CALL), item(0.5, RESULT)]
    broken = ("balance", {"name": "bob"}, ERROR)
    assert score(items, step(broken)).reward == 0.0
    assert score(items, step(BOB, ("steal", {}, ERROR))).reward == 0.0
    assert score(items, step(broken) + step(BOB)).reward == 1.0
    domain_error = ("balance", {"name": "zoe"}, {"error": "unknown account"})
    check = {"kind": "call", "name": "balance", "arguments": {"name": "zoe"}}
    assert score([item(1.0, check)], step(domain_error)).reward == 1.0  # an ordinary result


def test_a_call_without_a_result_or_with_one_that_is_not_json_counts_as_an_error():
    message = step(BOB)[0]
    assert score([item(1.0, CALL)], [message]).reward == 0.0
    assert score([item(1.0, CALL)], [message, {"role": "tool", "name": "balance", "content": "120!"}]).reward == 0.0


def test_no_call():
    items = [item(1.0, {"kind": "no_call"})]
    assert score(items, reply("hello")).reward == 1.0
    assert score(items, step(BOB) + reply("hello")).reward == 0.0
    assert score(items, step(("steal", {}, ERROR)) + reply("hello")).reward == 0.0


@pytest.mark.parametrize(
    ("text", "words", "holds"),
    [
        ("Bob has 120.", ["bob", "120"], True),
        ("bob has 1120.", ["120"], False),
        ("bob has 1200.", ["120"], False),
        ("bob has 1,120.", ["120"], False),
        ("bob has 120,5.", ["120"], False),
        ("bob has 120.5", ["120"], False),
        ("bob has -120.", ["120"], False),
        ("bob has -120.", ["-120"], True),
        ("bob has 120, ann 5", ["120", "5"], True),
        ("(120)", ["120"], True),
        ("$120", ["120"], True),
        ("bobby has it", ["bob"], False),
        ("there is not  enough", ["not enough"], False),
        ("NOT ENOUGH, bob", ["not enough"], True),
        ("done", ["done", "bob"], False),
        ("a.c", ["a.c"], True),
        ("abc", ["a.c"], False),
        ("", ["done"], False),
    ],
)
def test_reply_words_are_whole_words(text, words, holds):
    assert says(text, words) is holds


def test_only_the_final_reply_counts():
    """Words said beside a call, or before a last call, are no reply."""
    check = {"kind": "reply", "words": ["done"]}
    said_early = [{**step(BOB)[0], "content": "done"}, step(BOB)[1]]
    assert score([item(1.0, check)], said_early + reply("bob has 120.")).reward == 0.0
    assert score([item(1.0, check)], reply("done") + step(BOB)).reward == 0.0
    assert score([item(1.0, check)], step(BOB) + reply("done")).reward == 1.0


def test_an_item_falls_with_what_it_depends_on_along_the_whole_chain():
    items = [
        item(0.25, {"kind": "reply", "words": ["done"]}, dependence=(1,)),
        item(0.25, RESULT, dependence=(2,)),
        item(0.25, CALL, dependence=(3,)),
        item(0.25, {"kind": "call", "name": "deposit", "arguments": {}}),
    ]
    assert score(items, step(BOB) + reply("done")).verdicts == (False, False, False, False)
    assert score(items, step(BOB, ("deposit", {}, {})) + reply("done")).verdicts == (True, True, True, True)


def test_the_next_turn_waits_for_required_items_only():
    items = [item(0.5, CALL, required_for_next_turn=True), item(0.5, REPLY)]
    assert score(items, step(BOB) + reply("no")).proceed
    assert not score(items, step(ANN) + reply("bob has 120")).proceed
    fallen = [item(0.5, CALL, required_for_next_turn=True, dependence=(1,)), item(0.5, REPLY)]
    assert not score(fallen, step(BOB) + reply("no")).proceed


@pytest.mark.parametrize("check", [None, {"kind": "vibes"}])
def test_an_item_that_cannot_be_checked_is_a_fault_not_a_zero(check):
    task = Task("t7", (), (), ("hello",), ((item(0.5, CALL), item(0.5, check)),))
    future = ChecklistReward().score_turn(task, 0, reply("hello"))
    assert future.done() and isinstance(future.exception(), RewardUnavailable)
    assert "task t7, turn 0" in str(future.exception())


def test_openai_calls_are_read_like_ours():
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert read_turn([message, {"role": "tool", "content": "[2]"}]) == ([[("f", {"a": 1}, [2])]], "")


def test_tools_that_must_not_be_called():
    none = item(1.0, {"kind": "not_called", "names": ["pay", "book"]})
    assert score([none], step(("look", {}, {"x": 1})) + reply("I may not.")).reward == 1.0
    assert score([none], step(("look", {}, {"x": 1}), ("pay", {}, {"x": 1}))).reward == 0.0
    assert score([none], step(("pay", {}, ERROR))).reward == 0.0  # it tried


def test_replies_that_the_user_answered_within_the_turn_count_too():
    words = item(1.0, {"kind": "reply", "words": ["120", "tuesday"]})
    user = [{"role": "user", "content": "and when?"}]
    assert score([words], [*reply("It costs 120."), *user, *reply("On Tuesday.")]).reward == 1.0
    assert score([words], [*reply("It costs 120."), *user, *reply("Later.")]).reward == 0.0
    said_by_user = [{"role": "user", "content": "Is it 120 on Tuesday?"}]
    assert score([words], [*reply("hm"), *said_by_user, *reply("yes")]).reward == 0.0


@pytest.mark.parametrize(
    ("word", "text", "holds"),
    [
        ("1628", "it is $1,628 now", True), ("1093.34", "$1,093.34.", True), ("1234567", "1,234,567", True),
        ("1628", "11,628", False), ("1628", "1,628,000", False), ("628", "1,628", False), ("1628", "16,28", False),
        ("12.3456", "12.3,456", False), ("-1628", "-1,628", True),
    ],
)  # fmt: skip
def test_thousands_may_be_set_off_by_commas(word, text, holds):
    assert says(text, [word]) == holds
