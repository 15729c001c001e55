"""Rehearsal over the wire: what it costs, what may be seen of it, what is kept of it, and what never is seen."""

from __future__ import annotations

import concurrent.futures
import json
import threading
import time

import httpx
import pytest
import scripted
import serving
from test_serving import CHAT, TOOLS, calls_of, events, refusal, until

from envace_jax.rehearsal import Settings
from envace_jax.serving.app import Options, make_app
from envace_jax.types import ToolCall

BALANCE = scripted.calling(ToolCall("balance", {"owner": "ann"}))
ASKED = [{"role": "system", "content": "You serve a bank."}, {"role": "user", "content": "what has ann ?"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "balance", "arguments": '{"owner": "ann"}'}}
TOLD = [
    *ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": '{"balance": 7}'},
]
IMAGINED, NOTES = '{"balance": 5}', "Ask for the balance of ann."


class Script:
    """A policy that imagines 5, notes what it did, and says what it was told; it keeps count of what it played."""

    def __init__(self):
        self.played = []
        self.hold = threading.Event()
        self.hold.set()

    def __call__(self, prompt, request):
        self.hold.wait(20)
        if "You play the tools" in prompt:
            self.played.append("rehearse")
            return scripted.answering(IMAGINED)
        if "You prepare an assistant" in prompt:
            self.played.append("memory")
            return NOTES
        told = prompt.rpartition("<tool_response>\n")[2].partition("\n</tool_response>")[0]
        self.played.append("noted" if NOTES in prompt else "act")
        return f"ann has {json.loads(told)['balance']}" if told.startswith("{") else BALANCE


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def client(script):
    with (
        serving.scripted_model(script, style="full", max_length=30_000, chunk=50) as model,
        serving.running(make_app(model, Options(rehearsal=Settings(mode="none", placement="system")))) as url,
        httpx.Client(base_url=url, timeout=60) as made,
    ):
        yield made


def body(messages=ASKED, **more) -> dict:
    return {"model": "scripted", "messages": messages, "tools": TOOLS, **more}


def ask(client, messages=ASKED, **more) -> dict:
    response = client.post(CHAT, json=body(messages, **more))
    assert response.status_code == 200, response.text
    return response.json()


def test_a_parallel_rehearsal_then_one_answer(client, script):
    plain = ask(client)
    script.played.clear()
    got = ask(client, rehearsal={"mode": "parallel", "n": 3})
    assert calls_of(got["choices"][0]["message"]) == [("balance", {"owner": "ann"})]
    assert sorted(script.played) == sorted(["act", "rehearse", "act"] * 3 + ["memory", "noted"])
    usage, counts = got["usage"], got["usage"]["rehearsal_tokens"]
    own = usage["completion_tokens"] - counts["completion_tokens"]
    assert own == plain["usage"]["completion_tokens"]
    written = [BALANCE, scripted.answering(IMAGINED), "ann has 5"]
    assert counts["completion_tokens"] == 3 * sum(len(tokens(text)) for text in written) + len(tokens(NOTES))
    assert usage["prompt_tokens"] - counts["prompt_tokens"] > plain["usage"]["prompt_tokens"]  # the notes are read
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > counts["cached_tokens"] > 0
    assert "rehearsal" not in got and "rehearsal_tokens" not in plain["usage"]
    assert NOTES not in json.dumps(got) and IMAGINED not in json.dumps(got)


def tokens(text: str) -> list[int]:
    return [*scripted.spelled(text), scripted.tiny_chat().end_of_message]


def test_a_sequential_rehearsal_writes_its_memory_after_every_attempt(client, script):
    ask(client, rehearsal={"mode": "sequential", "n": 2})
    assert script.played == ["act", "rehearse", "act", "memory", "noted", "rehearse", "noted", "memory", "noted"]


def test_the_transcript_for_those_who_ask(client):
    got = ask(client, rehearsal={"mode": "parallel", "n": 2, "return_transcript": True})["rehearsal"]
    assert got["memory"] == NOTES and len(got["attempts"]) == 2
    for attempt in got["attempts"]:
        assert attempt["reason"] == "done"
        assert attempt["segments"] == [
            {"role": "act", "text": BALANCE},
            {"role": "rehearse", "text": scripted.answering(IMAGINED)},
            {"role": "act", "text": "ann has 5"},
        ]
        called, told, said = attempt["messages"]
        assert calls_of(called) == [("balance", {"owner": "ann"})]
        assert told["content"] == IMAGINED and said["content"] == "ann has 5"
    response = client.post(CHAT, json=body(stream=True, rehearsal={"mode": "parallel", "return_transcript": True}))
    chunks = events(response.text)
    assert chunks[-1]["rehearsal"]["memory"] == NOTES and chunks[-1]["choices"] == []
    assert all("rehearsal" not in chunk for chunk in chunks[:-1])


