"""Ways in which a request to the server can be malformed, and what must be answered: a status, and words of the reason.

`BODIES`: (name, what breaks a good body, status, word of the message); what breaks it changes the body in place, or
gives a tuple with what stands in its place. `RAW` has bytes in place of a body, and headers; `REHEARSALS` break a body
for /v1/rehearsals; `ROUTES` are requests to wrong places. Imports nothing of the server, so that it can be sent to any.
"""

from __future__ import annotations

import codecs
import gzip
import json

from malformed import DROP, instead, put

CHAT = "/v1/chat/completions"
REHEARSE = "/v1/rehearsals"
MEGABYTES = 10
JSON = {"content-type": "application/json"}
ITEM = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
PRICE = {"type": "function", "function": {"name": "price", "parameters": ITEM}}
ASKED = {"role": "user", "content": "how much does the lamp cost here ?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "price", "arguments": '{"item": "lamp"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": '{"price": 5}'}


def good(model: str) -> dict:
    """A body with which nothing is wrong."""
    return {"model": model, "messages": [dict(ASKED)], "tools": [json.loads(json.dumps(PRICE))], "max_tokens": 4}


def broken(body, change):
    """The body after the change."""
    replaced = change(body)
    return replaced[0] if isinstance(replaced, tuple) else body


def messages(*given):
    return put("messages", [json.loads(json.dumps(message)) for message in given])


def content(value):
    return put("messages", 0, "content", value)


def tool(**changes):
    """The tool's function with these entries changed."""
    function = {**PRICE["function"], **changes}
    kept = {name: value for name, value in function.items() if value is not DROP}
    return put("tools", [{"type": "function", "function": kept}])


def history(*path_and_value):
    """A conversation with a call and its result, of which a place is changed."""

    def change(body):
        body["messages"] = json.loads(json.dumps([ASKED, CALLED, RESULT]))
        return put("messages", *path_and_value)(body)

    return change


def both(*changes):
    def change(body):
        for one in changes:
            one(body)

    return change


def nested(depth, inner=1):
    for _ in range(depth):
        inner = {"a": inner}
    return inner


