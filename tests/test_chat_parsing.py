"""The parser of assistant messages: every way to be malformed, and fuzzing against a slow oracle."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax.chat import ParsedAssistant, parse_assistant, render_call
from envace_jax.types import ToolCall

WEATHER = ToolCall("get_weather", {"city": "Köln 🌧", "days": [1, 2.5, None, True]})
NOW = ToolCall("now", {})
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def tagged(*bodies_: str) -> str:
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies_)


def test_parse_thoughts_content_and_several_calls() -> None:
    text = "<think>\nfirst\n</think>\n\nLet me look.\n" + tagged(render_call(WEATHER), render_call(NOW)) + "<|im_end|>"
    parsed = parse_assistant(text)
    assert (parsed.reasoning, parsed.content, parsed.error) == ("first", "Let me look.", None)
    assert parsed.calls == (WEATHER, NOW)


@pytest.mark.parametrize("text", ["Hello.", "<think>\n\n</think>\n\nHello.<|endoftext|>", "\n\nHello.\n<|im_end|>"])
def test_plain_reply(text: str) -> None:
    parsed = parse_assistant(text)
    assert (parsed.content, parsed.calls, parsed.error) == ("Hello.", (), None)


def test_empty_message_is_a_plain_reply() -> None:
    assert parse_assistant("<|im_end|>") == parse_assistant("") == ParsedAssistant("", "", (), None)


def test_a_call_inside_the_thoughts_is_not_a_call() -> None:
    inside = tagged(render_call(WEATHER))
    parsed = parse_assistant(f"<think>Maybe {inside} ?</think>Hello.")
    assert (parsed.calls, parsed.error, parsed.content) == ((), None, "Hello.")
    assert parsed.reasoning == f"Maybe {inside} ?"
    parsed = parse_assistant(f"<think>{inside}</think>\n\n{tagged(render_call(NOW))}")
    assert parsed.calls == (NOW,) and parsed.error is None
    later = parse_assistant(f"<think>a</think>{tagged(render_call(NOW))}<think>{inside}</think>end")
    assert later.calls == (NOW,) and later.reasoning == f"a\n{inside}" and later.content == "end"


def test_thoughts_opened_by_the_prompt() -> None:
    parsed = parse_assistant("still thinking\n</think>\n\nHello.")
    assert (parsed.reasoning, parsed.content, parsed.error) == ("still thinking", "Hello.", None)


def test_a_closing_think_tag_later_on_is_content() -> None:
    parsed = parse_assistant(f"<think>a</think>b</think>{tagged(render_call(NOW))}c</think>")
    assert (parsed.reasoning, parsed.content, parsed.error) == ("a", "b</think>\nc</think>", None)
    assert parsed.calls == (NOW,)
    parsed = parse_assistant(f"b{tagged(render_call(NOW))}c</think>")
    assert (parsed.reasoning, parsed.content, parsed.calls) == ("", "b\nc</think>", (NOW,))


def test_tags_inside_a_call_are_its_text() -> None:
    tricky = ToolCall("write", {"text": "</tool_call><tool_call></think><think>", "</tool_call>": 1})
    parsed = parse_assistant(tagged(render_call(tricky), render_call(NOW)))
    assert parsed.calls == (tricky, NOW) and parsed.error is None


@pytest.mark.parametrize("arguments", ['"{\\"a\\": 1}"', '{"a": 1}', '{"a": 0, "a": 1}'])
def test_accepted_arguments(arguments: str) -> None:
    """An object; the JSON text of an object, as OpenAI writes it; a repeated key counts as json.loads counts it."""
    parsed = parse_assistant(f'<tool_call>{{"name": "x", "arguments": {arguments}}}</tool_call>')
    assert parsed.calls == (ToolCall("x", {"a": 1}),) and parsed.error is None


def nested(depth: int) -> str:
    return '{"name": "x", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}"


MALFORMED = {
    "<think>hm": "<think> is never closed by </think>",
    "<think>" + tagged(render_call(NOW)): "<think> is never closed by </think>",
    'Sure.\n<tool_call>\n{"name": "x", "argu': "tool call 1: <tool_call> is never closed by </tool_call>",
    "<tool_call>" + render_call(NOW): "tool call 1: <tool_call> is never closed by </tool_call>",
    render_call(NOW) + "</tool_call>": "</tool_call> without <tool_call> before it",
    tagged(""): "tool call 1: not valid JSON: Expecting value at character 0",
    tagged(render_call(NOW), "{'name': 1}"): "tool call 2: not valid JSON: Expecting property name",
    tagged(render_call(NOW) * 2): "tool call 1: not valid JSON: text after the value at character 32",
    tagged("```json\n{}\n```"): "tool call 1: not valid JSON",
    tagged("[]"): "expected a JSON object with name and arguments, found an array",
    tagged("null"): "expected a JSON object with name and arguments, found null",
    tagged('{"arguments": {}}'): "no name",
    tagged('{"name": "", "arguments": {}}'): "name must be a non-empty string, found an empty string",
    tagged('{"name": " ", "arguments": {}}'): "name must be a non-empty string, found an empty string",
    tagged('{"name": 3, "arguments": {}}'): "name must be a non-empty string, found a number",
    tagged('{"name": null, "arguments": {}}'): "name must be a non-empty string, found null",
    tagged('{"name": "x"}'): "no arguments",
    tagged('{"name": "x", "arguments": [1]}'): "arguments must be a JSON object, found an array",
    tagged('{"name": "x", "arguments": true}'): "arguments must be a JSON object, found a boolean",
    tagged('{"name": "x", "arguments": "[1]"}'): "arguments must be a JSON object, found an array",
    tagged('{"name": "x", "arguments": "{"}'): "arguments is a string without valid JSON",
    tagged('{"name": "x", "arguments": {"a": NaN}}'): "NaN and infinite numbers are not allowed",
    tagged('{"name": "x", "arguments": {"a": -Infinity}}'): "NaN and infinite numbers are not allowed",
    tagged('{"name": "x", "arguments": {"a": 1e999}}'): "NaN and infinite numbers are not allowed",
    tagged('{"name": "x", "arguments": "{\\"a\\": NaN}"}'): "NaN and infinite numbers are not allowed",
    tagged('{"name": "x", "arguments": {"\\ud800": 1}}'): "a lone surrogate is no character",
    tagged('{"name": "x", "arguments": {"a": ' + "9" * 5000 + "}}"): "an integer has too many digits",
    tagged(nested(64)): "nested deeper than 64 levels",
    tagged(nested(200_000)): "nested",
    tagged('{"name": "x", "arguments": "' + "[" * 200_000 + '"}'): "nested",
}


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_messages_say_why(text: str) -> None:
    parsed = parse_assistant(text)
    assert parsed.error is not None and MALFORMED[text] in parsed.error and "\n" not in parsed.error
    assert parsed.calls == ()


def test_limits_that_are_fine() -> None:
    digits = "9" * 4000
    parsed = parse_assistant(tagged('{"name": "x", "arguments": {"a": ' + digits + "}}", nested(63)))
    assert parsed.error is None and parsed.calls[0].arguments["a"] == int(digits)


def test_name_with_escapes_round_trips() -> None:
    assert render_call(ToolCall("größe", {"a": "ü"})) == '{"name": "größe", "arguments": {"a": "ü"}}'
    odd = ToolCall('a"b\\', {})
    assert parse_assistant(tagged(render_call(odd))).calls == (odd,)


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>", "\n", " ", "text", "<", "</"),
    *(render_call(NOW), render_call(ToolCall("w", {"t": "</tool_call>"})), "{", "}", "[", "]", ",", ":", '"', "\\"),
    *('"name"', '"arguments"', '{"name": "x", "arguments": ', "NaN", "1e999", '"\\ud800"', "{}", '"{}"', "1"),
]


def calls_between_tags(text: str) -> list[tuple[str, Any]]:
    """Every (name, arguments) that stands between some opening and some closing tag: slow, and blind to context."""
    found = []
    for start in range(len(text)):
        if not text.startswith("<tool_call>", start):
            continue
        for end in range(start, len(text)):
            if text.startswith("</tool_call>", end):
                try:
                    value = json.loads(text[start + len("<tool_call>") : end])
                except ValueError:
                    continue
                if isinstance(value, dict) and "name" in value and "arguments" in value:
                    try:
                        arguments = value["arguments"]
                        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
                    except ValueError:
                        continue
                    found.append((value["name"], arguments))
    return found


@given(st.lists(st.sampled_from(FRAGMENTS) | any_text, max_size=25).map("".join))
@settings(max_examples=400, deadline=None)
def test_fuzz_no_exception_and_no_invented_call(text: str) -> None:
    parsed = parse_assistant(text)
    assert parsed.error is None or not parsed.calls
    possible = calls_between_tags(text)
    for call in parsed.calls:
        assert isinstance(call.name, str) and call.name and isinstance(call.arguments, dict)
        assert (call.name, call.arguments) in possible
    assert len(parsed.calls) <= text.count("<tool_call>")
    if "tool_call>" in text and not parsed.calls and "think>" not in text:
        assert parsed.error is not None  # a message that tried to call never passes as a plain reply


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: raw.decode("utf-8", "surrogateescape")))
@settings(max_examples=200, deadline=None)
def test_fuzz_inside_a_call(body: str) -> None:
    parsed = parse_assistant(f"<tool_call>{body}</tool_call>")
    assert parsed.error is not None or len(parsed.calls) == 1


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 200_000,
        "<think></think>" * 100_000,
        "<think>" * 200_000,
        "</think>" * 200_000,
        "<" * 2_000_000,
        "<tool_call>" + " " * 2_000_000,
        '<tool_call>{"a": "' + "<tool_call>" * 100_000,
        tagged(render_call(NOW)) * 30_000,
        "<tool_call>" + "{" * 1_000_000,
    ],
    ids=range(9),
)
def test_parsing_is_linear(text: str) -> None:
    """Megabytes of the worst input in about a second; anything quadratic would take minutes."""
    start = time.perf_counter()
    parse_assistant(text)
    assert time.perf_counter() - start < 5