def test_later_steps_of_a_turn_go_on_with_its_memory(client, script):
    first = ask(client, rehearsal={"mode": "parallel", "n": 2})
    script.played.clear()
    second = ask(client, TOLD, rehearsal={"mode": "parallel", "n": 2})
    assert script.played == ["noted"] and second["choices"][0]["message"]["content"] == "ann has 7"
    assert first["usage"]["rehearsal_tokens"]["completion_tokens"] > 0
    assert set(second["usage"]["rehearsal_tokens"].values()) == {0}
    script.played.clear()
    ask(client, TOLD, rehearsal={"mode": "parallel", "n": 2, "reuse": False})
    assert script.played == ["act", "act", "memory", "noted"]  # rehearsed again from there: nothing is left to call
    for changed in (
        {"rehearsal": {"mode": "parallel", "n": 3}},
        {"rehearsal": {"mode": "parallel", "n": 2}, "seed": 5},
        {"rehearsal": {"mode": "parallel", "n": 2}, "tools": TOOLS[:1]},
    ):
        script.played.clear()
        ask(client, TOLD, **changed)
        assert "memory" in script.played
    script.played.clear()
    next_turn = [*TOLD, {"role": "assistant", "content": "ann has 7"}, {"role": "user", "content": "and ann now ?"}]
    ask(client, next_turn, rehearsal={"mode": "parallel", "n": 2})
    assert "memory" in script.played


def test_a_seed_gives_the_same_answer_whatever_was_asked_before(client, script):
    wanted = {"rehearsal": {"mode": "parallel", "n": 2}, "seed": 5}
    ask(client, **wanted)
    script.played.clear()
    ask(client, TOLD, **wanted)
    assert script.played.count("memory") == 1  # not the one of the step before, which others may not have asked for
    script.played.clear()
    again = ask(client, TOLD, **wanted)
    assert script.played == ["noted"] and set(again["usage"]["rehearsal_tokens"].values()) == {0}


def test_with_a_seed_a_client_may_ask_to_go_on_with_a_memory(client, script):
    ask(client, rehearsal={"mode": "parallel", "n": 2}, seed=5)
    script.played.clear()
    ask(client, TOLD, rehearsal={"mode": "parallel", "n": 2, "reuse": True}, seed=5)
    assert script.played == ["noted"]
    script.played.clear()
    ask(client, TOLD, rehearsal={"mode": "parallel", "n": 2, "reuse": True}, seed=6)
    assert "memory" in script.played


def test_what_is_kept_can_be_looked_at_and_is_counted(client):
    wanted = {"rehearsal": {"mode": "parallel", "n": 2, "return_transcript": True}}
    first, second = ask(client, **wanted), ask(client, TOLD, **wanted)
    assert second["usage"]["rehearsal_tokens"]["completion_tokens"] == 0
    assert second["rehearsal"] == first["rehearsal"]  # with all that the attempts said, though more was said since
    metrics = client.get("/metrics").text
    assert 'envace_rehearsals_total{memory="made"} 1.0' in metrics
    assert 'envace_rehearsals_total{memory="kept"} 1.0' in metrics