BODIES = (
    # the whole
    ("an array", instead([]), 400, "object"),
    ("a text", instead("hello"), 400, "object"),
    ("null", instead(None), 400, "object"),
    ("a number", instead(3), 400, "object"),
    ("nothing in it", instead({}), 400, "model"),
    ("no model", put("model", DROP), 400, "model"),
    # the model
    ("a model that is not there", put("model", "gpt-4o"), 404, "gpt-4o"),
    ("a model that is a number", put("model", 3), 400, "model"),
    ("a model that is a list", put("model", ["a"]), 400, "model"),
    ("a model of two lines", put("model", "gpt\n4o" * 5000), 404, "gpt"),
    ("a model without a name", put("model", ""), 404, "model"),
    # the messages
    ("no messages", put("messages", DROP), 400, "messages"),
    ("messages null", put("messages", None), 400, "messages"),
    ("messages a text", put("messages", "hello"), 400, "messages"),
    ("messages an object", put("messages", dict(ASKED)), 400, "messages"),
    ("an empty list of messages", put("messages", []), 400, "messages"),
    ("a message that is a text", put("messages", ["hello"]), 400, "messages"),
    ("a message that is null", put("messages", [None]), 400, "messages"),
    ("a message that is a list", put("messages", [[]]), 400, "messages"),
    ("an empty message", put("messages", [{}]), 400, "role"),
    ("a message without a role", put("messages", 0, "role", DROP), 400, "role"),
    ("an unknown role", put("messages", 0, "role", "robot"), 400, "role"),
    ("a role that is a number", put("messages", 0, "role", 1), 400, "role"),
    ("a role that is null", put("messages", 0, "role", None), 400, "role"),
    ("no content", content(DROP), 400, "content"),
    ("content null", content(None), 400, "content"),
    ("content a number", content(5), 400, "content"),
    ("content an object", content({"text": "hello"}), 400, "content"),
    ("content true", content(True), 400, "content"),
    ("a part that is a text", content(["hello"]), 400, "content"),
    ("a part without a type", content([{"text": "hello"}]), 400, "content"),
    ("a part without its text", content([{"type": "text"}]), 400, "text"),
    ("a part whose text is a number", content([{"type": "text", "text": 3}]), 400, "text"),
    ("a picture", content([{"type": "image_url", "image_url": {"url": "data:,"}}]), 400, "image_url"),
    ("half a surrogate pair", content("\ud800"), 400, "surrogate"),
    ("a system message without content", messages({"role": "system"}, ASKED), 400, "content"),
    # calls and their results
    ("a result without a call", messages(ASKED, RESULT), 400, "tool"),
    ("a result of nothing that was called", history(2, "tool_call_id", "call_2"), 400, "tool_call_id"),
    ("a result whose id is a number", history(2, "tool_call_id", 1), 400, "tool_call_id"),
    ("a result that is an object", history(2, "content", {"price": 5}), 400, "content"),
    ("a result without content", history(2, "content", DROP), 400, "content"),
    ("a call without a result", messages(ASKED, CALLED, ASKED), 400, "call_1"),
    ("a result twice", messages(ASKED, CALLED, RESULT, RESULT), 400, "tool_call_id"),
    ("two calls with one id", history(1, "tool_calls", [CALL, CALL]), 400, "call_1"),
    ("tool_calls an object", history(1, "tool_calls", CALL), 400, "tool_calls"),
    ("tool_calls of a user", put("messages", 0, {**CALLED, "role": "user"}), 400, "content"),
    ("a call that is a text", history(1, "tool_calls", ["price"]), 400, "tool_calls"),
    ("a call whose id is a number", history(1, "tool_calls", 0, "id", 1), 400, "id"),
    ("a call of another type", history(1, "tool_calls", 0, "type", "retrieval"), 400, "type"),
    ("a call without a function", history(1, "tool_calls", 0, "function", DROP), 400, "function"),
    ("a call without a name", history(1, "tool_calls", 0, "function", "name", DROP), 400, "name"),
    ("arguments a number", history(1, "tool_calls", 0, "function", "arguments", 5), 400, "arguments"),
    ("arguments that are not JSON", history(1, "tool_calls", 0, "function", "arguments", "{item"), 400, "arguments"),
    ("arguments a list", history(1, "tool_calls", 0, "function", "arguments", "[1]"), 400, "arguments"),
    ("arguments not a number", history(1, "tool_calls", 0, "function", "arguments", '{"n": NaN}'), 400, "arguments"),
    # tools
    ("tools a text", put("tools", "price"), 400, "tools"),
    ("tools an object", put("tools", PRICE), 400, "tools"),
    ("a tool that is a text", put("tools", ["price"]), 400, "tools"),
    ("a tool of another type", put("tools", 0, "type", "retrieval"), 400, "type"),
    ("a tool without a function", put("tools", 0, "function", DROP), 400, "function"),
    ("a function that is a text", put("tools", 0, "function", "price"), 400, "function"),
    ("a function without a name", tool(name=DROP), 400, "name"),
    ("a function with an empty name", tool(name=""), 400, "name"),
    ("a name with quotes", tool(name='the "price"'), 400, "name"),
    ("a name of 5000 letters", tool(name="price" * 1000), 400, "name"),
    ("a name with a line break", tool(name="price\n"), 400, "name"),
    ("a name that is a number", tool(name=3), 400, "name"),
    ("a description that is a list", tool(description=["a"]), 400, "description"),
    ("parameters a text", tool(parameters="item"), 400, "parameters"),
    ("parameters a list", tool(parameters=["item"]), 400, "parameters"),
    ("two tools of one name", put("tools", [PRICE, PRICE]), 400, "price"),
    ("deep parameters", tool(parameters=nested(400)), 400, "nested"),
    ("a choice of none such", put("tool_choice", "sometimes"), 400, "tool_choice"),
    ("a choice that is a number", put("tool_choice", 1), 400, "tool_choice"),
    ("a choice without a function", put("tool_choice", {"type": "function"}), 400, "tool_choice"),
    (
        "a choice of a tool that is not there",
        put("tool_choice", {"type": "function", "function": {"name": "stock"}}),
        400,
        "stock",
    ),
    (
        "a choice whose name is a number",
        put("tool_choice", {"type": "function", "function": {"name": 5}}),
        400,
        "tool_choice",
    ),
    ("required without tools", both(put("tools", DROP), put("tool_choice", "required")), 400, "tool_choice"),
    ("parallel calls a text", put("parallel_tool_calls", "yes"), 400, "parallel_tool_calls"),
    # numbers
    ("a temperature in words", put("temperature", "hot"), 400, "temperature"),
    ("a temperature that is true", put("temperature", True), 400, "temperature"),
    ("a temperature below 0", put("temperature", -0.1), 400, "temperature"),
    ("a temperature above 2", put("temperature", 2.1), 400, "temperature"),
    ("top_p below 0", put("top_p", -0.1), 400, "top_p"),
    ("top_p above 1", put("top_p", 1.5), 400, "top_p"),
    ("top_p a list", put("top_p", [1]), 400, "top_p"),
    ("no token at all", put("max_tokens", 0), 400, "max_tokens"),
    ("fewer tokens than none", put("max_tokens", -5), 400, "max_tokens"),
    ("half a token", put("max_tokens", 1.5), 400, "max_tokens"),
    ("tokens in words", put("max_completion_tokens", "many"), 400, "max_completion_tokens"),
    ("no answer", put("n", 0), 400, "n"),
    ("a million answers", put("n", 1_000_000), 400, "n"),
    ("answers in words", put("n", "2"), 400, "n"),
    ("half an answer", put("n", 1.5), 400, "n"),
    ("a seed in words", put("seed", "x"), 400, "seed"),
    ("a seed of 31 digits", put("seed", 10**30), 400, "seed"),
    # the rest
    ("a stop that is a number", put("stop", 3), 400, "stop"),
    ("a stop that is an object", put("stop", {"a": 1}), 400, "stop"),
    ("a stop of numbers", put("stop", [1, 2]), 400, "stop"),
    ("an empty stop", put("stop", ""), 400, "stop"),
    ("five stops", put("stop", list("abcde")), 400, "stop"),
    ("a stream in words", put("stream", "yes"), 400, "stream"),
    ("stream options of no stream", put("stream_options", {"include_usage": True}), 400, "stream_options"),
    ("stream options in words", both(put("stream", True), put("stream_options", "all")), 400, "stream_options"),
    (
        "usage in words",
        both(put("stream", True), put("stream_options", {"include_usage": "please"})),
        400,
        "include_usage",
    ),
    ("logprobs in words", put("logprobs", "yes"), 400, "logprobs"),
    ("top logprobs without logprobs", put("top_logprobs", 1), 400, "top_logprobs"),
    ("top logprobs below 0", both(put("logprobs", True), put("top_logprobs", -1)), 400, "top_logprobs"),
    ("100 top logprobs", both(put("logprobs", True), put("top_logprobs", 100)), 400, "top_logprobs"),
    ("a prompt beyond the context", content("lamp " * 5000), 400, "context"),
    # rehearsal
    ("a rehearsal in words", put("rehearsal", "parallel"), 400, "rehearsal"),
    ("a rehearsal that is a list", put("rehearsal", []), 400, "rehearsal"),
    ("a mode that is not there", put("rehearsal", {"mode": "twice", "n": 2}), 400, "mode"),
    ("a mode that is a number", put("rehearsal", {"mode": 1, "n": 2}), 400, "mode"),
    ("no attempt", put("rehearsal", {"mode": "parallel", "n": 0}), 400, "n"),
    ("fewer attempts than none", put("rehearsal", {"mode": "parallel", "n": -1}), 400, "n"),
    ("a million attempts", put("rehearsal", {"mode": "parallel", "n": 1_000_000}), 400, "n"),
    ("attempts in words", put("rehearsal", {"mode": "parallel", "n": "four"}), 400, "n"),
    ("attempts true", put("rehearsal", {"mode": "parallel", "n": True}), 400, "n"),
    (
        "a transcript in words",
        put("rehearsal", {"mode": "parallel", "n": 1, "return_transcript": "please"}),
        400,
        "return_transcript",
    ),
    (
        "rehearsing what has ended",
        both(put("messages", [ASKED, {"role": "assistant", "content": "5"}]), put("rehearsal", {"mode": "parallel"})),
        400,
        "messages",
    ),
)  # fmt: skip

