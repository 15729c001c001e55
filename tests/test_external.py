"""Another model answers tool calls: what it is asked, how it is read, what is kept, and a run against a server."""

from __future__ import annotations

import collections
import dataclasses
import json
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import scripted
import simulator
from endpoint_server import FaultyServer
from test_rollout import bank_script, play
from test_train import run_killed_at
from train_helpers import model_bytes, tiny_config

from envace_jax import roles, train
from envace_jax.endpoint import Endpoint, EndpointSettings
from envace_jax.envs import tiny
from envace_jax.episode import Limits
from envace_jax.external import External
from envace_jax.metrics import read_json_lines
from envace_jax.responders import Real
from envace_jax.sharding import make_mesh
from envace_jax.tool_schemas import refusal
from envace_jax.types import Role, Task, ToolCall

ANN, BOB = ToolCall("balance", {"owner": "ann"}), ToolCall("balance", {"owner": "bob"})
ASKED = ({"role": "system", "content": "You serve a bank."}, {"role": "user", "content": "turn 0, please"})
ERROR = '{"error_tool_call": {"code": "unknown_tool", "message": "no", "details": ""}}'


def calling(*calls: ToolCall) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": dataclasses.asdict(c)} for c in calls]}


class Model:
    """A model outside that answers `script(user text, number of the question)` at once, and keeps what it was asked."""

    def __init__(self, script):
        self.script, self.asked = script, []

    def ask(self, messages, read, **options):
        future: Future = Future()
        self.asked.append((tuple(messages), options))
        try:
            future.set_result(read(self.script(messages[1]["content"], len(self.asked))))
        except Exception as error:
            future.set_exception(error)
        return future


def bank(text: str, number: int = 0) -> str:
    """The true answer to the compact prompt of the scripted bank, all of whose calls but balances are deposits."""
    call = json.loads(text.rpartition("CALL\n")[2])
    history = text.partition("HISTORY\n")[2].rpartition("\nCALL")[0]
    environment = scripted.Bank({"state": {"ann": 5}})
    for line in history.split("\n"):
        if line.startswith("{"):
            simulator.execute(environment, line.partition(" => ")[0])
    return roles.rehearsal_target(json.dumps(environment.call(call["name"], call["arguments"])))


def external(model, **changes) -> External:
    settings = {"name": "m", "options": {"temperature": 0.5}}
    return External(model.ask, changes.pop("prompts", scripted.prompts()), **(settings | changes))


# --- what is asked ---


@pytest.mark.parametrize("style", ["full", "compact"])
@pytest.mark.parametrize(("thinking", "limit"), [(True, 50_000), (False, 50_000), (False, 2_500)])
def test_the_question_is_the_policys_own_rehearse_prompt_cut_alike(style, thinking, limit):
    limit = limit if style == "full" or limit == 50_000 else 400
    prompts = scripted.prompts(style=style, thinking=thinking, max_rehearse_prompt=limit)
    history = [*ASKED, calling(ANN), {"role": "tool", "name": "balance", "content": '{"balance": 5}'}]
    history += [{"role": "assistant", "content": f"line {n} " + "of talk " * 9} for n in range(20)]
    model = Model(lambda text, number: roles.rehearsal_target('{"balance": 5}'))
    act_text = "<think>\nhm\n</think>\n\n" + scripted.calling(BOB)
    told = external(model, prompts=prompts).respond(0, scripted.task(), BOB, (*history, calling(BOB)), act_text)
    assert told.result(0) == '{"balance": 5}'
    ((messages, options),) = model.asked
    assert options == {"temperature": 0.5} and [message["role"] for message in messages] == ["system", "user"]
    chat, (system, user) = prompts.chat, (message["content"] for message in messages)
    written = [*chat.system(system, []), *chat.user(user), *chat.assistant_prefix(thinking=thinking)]
    assert written == roles.rehearse_prompt(prompts, scripted.task(), history, act_text, BOB)
    assert len(written) <= limit and ("line 0 " in user) == (limit == 50_000)
    assert ("hm" in user) == (style == "full")


# --- how it is read ---


def test_true_answers_give_what_the_environment_gives():
    other, real = play(responder=external(Model(bank))), play(responder=Real(scripted.Bank))
    assert [t.messages for t in other] == [t.messages for t in real]
    for trajectory in other:
        assert {segment.role for segment in trajectory.segments} == {Role.ACT} and trajectory.reward == 1.0


