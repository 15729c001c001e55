"""The judged checklist reward: verdicts to scores, what is asked, and that no fault of a judge becomes a verdict."""

from __future__ import annotations

import dataclasses
import json
import re
from concurrent.futures import Future

import pytest
from data_helpers import authors_record
from endpoint_server import FaultyServer

from envace_jax.endpoint import Endpoint, EndpointSettings
from envace_jax.records import task_from_record
from envace_jax.rewards import RewardUnavailable
from envace_jax.rewards.judge import JudgedReward, read_verdicts, verdict_schema
from envace_jax.types import TurnScore

TASK = task_from_record(authors_record(), 0)
CALL = {"type": "function", "function": {"name": "balance", "arguments": {"name": "bob"}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
REPLY = {"role": "assistant", "content": "bob has 120."}
USER = {"role": "user", "content": "bob ?"}


def result(content='{"balance": 120}'):
    return {"role": "tool", "name": "balance", "content": content}


class Scripted:
    """A judge that gives these texts in turn and keeps what it was asked."""

    def __init__(self, *texts):
        self.texts, self.asked = list(texts), []

    def ask(self, messages, read, **options):
        self.asked.append((messages, options))
        future = Future()
        try:
            future.set_result(read(self.texts.pop(0)))
        except Exception as error:
            future.set_exception(error)
        return future


TURN = (USER, CALLING, result(), REPLY)


def score(verdicts, messages=TURN, turn=0, task=TASK):
    judge = Scripted(json.dumps({"verdicts": verdicts}))
    return JudgedReward(judge.ask, name="j").score_turn(task, turn, messages).result(5), judge


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([[True, False], [False, True]], TurnScore(1.0, (True, True), True)),  # any step is enough
        ([[True, False], [False, False]], TurnScore(0.75, (True, False), True)),
        ([[False, False], [False, True]], TurnScore(0.0, (False, False), False)),  # the second rests on the first
        ([[False, False], [False, False]], TurnScore(0.0, (False, False), False)),
    ],
)
def test_an_item_holds_if_any_step_passes_it(verdicts, expected):
    assert score(verdicts)[0] == expected


def test_a_step_whose_result_is_an_error_passes_nothing_about_calls():
    bad = result('{"error_tool_call": {"code": 1, "message": "no", "details": ""}}')
    assert score([[True, True], [False, True]], (USER, CALLING, bad, REPLY))[0].verdicts == (False, False)
    twice = (USER, CALLING, bad, CALLING, result(), REPLY)
    assert score([[True, False], [True, False], [False, True]], twice)[0].verdicts == (True, True)
    assert score([[True, False], [False, False], [False, True]], twice)[0].verdicts == (False, False)
    assert score([[True]], (USER, {"role": "assistant", "content": "hi"}), turn=1)[0].verdicts == (True,)


def test_items_with_program_checks_are_not_put_to_the_judge():
    first, second = TASK.checklist[0]
    checked = dataclasses.replace(second, check={"kind": "reply", "words": ["120"]})
    task = dataclasses.replace(TASK, checklist=((first, checked), TASK.checklist[1]))
    found, judge = score([[True], [False]], task=task)
    assert found == TurnScore(1.0, (True, True), True)
    assert "Is 120 said?" not in judge.asked[0][0][1]["content"]
    assert judge.asked[0][1]["schema"] == verdict_schema(2, 1)
    alone = dataclasses.replace(TASK, checklist=((dataclasses.replace(checked, dependence=()),), TASK.checklist[1]))
    silent = Scripted()
    JudgedReward(silent.ask, name="j").score_turn(alone, 0, (USER, REPLY)).result(5)
    assert silent.asked == []


def test_the_question_holds_every_step_result_and_item():
    text = score([[True, True], [True, True]])[1].asked[0][0][1]["content"]
    for part in ("bob ?", "# Step 2", '"name": "balance"', "Result of balance", "bob has 120.", "balance of ann"):
        assert part in text
    assert re.search(
        r"Item 1\nQuestion: Was the balance looked up\?\nLooks at: assistant.tool_calls\nPasses if: ", text
    )