def test_memories_are_kept_as_long_as_there_is_room_for_their_tokens(script):
    with (
        serving.scripted_model(script, style="full", max_length=30_000, chunk=50) as model,
        serving.running(app := make_app(model)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        rehearsals = app.state.service.rehearsals
        one = ask(client, rehearsal={"n": 1})["usage"]["rehearsal_tokens"]["completion_tokens"]
        rehearsals._kept._most_tokens = 3 * one + 1
        for number in range(5):
            ask(client, [{"role": "user", "content": f"what has ann {number} ?"}], rehearsal={"n": 1})
        assert len(rehearsals._kept) == 3
        script.played.clear()
        ask(client, [{"role": "user", "content": "what has ann 4 ?"}], rehearsal={"n": 1})
        assert script.played == ["noted"]  # the latest are there
        rehearsals._kept._most_tokens = one - 1
        assert ask(client, rehearsal={"n": 1}) and not rehearsals._kept


def test_what_is_being_rehearsed_when_it_stops_is_finished(script):
    script.hold.clear()
    with (
        serving.scripted_model(script, style="full", max_length=30_000, chunk=50) as model,
        serving.running(app := make_app(model)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
        concurrent.futures.ThreadPoolExecutor(1) as thread,
    ):
        asked = thread.submit(ask, client, rehearsal={"mode": "parallel", "n": 1})
        until(lambda: model.engine.running)
        app.state.service.stopping = True
        script.hold.set()
        assert asked.result(60)["choices"] and script.played[-1] == "noted"
        assert refusal(httpx.post(url + CHAT, json=body()), 503)


def test_an_earlier_step_does_not_see_what_was_rehearsed_later(client, script):
    ask(client, TOLD, rehearsal={"mode": "parallel", "n": 1})
    script.played.clear()
    ask(client, ASKED, rehearsal={"mode": "parallel", "n": 1})
    assert "memory" in script.played


def test_a_default_of_the_server_is_for_requests_with_tools(script):
    with (
        serving.scripted_model(script, style="full", max_length=30_000, chunk=50) as model,
        serving.serving(model, Options(rehearsal=Settings(mode="sequential", n=1))) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        got = ask(client)
        assert script.played == ["act", "rehearse", "act", "memory", "noted"]
        assert got["usage"]["rehearsal_tokens"]["completion_tokens"] > 0
        for more in ({"rehearsal": {"mode": "none"}}, {"tools": None}, {"tool_choice": "none"}):
            script.played.clear()
            ask(client, **more)
            assert script.played == ["act"]
        ended = [*ASKED, {"role": "assistant", "content": "well"}]
        script.played.clear()
        ask(client, ended)
        assert script.played == ["act"]
        assert refusal(client.post(CHAT, json=body(ended, rehearsal={"n": 2})), 400)["param"] == "messages"
        script.played.clear()
        ask(client, rehearsal={"n": 2})
        assert script.played.count("memory") == 2


def test_the_rehearsal_is_not_bound_to_a_choice_of_tools_but_the_answer_is(client, script):
    named = {"type": "function", "function": {"name": "balance"}}
    got = ask(client, rehearsal={"mode": "parallel", "n": 1}, tool_choice=named)
    assert script.played == ["act", "rehearse", "act", "memory", "noted"] and got["choices"]


def test_a_rehearsal_under_way_on_the_page(client):
    asked = {"model": "scripted", "messages": ASKED, "tools": TOOLS}
    told = events(client.post("/v1/rehearsals", json={**asked, "mode": "parallel", "n": 2}).text)
    segments = [event for event in told if event["type"] == "segment"]
    for attempt in (0, 1):
        own = [(event["role"], event["text"]) for event in segments if event["attempt"] == attempt]
        assert own == [("act", BALANCE), ("rehearse", scripted.answering(IMAGINED)), ("act", "ann has 5")]
    memory, message, done = told[len(segments) :]
    assert memory == {"type": "memory", "text": NOTES}
    assert message["type"] == "message" and calls_of(message["message"]) == [("balance", {"owner": "ann"})]
    assert done["type"] == "done" and done["usage"]["rehearsal_tokens"]["completion_tokens"] > 0
    plain = events(client.post("/v1/rehearsals", json={**asked, "mode": "none"}).text)
    assert [event["type"] for event in plain] == ["message", "done"]
    wrong = client.post("/v1/rehearsals", json={**asked, "messages": [*ASKED, {"role": "assistant", "content": "5"}]})
    assert refusal(wrong, 400)["param"] == "messages"


@pytest.mark.parametrize("path", [CHAT, "/v1/rehearsals"])
def test_a_client_that_goes_away_ends_its_rehearsal(client, script, path):
    script.hold.clear()
    with pytest.raises(httpx.ReadTimeout):
        client.post(path, json=body(rehearsal={"mode": "parallel", "n": 6}, mode="parallel", n=1), timeout=0.5)
    time.sleep(0.3)
    script.hold.set()
    metrics = ""
    for _ in range(400):
        metrics = client.get("/metrics").text
        if "envace_choices_under_way 0.0" in metrics and "envace_slots_taken 0.0" in metrics:
            break
        time.sleep(0.02)
    assert "envace_choices_under_way 0.0" in metrics and "envace_slots_taken 0.0" in metrics
    assert "memory" not in script.played
    assert ask(client)


def test_a_memory_that_does_not_fit_is_left_out(script):
    """A context with room for the conversation and the rehearsal's own prompts, but not for it with these notes."""
    with (
        serving.scripted_model(script, style="full", max_length=30_000, chunk=50) as model,
        serving.serving(model) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        prompt = ask(client)["usage"]["prompt_tokens"]
        model.engine.max_length = prompt + 10  # what the server is held to; the sampler goes on as before
        script.played.clear()
        got = ask(client, rehearsal={"mode": "parallel", "n": 1})
        assert script.played == ["act", "rehearse", "act", "memory", "act"]
        assert got["usage"]["rehearsal_tokens"]["completion_tokens"] > 0