@pytest.mark.parametrize("text", ["", "{}", "<execution_result>\n{}\n</execution_result>", '{"balance": 5}', "<think>"])
def test_an_unreadable_answer_is_asked_for_again_and_then_masks(text):
    good = target('{"balance": 5}')
    for faults, expected in ((2, {("ok", "done", 1.0)}), (3, {("failed", "fault: EndpointFault", 0.0)})):
        server = FaultyServer(lambda body: good, lambda number, body, most=faults: f"text {text}" * (number % 9 < most))
        with server.running() as url:
            endpoint = Endpoint(EndpointSettings((url,), "m", retries=2, backoff_s=0.01, concurrency=1))
            responder = External(endpoint.ask, scripted.prompts(), name="m", counts=endpoint.counts)
            trajectories = play(one_call, tasks=[scripted.task()], attempts=1, responder=responder)
            endpoint.close()
        ended = {(t.status, ":".join(t.reason.split(":")[:2]), np.nan_to_num(t.reward)) for t in trajectories}
        assert ended == expected
        assert responder.counts["fault_answer"] == faults and responder.counts["tries"] == 3


def one_call(prompt: str, key_ids) -> str:
    return "done" if "<tool_response>" in prompt else scripted.calling(ANN)


def test_faults_mask_and_a_structured_error_does_not():
    def faulty(text, number):
        raise OSError("no route")

    gone, told = play(responder=external(Model(faulty))), play(responder=external(Model(lambda *_: target(ERROR))))
    assert {(t.status, t.reason) for t in gone} == {("failed", "fault: OSError: no route")}
    assert {(t.status, t.reason, t.reward) for t in told} == {("ok", "tool_error", 0.0)}
    assert told[0].messages[-1]["content"] == ERROR


def target(result: str) -> str:
    return roles.rehearsal_target(result)


def test_a_prompt_that_does_not_fit_ends_it_as_in_rehearsal():
    """Too long by the policy's doing: scored. Too long whatever it does: masked from the start, for every attempt."""
    least = len(roles.rehearse_prompt(scripted.prompts(), scripted.task(), (), "", ANN, reference=()))

    def long_script(prompt, key_ids):
        return scripted.calling(ToolCall("balance", {"owner": "a" * 400}))

    for limit, script, expected in (
        (least + 30, long_script, ("ok", "length")),
        (least - 30, long_script, ("failed", "fault: PromptTooLong")),
        (least - 30, lambda prompt, key_ids: "no call", ("failed", "fault: PromptTooLong")),
    ):
        prompts = scripted.prompts(max_rehearse_prompt=limit)
        played = [
            play(script, tasks=[scripted.task()], prompts=prompts, **answered)
            for answered in ({}, {"responder": external(Model(bank), prompts=prompts)})
        ]
        for trajectories in played:
            assert {(t.status, ":".join(t.reason.split(":")[:2])) for t in trajectories} == {expected}
        assert [t.reason for t in played[0]] == [t.reason for t in played[1]]


# --- what is kept ---


def asking(responder: External, call=ANN, task: Task | None = None, before=ASKED, thoughts="", message=(ANN,)):
    text = f"<think>{thoughts}</think>" * bool(thoughts) + scripted.calling(*message)
    return responder.respond(0, task or scripted.task(), call, (*before, calling(*message)), text)


def numbered(text: str, number: int) -> str:
    return target(f'{{"balance": {number}}}')


def test_the_same_call_in_the_same_state_is_asked_once(tmp_path):
    model, path = Model(numbered), tmp_path / "new" / "answers.jsonl"
    for style in ("compact", "full"):
        prompts = scripted.prompts(style=style)
        responder = external(model, prompts=prompts, cache=path)
        first, count = asking(responder).result(0), len(model.asked)
        assert asking(responder).result(0) == asking(responder, thoughts="other thoughts").result(0) == first
        assert len(model.asked) == count and responder.counts == {"cache_hits": 2}
    changed = dataclasses.replace(scripted.task(), tools=(scripted.tool("balance", "owner", "day"),))
    later = (*ASKED, calling(BOB), {"role": "tool", "name": "balance", "content": '{"balance": 0}'})
    for difference in (
        {"call": BOB, "message": (BOB,)}, {"task": changed}, {"before": later}, {"message": (ANN, BOB)},
        {"task": scripted.task(reference=())},
    ):  # fmt: skip
        before = len(model.asked)
        asking(responder, **difference).result(0)
        assert len(model.asked) == before + 1, difference
    for other in ({"name": "n"}, {"options": {"temperature": 0.6}}):
        before = len(model.asked)
        asking(external(model, prompts=prompts, cache=path, **other)).result(0)
        assert len(model.asked) == before + 1, other


