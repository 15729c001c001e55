"""Qwen3's chat format as token ids: append-only pieces, and parsing of what the model answers.

A conversation is the concatenation of pieces (system, user, assistant, tool results), never a re-rendered
template, so what was sampled stays as it was sampled. Knows nothing of roles, tasks, prompts or the network.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from envace_jax.types import Json, ToolCall

MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"

MESSAGE_TOKENS = (MESSAGE_START, MESSAGE_END, END_OF_TEXT)
REQUIRED_TOKENS = (*MESSAGE_TOKENS, CALL_OPEN, CALL_CLOSE)
# Plain text where the tokenizer has no such token, as in Qwen2.5.
OPTIONAL_TOKENS = (THINK_OPEN, THINK_CLOSE, RESULT_OPEN, RESULT_CLOSE)

SHORT = 64  # characters of a span whose ids are kept
LONG = 10_000  # characters of a span that is encoded in the way in which other threads may run meanwhile
MAX_JSON_DEPTH = 64  # of a call's arguments: far from Python's recursion limit, whatever the caller's stack

# Word for word from the chat template that Qwen3 checkpoints ship.
TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within ",
    " XML tags:\n",
    '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
)


@dataclasses.dataclass(frozen=True)
class _Control:
    """A token placed by the format itself, as opposed to the same characters inside a message."""

    text: str


@dataclasses.dataclass(frozen=True, eq=False)
class Chat:
    """A tokenizer and the chat format on it. Every piece is a `list[int]` to append to a stream.

    Text inside a message never becomes a special token: `<|im_end|>` written by a user is spelled out in
    ordinary tokens and cannot end a message. Tags that the tokenizer does not mark as special (Qwen3's
    `<tool_call>` and `<think>`) keep their own id wherever they stand, as in Qwen3's own template.
    """

    tokenizer: Tokenizer
    control_ids: Mapping[str, int]
    vocab_size: int  # ids below it exist; an embedding may have more rows
    stop_ids: tuple[int, int]  # <|im_end|>, <|endoftext|>: either ends a generation
    end_of_message: int  # <|im_end|>
    pad_id: int  # <|endoftext|>; padding is known by lengths, never by this id

    def encode(self, text: str) -> list[int]:
        """Ids of a span of text. Lone surrogates, which no tokenizer can take, become U+FFFD."""
        return list(_short_span(self.tokenizer, text)) if len(text) <= SHORT else _span(self.tokenizer, text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included. An unfinished UTF-8 sequence becomes U+FFFD."""
        return self.tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    def system(self, system_text: str | None, tools: Sequence[Mapping[str, Json]] | None) -> list[int]:
        """The system block: the system text, then the tool schemas (OpenAI function schemas) if there are any.

        `tools=[]` equals no tools. Without a system text and without tools there is no block at all.
        """
        if system_text is None and not tools:
            return []
        head = "system\n" + (system_text or "")
        if not tools:
            return self._join(_Control(MESSAGE_START), head, _Control(MESSAGE_END), "\n")
        schemas = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        opening = head + ("" if system_text is None else "\n\n") + TOOLS_BEFORE + schemas
        call_open, call_close = _Control(CALL_OPEN), _Control(CALL_CLOSE)
        before_tags, after_tags, example = TOOLS_AFTER
        return self._join(
            *(_Control(MESSAGE_START), opening + before_tags, call_open, call_close, after_tags),
            *(call_open, example, call_close, _Control(MESSAGE_END), "\n"),
        )

    def user(self, text: str) -> list[int]:
        """A user message."""
        return self._join(_Control(MESSAGE_START), "user\n" + text, _Control(MESSAGE_END), "\n")

    def assistant_prefix(self, thinking: bool = True) -> list[int]:
        """What opens an assistant message; the model goes on from here. Without thinking, empty thoughts are given."""
        prefix: list[str | _Control] = [_Control(MESSAGE_START), "assistant\n"]
        if not thinking:
            prefix += [_Control(THINK_OPEN), "\n\n", _Control(THINK_CLOSE), "\n\n"]
        return self._join(*prefix)

    def assistant(self, content: str, reasoning: str | None = None, calls: Sequence[ToolCall | str] = ()) -> list[int]:
        """The body of an assistant message as a model emits it after `assistant_prefix()`, `<|im_end|>` included.

        `reasoning=None` writes no thoughts, `reasoning=""` an empty `<think>` block. A call may be given as its JSON
        text, which is taken as it is. Follow the body by `close()`.
        """
        body: list[str | _Control] = []
        if reasoning is None:
            body.append(content)
        else:
            thoughts = "\n" + reasoning.strip("\n") + "\n"
            body += [_Control(THINK_OPEN), thoughts, _Control(THINK_CLOSE), "\n\n" + content.lstrip("\n")]
        for number, call in enumerate(calls):
            if number or content:
                body.append("\n")
            text = call if isinstance(call, str) else render_call(call)
            body += [_Control(CALL_OPEN), "\n" + text + "\n", _Control(CALL_CLOSE)]
        return self._join(*body, _Control(MESSAGE_END))

    def call_opening(self, text: str) -> list[int]:
        """`<tool_call>` and the beginning of a call's JSON text, which a message that must call a tool begins with."""
        return self._join(_Control(CALL_OPEN), "\n" + text)

    def close(self, last_tokens: Sequence[int]) -> list[int]:
        """What must follow a sampled assistant message: a newline, and `<|im_end|>` before it if it lacks one."""
        if len(last_tokens) and int(last_tokens[-1]) == self.end_of_message:
            return self.encode("\n")
        return self._join(_Control(MESSAGE_END), "\n")

    def tool_results(self, results: Sequence[str]) -> list[int]:
        """The results of all calls of one assistant message, in one user block. Raises ValueError if there are none."""
        if not results:
            raise ValueError("tool_results: no results given; a block holds the results of one or more calls")
        block: list[str | _Control] = [_Control(MESSAGE_START), "user"]
        for result in results:
            block += ["\n", _Control(RESULT_OPEN), "\n" + result + "\n", _Control(RESULT_CLOSE)]
        return self._join(*block, _Control(MESSAGE_END), "\n")

    def _join(self, *parts: str | _Control) -> list[int]:
        """Ids of text and control tokens; neighbouring text is encoded as one span, as a template's would be."""
        ids: list[int] = []
        span = ""
        for part in parts:
            if isinstance(part, str):
                span += part
            elif part.text not in self.control_ids:
                span += part.text
            else:
                if span:
                    ids += self.encode(span)
                ids.append(self.control_ids[part.text])
                span = ""
        return ids + self.encode(span) if span else ids


