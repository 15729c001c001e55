"""The tiny model behind the server: same seed, same answer; prompts that begin alike are read once; rehearsals."""

from __future__ import annotations

import concurrent.futures

import httpx
import pytest
import serving

from envace_jax.envs import load_domain
from envace_jax.sampling import SampleRequest
from envace_jax.serving import conversation
from envace_jax.serving.completions import STREAM

CHAT = "/v1/chat/completions"
TOOLS = list(load_domain("shop").TOOLS)


@pytest.fixture(scope="module")
def model():
    with serving.served() as found:
        yield found


@pytest.fixture(scope="module")
def client(model):
    with serving.serving(model) as url, httpx.Client(base_url=url, timeout=120) as made:
        yield made


def body(word: str, **more) -> dict:
    message = {"role": "user", "content": f"how much does the {word} cost here ?"}
    return {"model": serving.NAME, "messages": [message], "tools": TOOLS, "max_tokens": 24, **more}


def ask(client, word: str, **more) -> dict:
    response = client.post(CHAT, json=body(word, **more))
    assert response.status_code == 200, response.text
    return response.json()


def texts(got: dict) -> list[tuple]:
    """What was said, without the ids of calls."""
    found = []
    for choice in got["choices"]:
        calls = [call["function"] for call in choice["message"].get("tool_calls", ())]
        found.append((choice["message"]["content"], calls, choice["finish_reason"]))
    return found


def test_the_same_seed_gives_the_same_answer_whatever_else_is_decoded(client):
    wanted = {"temperature": 1.5, "seed": 11, "n": 3, "tool_choice": "none"}
    alone = texts(ask(client, "lamp", **wanted))
    assert len({str(text) for text in alone}) == 3
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        free = wanted | {"seed": None, "n": 1}
        others = [threads.submit(ask, client, word, **free) for word in ("desk", "lamp") * 6]
        again = [threads.submit(ask, client, "lamp", **wanted) for _ in range(3)]
        assert [texts(one.result()) for one in again] == [alone] * 3
        assert len({str(texts(one.result())) for one in others}) > 4  # no seed: different numbers each time
    assert texts(ask(client, "lamp", **wanted | {"n": 1})) == alone[:1]


def test_answers_are_the_samplers_own(model, client):
    """The same request without a server: prompt, random numbers and tokens, and then text."""
    got = ask(client, "lamp", temperature=1.0, seed=3, tool_choice="none", logprobs=True)
    prompt = conversation.prompt(model.chat, body("lamp")["messages"], (), thinking=False)
    sample = model.engine.submit(SampleRequest(0, prompt, 24, (3, STREAM, 0))).result(60)
    tokens = sample.tokens.tolist()
    drawn = tokens[:-1] if tokens[-1] in model.chat.stop_ids else tokens
    assert got["usage"]["prompt_tokens"] == len(prompt) and got["usage"]["completion_tokens"] == len(tokens)
    assert got["choices"][0]["message"]["content"] == model.chat.decode(drawn).strip("\n")
    told = [token["logprob"] for token in got["choices"][0]["logprobs"]["content"]]
    assert told == pytest.approx(sample.logprobs[: len(drawn)].tolist(), abs=1e-5)


def test_what_was_read_before_is_not_read_again(model, client):
    wanted = {"temperature": 0, "chat_template_kwargs": {"enable_thinking": True}}
    first = ask(client, "kettle", **wanted)
    again = ask(client, "kettle", **wanted)
    size = first["usage"]["prompt_tokens"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == size - 1  # the last one draws
    calls = first["choices"][0]["message"].get("tool_calls", ())
    told = [{"role": "tool", "tool_call_id": call["id"], "content": '{"price": 35}'} for call in calls]
    told = told or [{"role": "user", "content": "and the lamp ?"}]
    messages = [*body("kettle")["messages"], first["choices"][0]["message"], *told]
    second = ask(client, "kettle", messages=messages, **wanted)["usage"]
    # All that came before the answer; that began with empty thoughts, which the template leaves out now.
    assert size <= second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]
    other = ask(client, "carpet", temperature=0)["usage"]
    assert 40 < other["prompt_tokens_details"]["cached_tokens"] < other["prompt_tokens"] - 5  # the tools before it
    assert model.engine.stats.reused_tokens > 0


def test_a_rehearsal_of_the_model_itself(client):
    wanted = {"seed": 1, "temperature": 0, "rehearsal": {"mode": "parallel", "n": 2, "return_transcript": True}}
    got = ask(client, "lamp", **wanted)
    assert len(got["rehearsal"]["attempts"]) == 2
    roles = [segment["role"] for attempt in got["rehearsal"]["attempts"] for segment in attempt["segments"]]
    assert roles.count("act") >= 2 and roles.count("rehearse") >= 1
    counts = got["usage"]["rehearsal_tokens"]
    assert counts["completion_tokens"] > 20 and counts["cached_tokens"] > 0
    wanted["rehearsal"]["reuse"] = False
    again = ask(client, "lamp", **wanted)  # other requests were decoded meanwhile
    assert texts(again) == texts(got) and again["rehearsal"] == got["rehearsal"]
