"""The server from outside: the official openai client, and every kind of malformed request.

The tiny model answers, greedily where an answer is compared: what it says is what it was taught (docs/tiny_world.md).
"""

from __future__ import annotations

import asyncio
import json
import math
import time

import malformed_requests as malformed
import pytest
import serving
from browser import CHROMIUM, Browser

from envace_jax.envs import load_domain
from envace_jax.serving.app import Options

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
TOOLS = list(load_domain("shop").TOOLS)
PRICE = [{"role": "user", "content": "how much does the lamp cost here ?"}]
BOTH = [{"role": "user", "content": "what does the lamp cost and how many are left ?"}]
GREEDY = {"model": serving.NAME, "temperature": 0, "tools": TOOLS}
KEY = "sesame"
ENDLESS = "WULGNKVIMPYNHUQGY VYITYSMCLQY MXHVOATKWSANXGIXFPG VMCINZCOTO"  # the tiny model finds no end to its answer


@pytest.fixture(scope="module")
def model():
    with serving.served() as found:
        yield found


@pytest.fixture(scope="module")
def url(model):
    with serving.serving(model) as address:
        yield address


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def called(message) -> list[tuple[str, dict]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def answered(messages, reply, *results):
    """The conversation after a reply with calls and what they gave, as agents put it together."""
    told = [
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)}
        for call, result in zip(reply.tool_calls, results, strict=True)
    ]
    return [*messages, reply.model_dump(exclude_none=True), *told]


# --- the openai client ---


def test_an_agent_calls_a_tool_and_tells_its_result(client):
    first = client.chat.completions.create(**GREEDY, messages=PRICE)
    (choice,) = first.choices
    assert (first.object, first.model, choice.finish_reason) == ("chat.completion", serving.NAME, "tool_calls")
    assert called(choice.message) == [("price", {"item": "lamp"})] and choice.message.content is None
    told = answered(PRICE, choice.message, {"price": 35})
    second = client.chat.completions.create(**GREEDY, messages=told)
    assert second.choices[0].message.content == "the lamp costs 35." and second.choices[0].finish_reason == "stop"
    usage = second.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens  # the first request's beginning was kept
    assert first.id != second.id and first.created <= second.created


def test_calls_side_by_side_unless_they_are_not_wanted(client):
    both = client.chat.completions.create(**GREEDY, messages=BOTH).choices[0].message
    assert called(both) == [("price", {"item": "lamp"}), ("stock", {"item": "lamp"})]
    assert len({call.id for call in both.tool_calls}) == 2
    reply = client.chat.completions.create(**GREEDY, messages=answered(BOTH, both, {"price": 35}, {"stock": 2}))
    assert reply.choices[0].message.content == "the lamp costs 35, 2 left."
    one = client.chat.completions.create(**GREEDY, messages=BOTH, parallel_tool_calls=False).choices[0].message
    assert called(one) == [("price", {"item": "lamp"})]


def test_the_choice_of_tools_is_kept(client):
    def asked(choice):
        return client.chat.completions.create(**GREEDY, messages=PRICE, tool_choice=choice).choices[0].message

    assert asked("none").tool_calls is None
    named = called(asked({"type": "function", "function": {"name": "stock"}}))
    assert [name for name, _ in named] == ["stock"]
    greeting = [{"role": "user", "content": "hello there , how are you today ?"}]
    free = client.chat.completions.create(**GREEDY, messages=greeting).choices[0].message
    assert free.content == "hello, what can i do?" and free.tool_calls is None
    required = client.chat.completions.create(**GREEDY, messages=greeting, tool_choice="required").choices[0].message
    assert required.tool_calls