GOOD = json.dumps(good("MODEL"))  # MODEL: to be replaced by the served one's name
TWICE = GOOD[:-1] + ', "max_tokens": 5}'


def number(field, text):
    """The good body with a number that `json.dumps` would not write so."""
    return (GOOD[:-1] + f', "{field}": {text}}}').encode()


RAW = (
    # no JSON
    ("an empty body", b"", JSON, 400, "JSON"),
    ("white space", b" \n\t ", JSON, 400, "JSON"),
    ("plain words", b"hello", JSON, 400, "JSON"),
    ("half a body", GOOD[: len(GOOD) // 2].encode(), JSON, 400, "JSON"),
    ("more after the end", GOOD.encode() + b" {}", JSON, 400, "JSON"),
    ("single quotes", b"{'model': 'MODEL'}", JSON, 400, "JSON"),
    ("a comment", b"/* hi */ " + GOOD.encode(), JSON, 400, "JSON"),
    ("a trailing comma", GOOD[:-1].encode() + b",}", JSON, 400, "JSON"),
    ("a key twice", TWICE.encode(), JSON, 400, "max_tokens"),
    ("a key twice within", GOOD.replace('"role"', '"role": "system", "role"').encode(), JSON, 400, "role"),
    # numbers that JSON has not, or that nothing can hold
    ("not a number", number("temperature", "NaN"), JSON, 400, "NaN"),
    ("infinity", number("top_p", "Infinity"), JSON, 400, "Infinity"),
    ("minus infinity", number("seed", "-Infinity"), JSON, 400, "Infinity"),
    ("a number too large for a float", number("temperature", "1e999"), JSON, 400, ""),
    ("a number of 6000 digits", number("seed", "9" * 6000), JSON, 400, ""),
    ("a number too large in an unknown field", number("unknown", "9" * 6000), JSON, 400, ""),
    # encodings
    ("UTF-16", GOOD.encode("utf-16"), JSON, 400, "UTF-8"),
    ("UTF-32", GOOD.encode("utf-32-be"), JSON, 400, ""),
    ("Latin-1", GOOD.replace("lamp", "lämp").encode("latin-1"), JSON, 400, "UTF-8"),
    ("an overlong zero", GOOD.encode().replace(b"lamp", b"\xc0\x80"), JSON, 400, "UTF-8"),
    ("a surrogate in UTF-8", GOOD.encode().replace(b"lamp", b"\xed\xa0\x80"), JSON, 400, "UTF-8"),
    ("a control character", GOOD.encode().replace(b"lamp", b"la\x07mp"), JSON, 400, "JSON"),
    ("two marks of byte order", codecs.BOM_UTF8 * 2 + GOOD.encode(), JSON, 400, ""),
    ("compressed", gzip.compress(GOOD.encode()), {**JSON, "content-encoding": "gzip"}, 415, "gzip"),
    # sizes and nesting
    ("10 MB of text", GOOD.replace("lamp", "lamp " * (MEGABYTES << 18)).encode(), JSON, 413, "bytes"),
    ("10 MB of brackets", b"[" * (MEGABYTES << 20), JSON, 413, "bytes"),
    ("deep arrays", b"[" * 100_000 + b"]" * 100_000, JSON, 400, "nested"),
    ("deep objects", b'{"a":' * 5000 + b"1" + b"}" * 5000, JSON, 400, "nested"),
    ("deep content", number("messages", '[{"role": "user", "content": ' + "[" * 900 + "]" * 901 + "]"), JSON, 400, ""),
    ("a deep unknown field", number("unknown", "[" * 50_000 + "]" * 50_000), JSON, 400, "nested"),
    # content types: what a page of another site can send without asking is none of them
    ("plain text", GOOD.encode(), {"content-type": "text/plain"}, 415, "application/json"),
    ("a form", b"model=MODEL", {"content-type": "application/x-www-form-urlencoded"}, 415, "application/json"),
    ("XML", b"<a/>", {"content-type": "application/xml"}, 415, "application/json"),
    ("JSON by another name", GOOD.encode(), {"content-type": "application/jsonx"}, 415, "application/json"),
    ("no type at all", GOOD.encode(), {}, 415, "application/json"),
)  # fmt: skip

REHEARSALS = (
    ("an array", instead([]), 400, "object"),
    ("a model that is not there", put("model", "gpt-4o"), 404, "gpt-4o"),
    ("no messages", put("messages", DROP), 400, "messages"),
    ("a mode that is not there", put("mode", "twice"), 400, "mode"),
    ("a mode that is null", put("mode", None), 400, "mode"),
    ("no attempt", put("n", 0), 400, "n"),
    ("a million attempts", put("n", 1_000_000), 400, "n"),
    ("attempts in words", put("n", "four"), 400, "n"),
    ("a seed in words", put("seed", "x"), 400, "seed"),
    ("a conversation that has ended", put("messages", [ASKED, {"role": "assistant", "content": "5"}]), 400, "messages"),
    ("a result without a call", messages(ASKED, RESULT), 400, "tool"),
    ("tools a text", put("tools", "price"), 400, "tools"),
    ("a prompt beyond the context", content("lamp " * 5000), 400, "context"),
)

ROUTES = (
    ("GET of completions", "GET", CHAT, 405),
    ("PUT of completions", "PUT", CHAT, 405),
    ("DELETE of completions", "DELETE", CHAT, 405),
    ("PATCH of rehearsals", "PATCH", REHEARSE, 405),
    ("GET of rehearsals", "GET", REHEARSE, 405),
    ("POST of models", "POST", "/v1/models", 405),
    ("POST of the page", "POST", "/", 405),
    ("an unknown place", "GET", "/v1/embeddings", 404),
    ("an unknown place, posted to", "POST", "/v1/completions", 404),
    ("an unknown model", "GET", "/v1/models/gpt-4o", 404),
    ("a file", "GET", "/..%2f..%2fetc/passwd", 404),
    ("a zero byte", "GET", "/v1/models/%00", 404),
    ("bytes that are no text", "GET", "/v1/models/%ff%fe", 404),
)
