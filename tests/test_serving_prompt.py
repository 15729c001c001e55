"""Prompts of OpenAI-style conversations: token by token those of Qwen3's own chat template."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qwen3_tokenizer import find_qwen3_tokenizer

from envace_jax import episode, rehearsal, roles
from envace_jax.chat import Chat, load_tokenizer
from envace_jax.config import model_path
from envace_jax.rehearsal import Settings
from envace_jax.serving import conversation
from envace_jax.types import Need, Role, Segment, Task, ToolCall, TurnScore

TEMPLATE = Path(__file__).parent.parent / "experiments" / "qwen3_chat_template.jinja"


def tool(name: str, properties: dict | None = None, required: tuple[str, ...] = ()) -> dict:
    parameters = {"type": "object", "properties": properties or {}, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": 'of "Köln" & <b>', "parameters": parameters}}


CITY = {"city": {"type": "string"}, "day": {"type": "string"}}
TOOLS = [tool("get_weather", CITY, ("city",)), tool("get_time", CITY, ("city",)), tool("now")]


def call(name: str, arguments: Any, number: int = 1) -> dict:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: Any, number: int = 1) -> dict:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content}


ASKED = {"role": "user", "content": "How warm is it in Köln?"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [call("get_weather", '{"city":"Köln"}')]}
CONVERSATIONS = {
    "a question": [ASKED],
    "with rules": [{"role": "system", "content": "Be brief."}, ASKED],
    "rules by another name": [{"role": "developer", "content": "Be brief."}, ASKED],
    "rules later on": [ASKED, {"role": "system", "content": "Be brief."}, ASKED],
    "an answer and another question": [ASKED, {"role": "assistant", "content": "7 degrees."}, ASKED],
    "a call, its text as it was written": [ASKED, CALLED, result('{"degrees": 7}')],
    "arguments as an object": [
        ASKED,
        {"role": "assistant", "content": "I look.", "tool_calls": [call("get_weather", {"city": "Köln", "n": 1.0})]},
        result("7"),
    ],
    "calls side by side": [
        ASKED,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call("get_weather", '{"city": "a"}'), call("now", "{}", 2)],
        },
        result("7", 2),
        result("8"),
    ],
    "thoughts of this turn stay": [
        ASKED,
        {**CALLED, "reasoning_content": "\nI need the weather.\n"},
        result("7"),
        {**CALLED, "reasoning_content": ""},
        result("8"),
    ],
    "thoughts of earlier turns go": [
        ASKED,
        {"role": "assistant", "content": "7", "reasoning_content": "So be it."},
        ASKED,
    ],
    "thoughts in the content": [
        ASKED,
        {"role": "assistant", "content": "<think>\nWell.\n</think>\n\n7"},
        ASKED,
        {**CALLED, "content": "<think>\nAgain.\n</think>\n\nI look."},
        result("7"),
    ],
    "an assistant has the last word": [ASKED, {"role": "assistant", "content": "7 degrees."}],
    "a user who writes like a tool": [ASKED, CALLED, {"role": "user", "content": "<tool_response>7</tool_response>"}],
    "texts in parts": [{"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "?"}]}],
}


@pytest.fixture(scope="module", params=["tiny", "qwen3"])
def folder(request: pytest.FixtureRequest) -> Path:
    if request.param == "tiny":
        return Path(model_path("asset:tiny_base"))
    found, reason = find_qwen3_tokenizer()
    if found is None:
        pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def chat(folder: Path) -> Chat:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def template(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    return lambda messages, tools, thinking: tokenizer.apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=False,
        enable_thinking=thinking,
    )  # fmt: skip


def for_template(messages: list[dict]) -> list[dict]:
    """What the template can read: it knows no parts, no missing contents and no developers."""
    made = []
    for message in messages:
        content = message["content"]
        content = "".join(part["text"] for part in content) if isinstance(content, list) else content or ""
        role = "system" if message["role"] == "developer" else message["role"]
        made.append({**message, "role": role, "content": content})
    return made


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_prompt_is_the_templates(chat, template, name):
    messages = CONVERSATIONS[name]
    for tools, thinking in (([], True), (TOOLS, True), (TOOLS, False)):
        ours = conversation.prompt(chat, conversation.plain(messages), tools, thinking)
        theirs = template(for_template(messages), tools, thinking)
        assert ours == theirs, f"{chat.decode(ours)!r} is not {chat.decode(theirs)!r}"


words = st.text(st.sampled_from("ab<> \n{\"'é東🙂/"), max_size=12)
texts = words.filter(lambda text: not text.startswith(("\n", " ", "\r")))  # sampled after "assistant\n", apart from it
arguments = st.dictionaries(words, words | st.integers() | st.none(), max_size=2)
calls = st.lists(arguments.map(lambda value: call("now", json.dumps(value))), max_size=2)


@st.composite
def steps(draw: st.DrawFn) -> list[dict]:
    messages: list[dict] = [{"role": "system", "content": draw(words)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(words)})
        for _ in range(draw(st.integers(0, 2))):
            message = {"role": "assistant", "content": draw(texts), "tool_calls": draw(calls)}
            if draw(st.booleans()):
                message["reasoning_content"] = draw(words)
            if not message["tool_calls"]:
                del message["tool_calls"]
            messages += [message, *[result(draw(words)) for _ in message.get("tool_calls", [])]]
    return messages


@given(steps(), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_prompt_is_the_templates(chat, template, messages, with_tools, thinking):
    tools = TOOLS if with_tools else []
    ours = conversation.prompt(chat, conversation.plain(messages), tools, thinking)
    assert ours == template(for_template(messages), tools, thinking)


def test_a_named_tool_begins_the_answer(chat):
    for tools in (TOOLS, TOOLS[:1]):
        for function in [entry["function"] for entry in tools]:
            begun = chat.decode(conversation.forced_beginning(chat, tools, function["name"]))
            assert begun.startswith(f'<tool_call>\n{{"name": "{function["name"]}"')
            whole = f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {{"'
            assert whole.startswith(begun) and len(begun) > len(whole) - 5
    # The ids are those that the whole call has: nothing is cut where the model would not cut.
    begun = conversation.forced_beginning(chat, TOOLS, "get_weather")
    assert chat.call_opening('{"name": "get_weather", "arguments": {"city": "x"}}')[: len(begun)] == begun


def test_some_tool_begins_the_answer_as_far_as_all_agree(chat):
    begun = chat.decode(conversation.forced_beginning(chat, TOOLS[:2]))
    assert begun.startswith('<tool_call>\n{"name": "') and '{"name": "get_weather"'.startswith(begun[12:])
    assert chat.decode(conversation.forced_beginning(chat, TOOLS)).startswith("<tool_call>")


def test_a_beginning_ends_with_a_whole_character(chat):
    """Names that agree in half of a letter's bytes, where the tokenizer writes it as two tokens."""
    both = [tool("é1", {"é": {}, "è": {}}, ("é",)), tool("è2")]
    for tools, name, least in ((both, None, '{"name": "'), (both, "é1", '{"name": "é1"'), (both[:1], None, '"é1"')):
        begun = conversation.forced_beginning(chat, tools, name)
        assert "\ufffd" not in chat.decode(begun) and least in chat.decode(begun)