def test_a_stream_gives_what_the_whole_gives(client):
    whole = client.chat.completions.create(**GREEDY, messages=BOTH)
    with client.chat.completions.stream(**GREEDY, messages=BOTH, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    assert called(final.choices[0].message) == called(whole.choices[0].message)
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    told = answered(BOTH, whole.choices[0].message, {"price": 35}, {"stock": 2})
    chunks = list(client.chat.completions.create(**GREEDY, messages=told, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "the lamp costs 35, 2 left."
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert len({c.id for c in chunks}) == 1 and chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices and c.usage is None for c in chunks)  # usage was not asked for


def test_several_clients_at_once_get_what_each_gets_alone(url, client):
    names = ["lamp", "desk", "chair", "mug", "pen", "rug", "sofa", "clock", "vase", "bowl", "fork", "kettle"]
    questions = [[{"role": "user", "content": f"how much does the {name} cost here ?"}] for name in names]

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:

            async def whole(question):
                return (await made.chat.completions.create(**GREEDY, messages=question)).choices[0].message

            async def streamed(question):
                async with made.chat.completions.stream(**GREEDY, messages=question) as stream:
                    return (await stream.get_final_completion()).choices[0].message

            asked = [(streamed if place % 2 else whole)(question) for place, question in enumerate(questions)]
            return await asyncio.gather(*asked)

    together = asyncio.run(ask_all())
    assert [called(message) for message in together] == [[("price", {"item": name})] for name in names]


def test_sampling_follows_the_seed(client):
    def texts(seed, **more):
        got = client.chat.completions.create(
            model=serving.NAME, messages=PRICE, temperature=1.5, max_tokens=12, seed=seed, **more
        )
        return [choice.message.content for choice in got.choices]

    three = texts(1, n=3)
    assert len(set(three)) == 3 and texts(1, n=3) == three and texts(1) == three[:1] != texts(2)
    assert texts(1, top_p=0.0) == texts(2, top_p=0.0)  # only the most likely token is left
    unseeded = {texts(openai.NOT_GIVEN)[0] for _ in range(4)}
    assert len(unseeded) > 1


def test_stops_limits_and_logprobs(client):
    plain = {"model": serving.NAME, "temperature": 0, "messages": PRICE, "tools": TOOLS, "tool_choice": "none"}
    whole = client.chat.completions.create(**plain, max_tokens=16, logprobs=True).choices[0]
    text, told = whole.message.content, whole.logprobs.content
    assert b"".join(bytes(token.bytes) for token in told).decode().strip("\n") == text
    assert all(token.logprob <= 0 and math.isfinite(token.logprob) for token in told)
    short = client.chat.completions.create(**plain, max_tokens=3)
    assert short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 3
    assert text.startswith(short.choices[0].message.content)
    word = text.split()[1]
    stopped = client.chat.completions.create(**plain, max_tokens=16, stop=[word, "never"]).choices[0]
    assert stopped.finish_reason == "stop" and stopped.message.content == text.split(word)[0].rstrip("\n")


def test_models(client):
    assert [found.id for found in client.models.list()] == [serving.NAME]
    assert client.models.retrieve(serving.NAME).id == serving.NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_unknown_fields_are_ignored(client):
    got = client.chat.completions.create(
        **GREEDY, messages=PRICE, store=False, metadata={"a": "b"}, user="me", service_tier="auto",
        extra_body={"num_ctx": 4096, "repetition_penalty": 1.0},
    )  # fmt: skip
    assert called(got.choices[0].message) == [("price", {"item": "lamp"})]


def test_errors_are_the_clients_own_exceptions(model, client):
    def refused(kind, **changed):
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**{**GREEDY, "messages": PRICE, **changed})
        return caught.value

    wrong = refused(openai.BadRequestError, temperature=9)
    assert (wrong.param, wrong.type, wrong.status_code) == ("temperature", "invalid_request_error", 400)
    assert refused(openai.NotFoundError, model="gpt-4o").code == "model_not_found"
    long = [{"role": "user", "content": "lamp " * 5000}]
    assert refused(openai.BadRequestError, messages=long).code == "context_length_exceeded"
    assert refused(openai.BadRequestError, messages=long, stream=True).code == "context_length_exceeded"
    with serving.serving(model, Options(api_key=KEY)) as locked:
        for key in ("none", KEY + "e", KEY[:-1], "schlüssel".encode("latin-1").decode("latin-1")):
            with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
                openai.OpenAI(base_url=f"{locked}/v1", api_key=key, max_retries=0).models.list()
        opened = openai.OpenAI(base_url=f"{locked}/v1", api_key=KEY, max_retries=0)
        assert called(opened.chat.completions.create(**GREEDY, messages=PRICE).choices[0].message)


def test_a_client_that_goes_away_is_not_answered_any_more(model, client):
    """In the middle of a stream, and while it waits for a whole answer: what is left is never drawn."""
    endless = {"model": serving.NAME, "messages": [{"role": "user", "content": ENDLESS}], "temperature": 0}
    whole = client.chat.completions.create(**endless)
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens > 800
    engine = model.engine
    before, times = engine.stats.decoded_tokens, 6
    for _ in range(times):
        stream = client.chat.completions.create(**endless, stream=True)
        assert any(chunk.choices[0].delta.content for chunk in stream)
        stream.close()
        idle(engine)
    impatient = client.with_options(timeout=0.05)
    for _ in range(times):
        with pytest.raises(openai.APITimeoutError):
            impatient.chat.completions.create(**endless)
        idle(engine)
    assert engine.stats.decoded_tokens - before < 2 * times * 800 / 2
    assert called(client.chat.completions.create(**GREEDY, messages=PRICE).choices[0].message)


def idle(engine, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while engine.running or engine.waiting:
        assert time.monotonic() < end, "a request that nobody waits for is still under way"
        time.sleep(0.01)


# --- the page ---


@needs_browser
@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_the_page_rehearses_with_the_tiny_model(url, tmp_path, mode):
    """From the example to the answer: what is played in private is of both roles, and a call is committed."""
    with Browser(tmp_path) as page:
        page.open(f"{url}/")
        page.wait_for(f"document.getElementById('model').textContent === '{serving.NAME}'")
        page.click(f"input[value={mode}]")
        page.js("document.getElementById('n').value = '2'; document.getElementById('task').focus()")
        page.key("Enter", "ctrl")
        page.wait_for("document.getElementById('run').disabled === false", seconds=240)
        assert page.js("document.getElementById('error').textContent") == ""
        assert page.js("document.querySelectorAll('.attempt').length") == 2
        for kind, tag in (("act", "Act"), ("rehearse", "Rehearse")):
            assert page.js(f"document.querySelector('.attempt .{kind} .tag').textContent") == tag
        assert page.js("document.querySelector('.memory').textContent").startswith("Memory")
        assert page.js("document.querySelector('.committed pre').textContent") == 'price {"item":"lamp"}'
        assert "in rehearsal" in page.js("document.getElementById('steps').textContent")
        page.js("document.getElementById('result-0').value = '{\"price\": 35}'")
        page.click("input[value=none]")
        page.click("#run")
        page.wait_for("document.querySelectorAll('.committed pre').length === 2", seconds=120)
        assert page.js("[...document.querySelectorAll('.committed pre')][1].textContent") == "the lamp costs 35."
        assert page.complaints() == [] and all(address.startswith(url) for address in page.requests())


# --- malformed requests ---


@pytest.fixture(scope="module")
def plain(url):
    with httpx.Client(base_url=url, timeout=60) as made:
        yield made


def check_refusal(response, status: int, word: str) -> None:
    """A refusal in OpenAI's shape: one line that names the place or the reason, and nothing of the server's inside."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and isinstance(error["type"], str)
    assert word in error["message"] + (error["param"] or "")
    assert len(error["message"]) < 500 and "\n" not in error["message"]
    assert not any(inside in error["message"] for inside in ("Traceback", "pydantic", "site-packages", "object at 0x"))


def cases(corpus):
    return pytest.mark.parametrize("case", corpus, ids=[case[0].replace(" ", "-") for case in corpus])


@cases(malformed.BODIES)
def test_a_malformed_body_is_refused(plain, case):
    _, change, status, word = case
    body = malformed.broken(malformed.good(serving.NAME), change)
    check_refusal(plain.post(malformed.CHAT, content=json.dumps(body), headers=malformed.JSON), status, word)


@cases(malformed.REHEARSALS)
def test_a_malformed_rehearsal_is_refused(plain, case):
    _, change, status, word = case
    body = malformed.broken(malformed.good(serving.NAME), change)
    check_refusal(plain.post(malformed.REHEARSE, content=json.dumps(body), headers=malformed.JSON), status, word)


@cases(malformed.RAW)
@pytest.mark.parametrize("place", [malformed.CHAT, malformed.REHEARSE], ids=["chat", "rehearsals"])
def test_bytes_that_are_no_body_are_refused(plain, case, place):
    _, data, headers, status, word = case
    data = data.replace(b"MODEL", serving.NAME.encode())
    check_refusal(plain.post(place, content=data, headers=headers), status, word)


@cases(malformed.ROUTES)
def test_a_wrong_place_is_refused(plain, case):
    _, method, path, status = case
    check_refusal(plain.request(method, path), status, "")


def test_a_body_without_an_end_is_refused_before_it_is_kept(plain):
    """Sent in chunks, with no length told: the limit counts what comes."""
    sent = 0

    def endless():
        nonlocal sent
        yield b'{"messages": "'
        for _ in range(malformed.MEGABYTES * 100):
            sent += 1 << 20
            yield b"a" * (1 << 20)

    try:
        response = plain.post(malformed.CHAT, content=endless(), headers=malformed.JSON)
        check_refusal(response, 413, "bytes")
    except httpx.WriteError:  # the server closed the connection, with its answer unread
        pass
    assert sent < malformed.MEGABYTES * 50 << 20


def test_the_good_body_is_good_and_still_served(plain, model):
    """So that it is what was broken that was refused; and nothing of all that is left in the engine."""
    assert plain.post(malformed.CHAT, json=malformed.good(serving.NAME)).status_code == 200
    body = malformed.GOOD.replace("MODEL", serving.NAME).encode()
    assert plain.post(malformed.CHAT, content=body, headers=malformed.JSON).status_code == 200
    assert plain.get("/health").status_code == 200 and model.engine.alive and model.engine.faults == 0
    count = sum(map(len, (malformed.BODIES, malformed.REHEARSALS, malformed.RAW, malformed.ROUTES)))
    assert count >= 180