@pytest.mark.parametrize(
    "text",
    [
        "", "yes", "[]", "{}", '{"verdicts": true}', '{"verdicts": []}', '{"verdicts": [[true, true]]}',
        '{"verdicts": [[true], [true]]}', '{"verdicts": [[true, 1], [true, true]]}',
        '{"verdicts": [[true, null], [true, true]]}', '{"verdicts": [["true", true], [true, true]]}',
        '{"verdicts": [[true, true], [true, true]', '{"verdicts": {"0": [true, true]}}', "[[true, true], [true, true]]",
    ],
)  # fmt: skip
def test_what_is_no_verdict_is_a_fault_and_never_false(text):
    with pytest.raises(ValueError):
        read_verdicts(text, 2, 2)
    future = JudgedReward(Scripted(text).ask, name="j").score_turn(TASK, 0, (USER, CALLING, result(), REPLY))
    with pytest.raises(RewardUnavailable, match="task cm2/12, turn 0: judge: "):
        future.result(5)


def test_thoughts_before_the_verdicts_are_passed_over():
    assert read_verdicts('<think>\n{"no"}\n</think>\n\n{"verdicts": [[true]]}', 1, 1) == ((True,),)


def test_verdicts_are_kept_on_disk_by_what_was_asked(tmp_path):
    path, messages = tmp_path / "deep" / "verdicts.jsonl", (USER, CALLING, result(), REPLY)
    text = json.dumps({"verdicts": [[True, False], [False, True]]})
    first = JudgedReward(Scripted(text).ask, name="j", cache=path)
    expected = first.score_turn(TASK, 0, messages).result(5)
    assert first.score_turn(TASK, 0, messages).result(5) == expected  # the judge has nothing more to say
    with path.open("a") as file:
        file.write('["half')  # a run that was killed here
    again = JudgedReward(Scripted(text).ask, name="j", cache=path)
    assert again.score_turn(TASK, 0, messages).result(5) == expected
    again.score_turn(TASK, 0, (USER, CALLING, result('{"balance": 7}'), REPLY)).result(5)  # asked: another result
    third = JudgedReward(Scripted().ask, name="j", cache=path)
    assert third.score_turn(TASK, 0, (USER, CALLING, result('{"balance": 7}'), REPLY)).result(5) == expected
    other = JudgedReward(Scripted().ask, name="another judge", cache=path).score_turn(TASK, 0, messages)
    with pytest.raises(RewardUnavailable):
        other.result(5)


def test_a_verdict_that_comes_after_the_waiting_is_kept_and_harms_nobody(tmp_path):
    path, late = tmp_path / "verdicts.jsonl", []

    def ask(messages, read, **options):
        late.append((Future(), read))
        return late[-1][0]

    reward = JudgedReward(ask, name="j", cache=path)
    score = reward.score_turn(TASK, 0, TURN)
    score.cancel()  # what the rollout does with a future that is overdue
    future, read = late[0]
    future.set_result(read(json.dumps({"verdicts": [[True, True]] * 2})))
    assert score.result(5).reward == 1.0
    assert JudgedReward(Scripted().ask, name="j", cache=path).score_turn(TASK, 0, TURN).result(5).reward == 1.0


def test_under_faults_every_score_is_right_or_missing_and_the_counts_are_those_injected():
    kinds = ("status 500", "timeout", "truncated", "types", "reset")

    def fault(number, body):
        return kinds[number // 5 % len(kinds)] if number % 5 == 0 else None

    def answer(body):
        steps, items = map(int, re.search(r"Give (\d+) lists of (\d+)", body["messages"][1]["content"]).groups())
        return json.dumps({"verdicts": [[True] * items] * steps})

    server = FaultyServer(answer, fault)
    with server.running() as url:
        endpoint = Endpoint(EndpointSettings((url,), "judge", timeout_s=0.4, retries=1, backoff_s=0.01, concurrency=8))
        reward = JudgedReward(endpoint.ask, name="j")
        futures = [reward.score_turn(TASK, 0, (USER, CALLING, result(str(n)), REPLY)) for n in range(100)]
        outcomes = [future.exception(60) or future.result() for future in futures]
        endpoint.close()
    missing = [outcome for outcome in outcomes if isinstance(outcome, RewardUnavailable)]
    assert all(outcome.reward == 1.0 for outcome in outcomes if outcome not in missing)
    assert endpoint.counts["given_up"] == len(missing) < 20
    names = {"timeout": "timeout", "truncated": "body", "types": "body", "reset": "connection"}
    wanted = {}
    for kind in kinds:
        name = f"fault_{names.get(kind, kind).replace(' ', '_')}"
        wanted[name] = wanted.get(name, 0) + server.injected[kind]
    assert {name: count for name, count in endpoint.counts.items() if name.startswith("fault")} == wanted
    assert sum(wanted.values()) > 20