def test_kept_answers_outlive_the_process_and_a_torn_line(tmp_path):
    model, path = Model(numbered), tmp_path / "answers.jsonl"
    first = external(model, cache=path)
    answers = [asking(first, call, message=(call,)).result(0) for call in (ANN, BOB)]
    first.close()
    lines = path.read_bytes()
    path.write_bytes(lines[:-9])  # Bob's line was cut; a value that is no result is not taken for one either
    again = external(model, cache=path)
    assert asking(again).result(0) == answers[0] and len(model.asked) == 2
    assert asking(again, BOB, message=(BOB,)).result(0) == '{"balance": 3}' and len(model.asked) == 3
    again.close()
    third = external(model, cache=path)
    assert asking(third, BOB, message=(BOB,)).result(0) == '{"balance": 3}' and len(model.asked) == 3
    key = json.loads(path.read_text().splitlines()[0])[0]
    path.write_text(json.dumps([key, "no result"]) + "\n")
    assert asking(external(model, cache=path)).result(0) == '{"balance": 4}'


def test_a_question_under_way_is_shared_and_nobody_can_take_it_away(tmp_path):
    pending = []

    class Slow:
        def ask(self, messages, read, **options):
            pending.append(Future())
            return pending[-1]

    responder = external(Slow(), cache=tmp_path / "answers.jsonl")
    first, second = asking(responder), asking(responder)
    first.cancel()
    pending[0].set_result('{"balance": 1}')
    assert second.result(0) == '{"balance": 1}' and len(pending) == 1
    third, fourth = (asking(responder, BOB, message=(BOB,)) for _ in range(2))
    pending[1].set_exception(OSError("gone"))
    for failed in (third, fourth):
        with pytest.raises(OSError):
            failed.result(0)
    asking(responder, BOB, message=(BOB,))
    assert len(pending) == 3  # a fault is not kept


def test_with_the_cache_a_rollout_repeats_itself_though_the_model_does_not(tmp_path):
    model = Model(numbered)
    first = play(responder=external(model, cache=tmp_path / "a.jsonl"))
    count = len(model.asked)
    assert count < sum(message["role"] == "tool" for t in first for message in t.messages)  # attempts share answers
    again = play(responder=external(model, cache=tmp_path / "a.jsonl"))
    assert [t.messages for t in again] == [t.messages for t in first] and len(model.asked) == count
    assert [t.messages for t in play(responder=external(model))] != [t.messages for t in first]


# --- calls that fit no schema ---

TOOLS = (
    scripted.tool("balance", "owner"),
    {"type": "function", "function": {"name": "bare", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "none"}},
    {"type": "function", "function": {"name": "odd", "parameters": {"type": "dict", "properties": {}}}},
    {"type": "function", "function": {"name": "far", "parameters": {"properties": {"x": {"$ref": "http://h/x"}}}}},
    {"type": "function", "function": {"name": "open", "parameters": {"properties": {}, "additionalProperties": True}}},
)


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("balance", {"owner": "ann"}, None),
        ("balance", {"owner": 3}, "invalid_arguments"),
        ("balance", {}, "invalid_arguments"),
        ("balance", {"owner": "ann", "day": 1}, "invalid_arguments"),
        ("Balance", {"owner": "ann"}, "unknown_tool"),
        ("bare", {"x": 1}, None),
        ("none", {"x": 1}, None),
        ("odd", {"x": 1}, None),  # a schema that is none decides nothing
        ("far", {"x": 1}, None),  # and nothing is fetched
        ("open", {"x": 1}, None),
    ],
)
def test_what_is_refused(name, arguments, code):
    told = refusal(TOOLS, ToolCall(name, arguments))
    assert told is None if code is None else json.loads(told)["error_tool_call"]["code"] == code
    assert told is None or roles.is_error_result(told)


