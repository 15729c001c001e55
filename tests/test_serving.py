"""The server over HTTP, with a script in place of the model: what is asked of it, and how what it says is told."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import re
import socket
import threading
import time

import httpx
import pytest
import scripted
import serving

from envace_jax.serving import streams
from envace_jax.serving.app import Options, _read_chat, make_app
from envace_jax.serving.protocol import RequestError
from envace_jax.types import ToolCall

CHAT = "/v1/chat/completions"
CALL = scripted.calling(ToolCall("balance", {"owner": "ann"}))
TWO = scripted.calling(ToolCall("balance", {"owner": "ann"}), ToolCall("deposit", {"owner": "é", "amount": "3"}))
TOOLS = [scripted.tool("balance", "owner"), scripted.tool("deposit", "owner", "amount"), scripted.tool("now")]
CLOSING = scripted.calling(ToolCall("balance", {"owner": "a </tool_call> in it"}))
SAYS = {
    "hello": "\nhello é😀 you.\n\nbye",
    "think": "<think>\nso: <b>\n</think>\n\nI think.",
    "call": f"<think>\nsee\n</think>\n\nI look.\n{CALL}",
    "two": TWO,
    "malformed": f"I look.\n{CALL}\n<tool_call>\n{{oops}}\n</tool_call>",
    "open": "I look.\n<tool_call>\n{",
    "stopping": "one two three ENDING four",
    "closing": "<think>\nno </tool_call> yet\n</think>\n\n" + CLOSING + f"\n{CALL}",
    "fault": "fault",
    "long": "x" * 3000,
}


def answer(prompt: str, request) -> str:
    """By the first word that the user said last; after a beginning that was given, the rest of it."""
    said, _, begun = prompt.rpartition("<|im_start|>assistant\n")
    if "<tool_call>" in begun:
        text = CALL.replace("balance", "now") if '"now' in begun else CALL
        begun = begun.removeprefix("<think>\n\n</think>\n\n")
        return text[len(begun) :] if text.startswith(begun) else "?"
    return SAYS[re.findall(r"user\n(\w+)", said)[-1]]


@pytest.fixture(scope="module")
def model():
    with serving.scripted_model(answer) as made:
        yield made


@pytest.fixture(scope="module")
def client(model):
    with serving.serving(model) as url, httpx.Client(base_url=url, timeout=60) as made:
        yield made


def body(word: str, **more) -> dict:
    return {"model": "scripted", "messages": [{"role": "user", "content": f"{word} , please"}], **more}


def ask(client, word: str, **more):
    response = client.post(CHAT, json=body(word, **more))
    assert response.status_code == 200, response.text
    return response.json()


def events(text: str) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def streamed(client, word: str, **more) -> list[dict]:
    response = client.post(CHAT, json=body(word, stream=True, **more))
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def together(chunks: list[dict], index: int = 0) -> tuple[dict, str]:
    """(message, finish reason) of a choice's chunks."""
    message, reason = {}, None
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        assert reason is None, "something after the end"
        for key, value in choice["delta"].items():
            message[key] = message.get(key, "" if isinstance(value, str) else []) + value
        reason = choice["finish_reason"]
    return message, reason


def calls_of(message: dict) -> list[tuple[str, dict]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]


@pytest.mark.parametrize(
    "word, reasoning, content, calls, reason",
    [
        ("hello", None, "hello é😀 you.\n\nbye", [], "stop"),
        ("think", "so: <b>", "I think.", [], "stop"),
        ("call", "see", "I look.", [("balance", {"owner": "ann"})], "tool_calls"),
        ("two", None, None, [("balance", {"owner": "ann"}), ("deposit", {"owner": "é", "amount": "3"})], "tool_calls"),
        ("malformed", None, SAYS["malformed"], [], "stop"),
        ("open", None, SAYS["open"], [], "stop"),
    ],
)
def test_a_message_whole_and_streamed(client, word, reasoning, content, calls, reason):
    got = ask(client, word, tools=TOOLS)
    (choice,) = got["choices"]
    message = choice["message"]
    assert (got["object"], got["model"], message["role"]) == ("chat.completion", "scripted", "assistant")
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
    assert (calls_of(message), choice["finish_reason"]) == (calls, reason)
    assert len({call["id"] for call in message.get("tool_calls", ())}) == len(calls)
    chunks = streamed(client, word, tools=TOOLS)
    told, why = together(chunks)
    assert (told.get("reasoning_content"), told["content"] or None, why) == (reasoning, content, reason)
    assert calls_of(told) == calls and [call["index"] for call in told.get("tool_calls", ())] == list(range(len(calls)))
    assert {(chunk["id"], chunk["object"]) for chunk in chunks} == {(chunks[0]["id"], "chat.completion.chunk")}


