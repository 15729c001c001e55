"""Text of sampled tokens as it comes: whatever the pieces are cut into, together they are what the whole gives."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax.chat import load_tokenizer, parse_assistant
from envace_jax.config import model_path
from envace_jax.serving.text import ReplyStream, TextStream, TokenBytes, read_reply
from envace_jax.types import ToolCall

CHAT = load_tokenizer(model_path("asset:tiny_base"))
TABLE = TokenBytes(CHAT.tokenizer)
LETTERS = [CHAT.tokenizer.token_to_id(letter) for letter in "abc"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def pieces_of(data: st.DataObject, whole: list) -> list[list]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    return [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


def streamed(pieces: list[list[int]], stops: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(TABLE, stops)
    return [*[stream.feed(piece, [0.0] * len(piece)) for piece in pieces], stream.finish()], stream


@given(st.data(), st.lists(st.integers(0, CHAT.vocab_size - 1), max_size=30))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_pieces_of_any_tokens_are_the_tokenizers_own_text(data, tokens):
    told, stream = streamed(pieces_of(data, tokens))
    assert "".join(told) == CHAT.decode(tokens) and stream.count == len(tokens)
    assert b"".join(token.data for token in stream.tokens).decode("utf-8", "replace") == CHAT.decode(tokens)


def test_half_a_character_waits_for_its_other_half():
    ids = [CHAT.tokenizer.token_to_id(character) for character in "ðŁĺĢ"]  # the four bytes of U+1F600
    assert None not in ids and CHAT.decode(ids) == "\U0001f600"
    assert streamed([[one] for one in ids])[0] == ["", "", "", "\U0001f600", ""]
    told, _ = streamed([ids[:2], LETTERS[:1]])
    assert told == ["", "�a", ""]  # it never came
    assert "".join(streamed([ids[:3]])[0]) == CHAT.decode(ids[:3])


def cut_at(text: str, stops: tuple[str, ...]) -> tuple[str, int | None]:
    """(text before the stop, characters up to the stop's end) letter by letter: the first end counts, the longest
    of those that end there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], end
    return text, None


@given(st.data(), st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=4), max_size=4))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_stop_strings_are_found_across_tokens_and_never_half_told(data, text, stops):
    tokens = [LETTERS["abc".index(letter)] for letter in text]
    told, stream = streamed(pieces_of(data, tokens), tuple(stops))
    expected, used = cut_at(text, tuple(stops))
    assert "".join(told) == expected
    assert (stream.stop is not None) == (used is not None)
    assert stream.count == (len(tokens) if used is None else used)  # tokens after it are not counted


def test_a_stop_inside_a_long_token_cuts_it():
    ids = CHAT.encode("hello there")
    told, stream = streamed([ids], ("lo t",))
    assert "".join(told) == "hel" and stream.stop == "lo t" and stream.count == 3 == len(ids)
    assert TextStream(TABLE, ("lo t", "hello")).feed(ids, [0.0] * len(ids)) == ""
    # Of two in one token the one that ends first, as if letters came one by one.
    word = CHAT.encode("hello")
    assert len(word) == 1 and TextStream(TABLE, ("hello", "el")).feed(word, [0.0]) == "h"


def test_a_stop_id_counts_and_says_nothing():
    stream = TextStream(TABLE)
    assert stream.feed([LETTERS[0], CHAT.end_of_message, LETTERS[1]], [0.0, -1.0, 0.0], CHAT.stop_ids) == "a"
    assert stream.count == 2 and [token.text for token in stream.tokens] == ["a"]


@pytest.mark.parametrize(
    "text, reasoning, content, calls",
    [
        ("hello", "", "hello", 0),
        ("\n\nhello\n\nyou\n", "", "hello\n\nyou", 0),
        ("<think>\nso\n\nfar\n</think>\n\nhello\n", "so\n\nfar", "hello", 0),
        ("<think>\n\n</think>\n\nhello", "", "hello", 0),
        ("<think>never closed", "never closed", "", 0),
        ("a<think>b</think>c<think>\nd</think>", "b\nd", "ac", 0),
        ("1 < 2 <thin", "", "1 < 2 <thin", 0),
        (CALL, "", "", 1),
        (f"<think>x</think>\nI look.\n{CALL}\n{CALL}", "x", "I look.", 2),
        (f"I look.\n{CALL}\nthen", "", "I look.\nthen", 1),
        (f"a {CALL}<think>later</think>", "later", "a ", 1),
        ("I look.\n<tool_call>\n{oops}\n</tool_call>", "", "I look.\n<tool_call>\n{oops}\n</tool_call>", 0),
        (f"{CALL}\n<tool_call>\n{{", "", f"{CALL}\n<tool_call>\n{{", 0),
        ("done</tool_call>", "", "done</tool_call>", 0),
        (f"<think>{CALL}</think>no", CALL, "no", 0),
    ],
)
def test_what_a_message_says(text, reasoning, content, calls):
    reply = read_reply(text, calls=True)
    assert (reply.reasoning, reply.content, len(reply.calls)) == (reasoning, content, calls)
    assert all(call == ToolCall("f", {"x": 1}) for call in reply.calls)
    assert read_reply(text, calls=False).calls == ()


PARTS = st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "\n", "a", "<", "<tool", " "])


@given(st.data(), st.lists(PARTS, max_size=8).map("".join), st.booleans())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_any_pieces_of_a_message_say_what_the_whole_says(data, text, calls):
    stream = ReplyStream(calls)
    told = [*[stream.feed("".join(piece)) for piece in pieces_of(data, list(text))], stream.finish()]
    whole = read_reply(text, calls)
    assert "".join(reply.reasoning for reply in told) == whole.reasoning
    assert "".join(reply.content for reply in told) == whole.content
    assert told[-1].calls == whole.calls
    parsed = parse_assistant(text)
    if calls and parsed.error is None and "</think>" not in text:
        assert whole.calls == parsed.calls


@given(st.data(), st.lists(PARTS, max_size=8).map("".join))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_single_call_ends_the_message_wherever_the_pieces_are_cut(data, text):
    stream = ReplyStream(calls=True, single=True)
    told = [*[stream.feed("".join(piece)) for piece in pieces_of(data, list(text))], stream.finish()]
    closed = [end for end in range(len(text) + 1) if text[:end].endswith("</tool_call>")]
    ends = [end for end in closed if read_reply(text[:end], calls=True).calls]
    whole = read_reply(text[: ends[0]] if ends else text, calls=True)
    assert stream.over == bool(ends) and len(whole.calls) == bool(ends)
    assert "".join(reply.reasoning for reply in told) == whole.reasoning
    assert "".join(reply.content for reply in told) == whole.content and told[-1].calls == whole.calls


def test_content_is_told_before_the_message_ends():
    stream = ReplyStream(calls=True)
    assert stream.feed("one <").content == "one "
    assert stream.feed("b> two\n").content == "<b> two"
    assert stream.feed("three<tool").content == "\nthree"
    assert stream.feed(CALL.removeprefix("<tool")).content == "" and len(stream.finish().calls) == 1


def test_another_kind_of_tokenizer_is_refused(tmp_path):
    from tokenizers import Tokenizer, decoders, models

    other = Tokenizer(models.BPE())
    other.decoder = decoders.Metaspace()
    with pytest.raises(ValueError, match="Metaspace; only byte-level"):
        TokenBytes(other)
    assert json.dumps(TABLE[LETTERS[0]].decode()) == '"a"'