@pytest.mark.parametrize("answered_by", ["rehearsed", "external"])
def test_with_the_check_a_refused_call_ends_it_and_nobody_is_asked(answered_by):
    def script(prompt, key_ids):
        assert "Simulate" not in prompt
        return scripted.calling(ANN, ToolCall("balance", {"name": "ann"}))

    model = Model(bank)
    answered = {"responder": external(model)} if answered_by == "external" else {}
    for trajectory in play(script, schema_check=True, **answered):
        assert (trajectory.status, trajectory.reward, trajectory.reason) == ("ok", 0.0, "refused_call")
        assert [segment.role for segment in trajectory.segments] == [Role.ACT]
        codes = [json.loads(m["content"])["error_tool_call"]["code"] for m in trajectory.messages[-2:]]
        assert codes == ["not_asked", "invalid_arguments"]
    assert model.asked == []
    if answered_by == "rehearsed":
        assert {t.reason for t in play(bank_script, schema_check=True)} == {"done"}


# --- a whole run ---

NONE = {"evaluation.heldout_tasks": 0, "evaluation.unseen_tasks": 0, "evaluation.fidelity_calls": 0}
TRANSIENT = ("status 500", "truncated", "types", "reset", "text no result")


def test_a_run_against_a_true_simulator_under_faults_killed_and_resumed_equals_the_real_loop(
    tmp_path: Path, monkeypatch
):
    """Only acting is trained, no fault changes anything, and what was asked is counted once, over all starts.

    One call at a time: the calls of one message do not see each other's effects in a simulator's prompt.
    """
    mesh, tasks = make_mesh(), tiny.tasks("train", 40, 0)
    settings = NONE | {"limits.parallel_calls": 1}
    seen: collections.Counter[str] = collections.Counter()

    def fault(number, body):
        """Two faults before the answer to one in three questions, whenever they come."""
        question = body["messages"][1]["content"]
        seen[question] += 1
        drawn = simulator.drawn(question)
        return TRANSIENT[(drawn + seen[question]) % 5] if drawn % 3 == 0 and seen[question] % 3 else None

    server = FaultyServer(lambda body: simulator.answer(tasks, body), fault)
    with server.running() as url:
        there = {"rollout.responder": "external", "external.urls": (url,), "external.model": "true"}
        config = tiny_config(**settings, **there, **{"external.retries": 30, "external.timeout_s": 60.0})
        monkeypatch.setattr("envace_jax.endpoint.LONGEST_WAIT_S", 0.05)
        run_killed_at(2, True, config, mesh, tmp_path / "external", monkeypatch)
        summary = train.run(config, mesh, tmp_path / "external")
    whole = train.run(tiny_config(**settings, **{"rollout.responder": "real"}), mesh, tmp_path / "real")
    assert model_bytes(tmp_path / "external") == model_bytes(tmp_path / "real")
    lines = read_json_lines(tmp_path / "external" / "metrics.jsonl")
    assert [line["masked"] for line in lines] == [0, 0, 0] and all(line["segments_rehearse"] == 0 for line in lines)
    last = lines[-1]
    assert last["external_answers"] == whole["real_env_calls_in_training"] > lines[0]["external_answers"] > 0
    assert (
        last["external_tries"]
        == len(server.bodies)
        == last["external_answers"] + sum(count for kind, count in server.injected.items() if kind)
    )
    assert last["external_fault_status_500"] == server.injected["status 500"] > 0
    assert last["external_fault_answer"] == server.injected["text no result"] > 0
    # Every answered question, those with an unreadable answer too, took 7 tokens in and 3 out.
    answered = last["external_answers"] + last["external_fault_answer"]
    assert summary["external_tokens"] == 10 * answered
    assert (last["external_prompt_tokens"], last["external_completion_tokens"]) == (7 * answered, 3 * answered)


def test_the_settings_reach_the_rollout(tmp_path, monkeypatch):
    class Seen(Exception):
        pass

    def look(*arguments, **options):
        raise Seen(options["schema_check"], type(options["responder"]), options["responder"]._options)

    there = {"rollout.responder": "external", "external.urls": ("http://h/v1",), "external.model": "m"}
    there |= {"rollout.schema_check": True, "external.temperature": 0.25, "external.max_tokens": 9}
    setup, state = train.build(tiny_config(**NONE, **there), make_mesh())
    monkeypatch.setattr(train, "rollout", look)
    with pytest.raises(Seen) as seen:
        train.iterate(setup, state, 0)
    assert seen.value.args == (True, External, {"temperature": 0.25, "top_p": 1.0, "max_tokens": 9})
    setup.responder.close()


def test_limits_are_those_of_the_policys_rehearsal():
    assert Limits().rehearse_response == tiny_config().external.max_tokens