def test_content_is_streamed_as_it_is_drawn(client):
    chunks = streamed(client, "stopping")
    assert len([1 for chunk in chunks if chunk["choices"][0]["delta"].get("content")]) > 5


def test_without_tools_nothing_is_a_call(client, model):
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message = ask(client, "two", **more)["choices"][0]["message"]
        assert message["content"] == TWO and "tool_calls" not in message
        assert "balance" not in model.engine._sampler.prompts[-1]


def test_tool_choice_begins_the_answer(client, model):
    named = ask(client, "hello", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}})
    assert [name for name, _ in calls_of(named["choices"][0]["message"])] == ["now"]
    prompt = model.engine._sampler.prompts[-1]
    assert prompt.endswith('<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {')
    required = ask(client, "hello", tools=TOOLS[:2], tool_choice="required")["choices"][0]
    assert calls_of(required["message"]) == [("balance", {"owner": "ann"})]
    assert required["finish_reason"] == "tool_calls"
    assert model.engine._sampler.prompts[-1].endswith('<tool_call>\n{"name": "')
    told, _ = together(streamed(client, "hello", tools=TOOLS[:2], tool_choice="required"))
    assert calls_of(told) == [("balance", {"owner": "ann"})]


def test_only_one_call_where_they_are_not_to_be_parallel(client):
    got = ask(client, "two", tools=TOOLS, parallel_tool_calls=False)
    assert calls_of(got["choices"][0]["message"]) == [("balance", {"owner": "ann"})]
    assert got["choices"][0]["finish_reason"] == "tool_calls"
    assert got["usage"]["completion_tokens"] < ask(client, "two", tools=TOOLS)["usage"]["completion_tokens"] / 2 + 5


def test_a_tag_in_an_argument_or_a_thought_ends_no_call(client):
    for parallel in (True, False):
        got = ask(client, "closing", tools=TOOLS, parallel_tool_calls=parallel)
        message = got["choices"][0]["message"]
        assert message["reasoning_content"] == "no </tool_call> yet" and message["content"] is None
        called = [("balance", {"owner": "a </tool_call> in it"}), ("balance", {"owner": "ann"})]
        assert calls_of(message) == called[: 1 + parallel] and got["choices"][0]["finish_reason"] == "tool_calls"
    drawn = SAYS["closing"].partition(CLOSING)[0] + CLOSING
    assert got["usage"]["completion_tokens"] == len(scripted.spelled(drawn))  # to the end of the first call, no further
    told, _ = together(streamed(client, "closing", tools=TOOLS, parallel_tool_calls=False))
    assert calls_of(told) == called[:1]


@pytest.mark.parametrize("parameters", [
    {"properties": 5}, {"properties": True}, {"properties": [[1]]}, {"properties": "ab"}, {"properties": None},
    {"properties": {"a": 1}, "required": 3}, {"properties": {"": {}}, "required": {"a": [1]}}, {"$ref": "#/x"}, {},
    None,
])  # fmt: skip
def test_a_tool_whose_schema_says_nothing_can_be_chosen(client, model, parameters):
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        ask(client, "hello", tools=tools, tool_choice=choice)
        assert '<tool_call>\n{"name": "f"' in model.engine._sampler.prompts[-1].rpartition("assistant\n")[2]


@pytest.mark.parametrize("stop, content", [("END", "one two three "), (["zzz", "o t"], "one tw"), ("three ENDING", "")])
def test_stop_strings(client, stop, content):
    content = "one two " if stop == "three ENDING" else content
    got = ask(client, "stopping", stop=stop)
    assert (got["choices"][0]["message"]["content"], got["choices"][0]["finish_reason"]) == (content, "stop")
    found = min(SAYS["stopping"].find(one) + len(one) for one in ([stop] if isinstance(stop, str) else stop[1:]))
    assert got["usage"]["completion_tokens"] == found  # a byte a token, up to the stop's end
    assert together(streamed(client, "stopping", stop=stop)) == ({"role": "assistant", "content": content}, "stop")