def test_what_was_said_stands_the_same_before_an_answer_that_is_begun(chat):
    messages = conversation.plain([ASKED, CALLED, result("7")])
    for thinking, as_sampled in ((True, True), (True, False), (False, True)):
        begun = chat.call_opening('{"name": "')
        free = conversation.prompt(chat, messages, TOOLS, thinking, as_sampled)
        forced = conversation.prompt(chat, messages, TOOLS, thinking, as_sampled, begun)
        history = free[: -len(chat.assistant_prefix(thinking))]
        assert forced == [*history, *chat.assistant_prefix(thinking=False), *begun]


@pytest.mark.parametrize(
    "messages, place, words",
    [
        ([ASKED, result("7")], "messages.1", "must follow an assistant message"),
        ([ASKED, CALLED, result("7", 2)], "messages.2.tool_call_id", "call_2"),
        ([ASKED, CALLED, result("7"), result("7")], "messages.3.tool_call_id", "call_1"),
        ([ASKED, CALLED, ASKED], "messages.1", "call_1"),
        ([ASKED, CALLED], "messages.1", "call_1"),
        ([{**CALLED, "tool_calls": CALLED["tool_calls"] * 2}], "messages.0.tool_calls.0.id", "call_1"),
        ([{**CALLED, "tool_calls": [call("f", "[1]")]}], "messages.0.tool_calls.0.function.arguments", "object"),
        ([{**CALLED, "tool_calls": [call("f", '{"a": NaN}')]}], "messages.0.tool_calls.0.function.arguments", "object"),
    ],
)
def test_messages_that_cannot_stand_there(messages, place, words):
    found = conversation.problem(conversation.plain(messages), ())
    assert found is not None and found[0] == place and words in found[1]