def _span(tokenizer: Tokenizer, text: str) -> list[int]:
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if len(text) > LONG:
        return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return tokenizer.encode(text, add_special_tokens=False).ids


@functools.lru_cache(maxsize=4096)
def _short_span(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Most spans are what the format puts between messages, over and over."""
    return tuple(_span(tokenizer, text))


def load_tokenizer(path: str | Path, spelled_tags: bool = False) -> Chat:
    """Load `tokenizer.json` from a model folder.

    Raises FileNotFoundError if the file is not there, and ValueError if it cannot be read or lacks one of
    `REQUIRED_TOKENS`. The size of the vocabulary is the file's own. With `spelled_tags` only the tokens around messages
    are required: a model that was taught another form of calls then sees Qwen3's tags in ordinary tokens.
    """
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"no tokenizer at {file}: expected a model folder that holds tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ValueError(f"{file} is not a tokenizers JSON file: {error}") from error
    required = MESSAGE_TOKENS if spelled_tags else REQUIRED_TOKENS
    missing = [token for token in required if tokenizer.token_to_id(token) is None]
    if missing:
        raise ValueError(f"{file} lacks the chat tokens {', '.join(missing)}; a Qwen3-style tokenizer is needed")
    tokenizer.encode_special_tokens = True  # special tokens inside a text are spelled out
    tokenizer.no_truncation()
    tokenizer.no_padding()
    found = {token: tokenizer.token_to_id(token) for token in REQUIRED_TOKENS + OPTIONAL_TOKENS}
    control_ids = {token: number for token, number in found.items() if number is not None}
    return Chat(
        tokenizer=tokenizer,
        control_ids=control_ids,
        vocab_size=1 + max(tokenizer.get_vocab(with_added_tokens=True).values()),
        stop_ids=(control_ids[MESSAGE_END], control_ids[END_OF_TEXT]),
        end_of_message=control_ids[MESSAGE_END],
        pad_id=control_ids[END_OF_TEXT],
    )


def render_call(call: ToolCall) -> str:
    """The JSON text of a call as Qwen3's template writes it: `{"name": "x", "arguments": {...}}`.

    The template pastes the name in unquoted; here it is a JSON string, which differs only for names that need escapes.
    """
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {arguments}}}'


@dataclasses.dataclass(frozen=True)
class ParsedAssistant:
    """What an assistant message says. `error` is None or one line that says why the message is malformed.

    With an error there are no calls; without one, no calls means a plain reply.
    """

    reasoning: str
    content: str  # the text outside thoughts and calls
    calls: tuple[ToolCall, ...]
    error: str | None


_TAG = re.compile(r"</?(?:think|tool_call)>")
_JSON_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def parse_assistant(text: str) -> ParsedAssistant:
    """Split an assistant message's text into thoughts, content and calls; never raises, linear in the text.

    A closing `<|im_end|>` or `<|endoftext|>` is dropped. `<think>` opens thoughts up to the first `</think>`, and
    nothing in them is a call; a `</think>` that nothing opened, before any call, ends thoughts that began with the
    text. A call is one JSON object between `<tool_call>` and `</tool_call>` (tags inside its strings do not count)
    with a non-empty string `name` and an object `arguments`, or a string that holds the JSON of one. Where a key is
    repeated the last one counts, as in `json.loads`; NaN, infinities and lone surrogates are errors.
    """
    for stop in (MESSAGE_END, END_OF_TEXT):
        text = text.removesuffix(stop)
    thoughts: list[str] = []
    outside: list[str] = []
    calls: list[ToolCall] = []
    error: str | None = None
    position = 0
    while tag := _TAG.search(text, position):
        name = tag.group()
        outside.append(text[position : tag.start()])
        position = tag.end()
        if name == THINK_OPEN:
            end = text.find(THINK_CLOSE, position)
            thoughts.append(text[position:] if end < 0 else text[position:end])
            position = len(text) if end < 0 else end + len(THINK_CLOSE)
            if end < 0:
                error = f"{THINK_OPEN} is never closed by {THINK_CLOSE}"
                break
        elif name == THINK_CLOSE:
            if calls or thoughts:
                outside.append(name)
            else:
                thoughts, outside = ["".join(outside)], []
        elif name == CALL_CLOSE:
            error = f"{CALL_CLOSE} without {CALL_OPEN} before it"
            break
        else:
            try:
                call, position = _read_call(text, position)
            except _MalformedCall as malformed:
                error = f"tool call {len(calls) + 1}: {malformed}"
                break
            calls.append(call)
            outside.append("\n")
    if error is None:
        outside.append(text[position:])
    content = "".join(outside).strip("\n")
    reasoning = "\n".join(thought.strip("\n") for thought in thoughts)
    return ParsedAssistant(reasoning, content, tuple(calls) if error is None else (), error)


class _MalformedCall(ValueError):
    """Says in one line what is wrong with a call."""


def _read_call(text: str, start: int) -> tuple[ToolCall, int]:
    """The call whose `<tool_call>` ends at `start`, and the position after its `</tool_call>`."""
    begin = _skip_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except RecursionError:
        raise _MalformedCall("the JSON is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, or an integer of more digits than Python converts
        if text.find(CALL_CLOSE, start) < 0:
            raise _MalformedCall(f"{CALL_OPEN} is never closed by {CALL_CLOSE}") from None
        raise _MalformedCall(f"not valid JSON: {_reason(error, begin)}") from None
    end = _skip_space(text, end)
    if not text.startswith(CALL_CLOSE, end):
        if text.find(CALL_CLOSE, end) < 0:
            raise _MalformedCall(f"{CALL_OPEN} is never closed by {CALL_CLOSE}")
        raise _MalformedCall(f"not valid JSON: text after the value at character {end - begin}")
    return _call_of(value), end + len(CALL_CLOSE)


def _call_of(value: Json) -> ToolCall:
    """A ToolCall from parsed JSON, if it has the shape of one."""
    if not isinstance(value, dict):
        raise _MalformedCall(f"expected a JSON object with name and arguments, found {_kind(value)}")
    name = value.get("name")
    if "name" not in value:
        raise _MalformedCall("no name")
    if not isinstance(name, str) or not name.strip():
        raise _MalformedCall(f"name must be a non-empty string, found {_kind(name)}")
    if "arguments" not in value:
        raise _MalformedCall("no arguments")
    arguments = value["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except RecursionError:
            raise _MalformedCall("the JSON in the arguments string is nested too deeply") from None
        except ValueError as error:
            raise _MalformedCall(f"arguments is a string without valid JSON: {_reason(error, 0)}") from None
    if not isinstance(arguments, dict):
        raise _MalformedCall(f"arguments must be a JSON object, found {_kind(arguments)}")
    _check_portable(name, arguments)
    return ToolCall(name, arguments)


def _check_portable(name: str, arguments: dict[str, Json]) -> None:
    """Refuse what cannot be written again as UTF-8 JSON: NaN, infinities, lone surrogates, very deep nesting."""
    level: list[Json] = [arguments]
    for _ in range(MAX_JSON_DEPTH):
        level = [child for parent in level for child in _children(parent) if isinstance(child, (dict, list))]
    if level:
        raise _MalformedCall(f"the arguments are nested deeper than {MAX_JSON_DEPTH} levels")
    try:
        json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeEncodeError:
        raise _MalformedCall("not valid JSON: a lone surrogate is no character") from None
    except ValueError:
        raise _MalformedCall("not valid JSON: NaN and infinite numbers are not allowed") from None


def _children(parent: dict | list) -> list[Json]:
    return list(parent.values()) if isinstance(parent, dict) else parent


def _skip_space(text: str, position: int) -> int:
    match = _JSON_SPACE.match(text, position)
    assert match is not None  # the pattern matches the empty string
    return match.end()


def _reason(error: ValueError, begin: int) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos - begin}"
    return "an integer has too many digits"


def _kind(value: Json) -> str:
    if isinstance(value, str) and not value.strip():
        return "an empty string"
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