def test_limits_and_usage(client):
    for name in ("max_tokens", "max_completion_tokens"):
        got = ask(client, "hello", **{name: 8})
        assert got["choices"][0]["finish_reason"] == "length" and got["usage"]["completion_tokens"] == 8
        assert got["choices"][0]["message"]["content"] == "hello �"  # a newline and half of an é were drawn
    usage = ask(client, "hello")["usage"]
    assert usage["completion_tokens"] == len(SAYS["hello"].encode()) + 1  # the end of the message is drawn too
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] // 2
    chunks = streamed(client, "hello", stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == usage
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert all("usage" not in chunk for chunk in streamed(client, "hello"))


def test_several_choices(client):
    got = ask(client, "hello", n=3)
    one = ask(client, "hello")
    assert [choice["index"] for choice in got["choices"]] == [0, 1, 2]
    assert got["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    assert got["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    chunks = streamed(client, "think", n=2)
    assert together(chunks, 0) == together(chunks, 1) and together(chunks)[0]["content"] == "I think."


@pytest.mark.parametrize("more", [{"stop": "END"}, {"tools": TOOLS, "parallel_tool_calls": False}])
def test_a_choice_that_ends_before_the_others_leaves_them_be(more):
    """Its request is given up in the engine, while the others go on for many steps."""
    said = [f"a{CALL}END no more", "b" * 200 + CALL + "END no more", "c" * 400]

    with serving.scripted_model(lambda prompt, request: said[request.key_ids[2]]) as model:
        with serving.serving(model) as url, httpx.Client(base_url=url, timeout=60) as client:
            got = ask(client, "hello", n=3, **more)
            chunks = streamed(client, "hello", n=3, **more)
    calls = "tools" in more
    wanted = ["a" + CALL * (not calls), "b" * 200 + CALL * (not calls), said[2]]
    assert [choice["message"]["content"] for choice in got["choices"]] == wanted
    assert [len(calls_of(choice["message"])) for choice in got["choices"]] == [calls, calls, 0]
    assert [together(chunks, index)[0]["content"] for index in range(3)] == wanted
    usage = got["usage"]  # what the script found in its cache is told however a choice ends
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] // 2 > 0


def test_logprobs_of_every_drawn_token(client):
    told = ask(client, "hello", logprobs=True)["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in told) == SAYS["hello"].encode()
    ids = scripted.spelled(SAYS["hello"])
    assert [token["logprob"] for token in told] == pytest.approx([-one / 1000 for one in ids])
    assert told[1]["token"] == "h" and told[7]["token"] == "�" and told[0]["top_logprobs"] == []
    chunks = streamed(client, "hello", logprobs=True)
    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert [token for part in parts for token in part["content"]] == told
    assert ask(client, "hello")["choices"][0]["logprobs"] is None


def test_what_is_sampled_follows_from_the_request(client, model):
    seen = []
    model.engine._sampler.answer, before = (
        lambda prompt, request: (seen.append(request), answer(prompt, request))[1],
        model.engine._sampler.answer,
    )
    ask(client, "hello", temperature=0.3, top_p=0.9, seed=-5, n=2)
    ask(client, "hello")
    ask(client, "hello")
    model.engine._sampler.answer = before
    assert [(one.temperature, one.top_p) for one in seen] == [(0.3, 0.9)] * 2 + [(1.0, 1.0)] * 2
    assert seen[0].key_ids[0] == seen[1].key_ids[0] == -5 and len({one.key_ids for one in seen}) == 4


def test_thinking_can_be_turned_off_and_on(client, model):
    ask(client, "hello", chat_template_kwargs={"enable_thinking": True})
    assert model.engine._sampler.prompts[-1].endswith("assistant\n")
    ask(client, "hello", chat_template_kwargs={"enable_thinking": False, "other": 1})
    assert model.engine._sampler.prompts[-1].endswith("</think>\n\n")


def test_what_was_said_stands_the_same_before_an_answer_that_is_begun(model):
    """So that what was read for the one is not read again for the other."""
    served = dataclasses.replace(model, prompts=dataclasses.replace(model.prompts, thinking=True, as_sampled=True))
    messages = [*body("hello")["messages"], {"role": "assistant", "content": "well"}, *body("bye")["messages"]]
    free, begun = (
        _read_chat(served, json.dumps(body("", messages=messages, tools=TOOLS, tool_choice=choice)).encode()).prompt
        for choice in ("auto", "required")
    )
    assert begun[: len(free)] == free and len(begun) > len(free)


def refusal(response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"} and set(response.json()["error"]) == {"message", "type", "param", "code"}
    return response.json()["error"]


@pytest.mark.parametrize(
    "change, param",
    [
        ({"top_logprobs": 2, "logprobs": True}, "top_logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_what_is_not_supported_is_said_plainly(client, change, param):
    error = refusal(client.post(CHAT, json=body("hello", **change)), 400)
    assert error["param"].startswith(param) and "support" in error["message"]
    assert error["type"] == "invalid_request_error"


def test_unknown_and_neutral_fields_change_nothing(client):
    more = {"store": False, "metadata": {}, "num_ctx": 1, "presence_penalty": 0, "logit_bias": {}, "top_logprobs": 0}
    more |= {"response_format": {"type": "text"}, "stop": None, "tools": None, "user": "me", "rehearsal": None}
    assert ask(client, "hello", **more)["choices"][0]["message"]["content"].startswith("hello")


def test_a_prompt_that_leaves_no_room(client):
    error = refusal(client.post(CHAT, json=body("hello " + "x" * 4000)), 400)
    assert error["code"] == "context_length_exceeded" and "4000 tokens" in error["message"]


def test_keys(model):
    key = "schlüssel"
    with serving.serving(model, Options(api_key=key)) as url:
        for given in ({}, {"authorization": "Bearer schl"}, {"authorization": f"Basic {key}".encode()}):
            assert refusal(httpx.post(url + CHAT, json=body("hello"), headers=given), 401)["code"] == "invalid_api_key"
        assert refusal(httpx.get(url + "/v1/models"), 401)
        assert httpx.get(url + "/v1/models", headers={"authorization": f"Bearer {key}".encode()}).status_code == 200
        assert httpx.get(url + "/health").status_code == 200
    with serving.serving(model, Options(api_key="key")) as url:
        assert httpx.post(url + CHAT, json=body("hello"), headers={"authorization": "bearer key"}).status_code == 200


def test_names_that_it_is_not_called_by(model):
    with serving.serving(model, Options(hosts=("localhost", "127.0.0.1", "::1"))) as url:
        for name, status in (("evil.example:80", 403), ("localhost", 200), ("[::1]:5", 200), ("127.0.0.1:1", 200)):
            response = httpx.post(url + CHAT, json=body("hello"), headers={"host": name})
            assert response.status_code == status
        assert httpx.get(url + "/v1/models", headers={"host": "evil.example"}).status_code == 403


def test_too_large_a_body_is_refused_and_the_connection_ends_in_order(model):
    with serving.serving(model, Options(max_body=1000)) as url:
        assert refusal(httpx.post(url + CHAT, json=body("hello " + "x" * 1000)), 413)
        assert refusal(httpx.post(url + CHAT, content=b"x" * 5_000_000), 415)
        assert httpx.post(url + CHAT, json=body("hello")).status_code == 200


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slots(stream):
    with (
        serving.scripted_model(answer, pace_s=0.01) as model,
        serving.running(make_app(model)) as url,
        httpx.Client(base_url=url) as client,
    ):
        for _ in range(3):
            if stream:
                with client.stream("POST", CHAT, json=body("long", stream=True, n=6)) as response:
                    parts = response.iter_raw()  # which closes the connection when it is gone
                    next(parts)
                    until(lambda: model.engine.running == 4 and model.engine.waiting == 2)
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(CHAT, json=body("long", n=6), timeout=0.3)
            until(lambda: model.engine.running == model.engine.waiting == 0)
        assert ask(client, "hello")
        assert b"envace_disconnects_total 3.0" in client.get("/metrics").content
        assert b"envace_choices_under_way 0.0" in client.get("/metrics").content


def test_a_client_that_reads_no_more_frees_its_slots(monkeypatch):
    monkeypatch.setattr(streams, "SEND_SECONDS", 0.3)
    data = json.dumps(body("long", stream=True, n=24, logprobs=True)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    with (
        serving.scripted_model(answer, slots=24, chunk=300) as model,
        serving.running(make_app(model)) as url,
        socket.socket() as idle,
    ):
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        idle.sendall(f"{head}\r\n\r\n".encode() + data)
        until(lambda: "envace_disconnects_total 1.0" in httpx.get(f"{url}/metrics").text)
        assert "envace_choices_under_way 0.0" in httpx.get(f"{url}/metrics").text


def test_more_than_may_wait_is_refused_until_there_is_room():
    with (
        serving.scripted_model(answer, pace_s=0.01) as model,
        serving.serving(model, Options(queue=2)) as url,
        httpx.Client(base_url=url) as client,
        client.stream("POST", CHAT, json=body("long", stream=True, n=5)) as response,
    ):
        parts = response.iter_raw()
        next(parts)
        busy = client.post(CHAT, json=body("hello", n=2))
        assert refusal(busy, 429)["type"] == "rate_limit_error" and busy.headers["retry-after"] == "1"
        response.close()
        until(lambda: client.post(CHAT, json=body("hello", n=2)).status_code == 200)


def test_a_fault_of_the_device_is_told_and_outlived(client):
    assert "out of memory" in refusal(client.post(CHAT, json=body("fault")), 503)["message"]
    response = client.post(CHAT, json=body("fault", stream=True))
    assert events(response.text)[-1]["error"]["code"] == "unavailable"
    assert ask(client, "hello")


def test_while_it_stops_it_takes_nothing_new_and_finishes_what_runs():
    with serving.scripted_model(answer, pace_s=0.01) as model:
        app = make_app(model)
        with serving.running(app) as url, httpx.Client(base_url=url, timeout=60) as client:
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                whole = thread.submit(ask, client, "stopping")
                until(lambda: model.engine.running == 1)
                app.state.service.stopping = True
                assert refusal(httpx.post(url + CHAT, json=body("hello")), 503)["code"] == "unavailable"
                assert refusal(httpx.get(url + "/health"), 503)
                assert whole.result(60)["choices"][0]["message"]["content"] == SAYS["stopping"]


def test_models_health_and_metrics(client):
    (found,) = client.get("/v1/models").json()["data"]
    assert found == client.get("/v1/models/scripted").json()
    assert (found["id"], found["object"], found["created"]) == ("scripted", "model", 1_700_000_000)
    assert refusal(client.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert client.get("/health").json() == {"status": "ok"}

    def figure(name):
        lines = client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = figure('envace_tokens_total{kind="completion"}')
    usage = ask(client, "hello")["usage"]
    assert figure('envace_tokens_total{kind="completion"}') - before == usage["completion_tokens"]
    assert figure('envace_requests_total{method="POST",route="/v1/chat/completions",status="200"}') >= 1
    assert figure("envace_slots ") == 4 and figure("envace_first_token_seconds_count") >= 1
    assert figure("envace_choices_under_way") == figure("envace_slots_taken") == figure("envace_prompts_waiting") == 0


def test_wrong_places_and_methods(client):
    assert refusal(client.get("/nowhere"), 404)["code"] == "not_found"
    wrong = client.get(CHAT)
    assert refusal(wrong, 405)["code"] == "method_not_allowed" and wrong.headers["allow"] == "POST"


def test_the_document_describes_what_is_accepted(client):
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    posted = document["paths"][CHAT]["post"]
    assert posted["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatRequest")
    assert {"400", "401", "404", "413", "415", "429", "503"} <= set(posted["responses"]) and "422" not in str(document)
    assert schemas["ChatRequest"]["required"] == ["model", "messages"]
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert references <= set(schemas)


def test_the_event_loop_goes_on_while_a_long_prompt_is_read(model):
    """The part that takes long is tokenising, in a thread: the others must get their turns meanwhile."""
    text, stop, longest = "é東 lamp " * 60_000, threading.Event(), 0.0

    def beat():
        nonlocal longest
        last = time.monotonic()
        while not stop.wait(0.002):
            longest, last = max(longest, time.monotonic() - last), time.monotonic()

    thread = threading.Thread(target=beat)
    thread.start()
    began = time.monotonic()
    with pytest.raises(RequestError, match="context length"):
        _read_chat(model, json.dumps(body(text)).encode())
    took = time.monotonic() - began
    stop.set()
    thread.join()
    assert longest < took / 2, (longest, took)