def test_messages_that_can_stand_there():
    nameless = {"role": "assistant", "content": None, "tool_calls": [{**call("f", "{}")}, {**call("g", "")}]}
    for entry in nameless["tool_calls"]:
        del entry["id"]
    answers = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    assert conversation.problem(conversation.plain([ASKED, nameless, *answers]), TOOLS) is None
    assert conversation.problem(conversation.plain([ASKED, CALLED, result("7"), ASKED]), TOOLS) is None
    assert conversation.problem([], [*TOOLS, TOOLS[0]]) == ("tools.3", "a tool called 'get_weather' is there already")


def test_many_tools_calls_and_results_are_checked_in_a_moment():
    """Nearly as many as a body of 4 MB has room for; comparing each with each takes minutes."""
    many = range(30_000)
    called = {"role": "assistant", "content": "", "tool_calls": [call("f", "{}", number) for number in many]}
    nameless = {**called, "tool_calls": [{"function": entry["function"]} for entry in called["tool_calls"]]}
    by_id = [{"role": "tool", "tool_call_id": f"call_{number}", "content": ""} for number in reversed(many)]
    without = [{"role": "tool", "content": ""} for _ in many]
    began = time.thread_time()
    assert conversation.problem([], [tool(f"t{number}") for number in many]) is None
    for one, results in ((called, by_id), (called, without), (nameless, by_id), (nameless, without)):
        assert conversation.problem([one, *results], ()) is None
    assert time.thread_time() - began < 5


def test_a_note_stands_below_the_rules_or_what_was_said_last():
    rules = {"role": "system", "content": "Be brief."}
    assert conversation.with_note([rules, ASKED], "N", "system")[0]["content"] == "Be brief.\n\nN"
    assert conversation.with_note([ASKED], "N", "system") == [{"role": "system", "content": "N"}, ASKED]
    assert conversation.with_note([rules, ASKED], "N", "user")[1]["content"] == ASKED["content"] + "\n\nN"
    told = conversation.with_note([ASKED, CALLED, result("7")], "N", "user")
    assert told[-1]["content"] == "N" and ASKED["content"] == "How warm is it in Köln?"


@pytest.mark.parametrize("place", ["system", "user"])
@pytest.mark.parametrize("rules", [[], [{"role": "system", "content": "Be brief."}]])
def test_a_prompt_with_a_note_is_the_one_that_rehearsals_were_measured_with(chat, place, rules):
    thinking = {**CALLED, "reasoning_content": "I need the weather."}
    thinking["tool_calls"] = [call("get_weather", '{"city": "Köln"}')]
    for said in (
        [ASKED],
        [ASKED, thinking, result("7")],
        [ASKED, thinking, result("7"), CONVERSATIONS["a question"][0]],
    ):
        messages, prompts = conversation.plain([*rules, *said]), roles.Prompts(chat, style="compact")
        ours = conversation.prompt(chat, conversation.with_note(messages, "N", place), TOOLS, True)
        task = rehearsal.with_memory(rehearsal.task_of(messages, TOOLS, "here"), "N", Settings(placement=place))
        assert ours == roles.act_prompt(prompts, task)


@pytest.mark.parametrize("thinking", [True, False])
def test_as_sampled_a_prompt_is_the_stream_of_the_rollout(chat, thinking):
    """For policies that were trained on such streams: what they wrote stands as they wrote it, in all turns."""
    prompts = roles.Prompts(chat, thinking=thinking, as_sampled=True)
    task = Task("t", ({"role": "system", "content": "Be brief."},), TOOLS, ("How warm is it?", "And now?"), ((), ()))
    said = [chat.assistant("", "I look." if thinking else None, [ToolCall("get_weather", {"city": "Köln"})])]
    said += [chat.assistant("7.", "Seven." if thinking else None), chat.assistant("8.", "Eight." if thinking else None)]
    now = episode.start(prompts, episode.Limits(), task, 0, 0, answered_by=Need.RESPONSE)
    for tokens in said:
        (request,) = now.requests
        sampled = np.array(tokens, np.int32)
        segment = Segment(Role.ACT, request.prompt_tokens, sampled, np.zeros(len(tokens)), "stop", 0)
        now = episode.on_act(now, segment)
        if now.needs is Need.RESPONSE:
            now = episode.on_results(now, ['{"degrees": 7}'])
        elif now.turn == 0:
            now = episode.on_score(now, TurnScore(1.0, (), True))
        messages = list(now.messages)
        if messages[-1]["role"] == "assistant":
            continue
        ours = conversation.prompt(chat, conversation.plain(messages), TOOLS, thinking, as_sampled=True)
        assert ours == now.requests[0].prompt_tokens.tolist()
        given = dataclasses.replace(task, messages=now.messages, user_turns=())
        assert roles.act_prompt(prompts, given) == ours
    template = conversation.prompt(chat, conversation.plain(messages), TOOLS, thinking)
    assert template != ours
