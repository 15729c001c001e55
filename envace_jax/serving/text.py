"""From sampled tokens to the text of an answer, piece by piece: UTF-8, stop strings, thoughts, content and tool calls.

Whatever the pieces are cut into, what they give together is what the whole gives at once. Knows no HTTP and no engine.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import re
from collections.abc import Sequence

from tokenizers import Tokenizer

from envace_jax.chat import CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN, parse_assistant
from envace_jax.types import ToolCall

# --- tokens to bytes ---


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes as: printable ones as themselves, others from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


class TokenBytes:
    """The bytes of each token of a byte-level tokenizer. Raises ValueError for one of another kind."""

    def __init__(self, tokenizer: Tokenizer):
        if type(tokenizer.decoder).__name__ != "ByteLevel":
            raise ValueError(
                f"the tokenizer's decoder is {type(tokenizer.decoder).__name__}; only byte-level tokenizers are served"
            )
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._bytes(token)
        return found

    def _bytes(self, token: int) -> bytes:
        text, table = self._tokenizer.id_to_token(token) or "", _byte_of_character()
        # Added tokens stand as they are, and may hold what no byte is written as.
        if all(character in table for character in text):
            return bytes(table[character] for character in text)
        return text.encode("utf-8")


# --- bytes to text, up to a stop string ---


@dataclasses.dataclass(frozen=True)
class Token:
    """A sampled token as `logprobs` tells of it."""

    text: str  # with U+FFFD where it is no whole character
    data: bytes
    logprob: float


class TextStream:
    """Text of tokens as far as it is settled: an unfinished character waits, and so does what may begin a stop string.

    `stop` is the stop string that came, if one did: its text and what follows are left out. Of several that come, the
    one that ends first counts, of those the longest.
    """

    def __init__(self, table: TokenBytes, stops: Sequence[str] = ()):
        self.stop: str | None = None
        self.count = 0  # tokens used
        self.tokens: list[Token] = []  # used since they were last fetched
        self._table, self._stops = table, [stop for stop in stops if stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, tokens: Sequence[int], logprobs: Sequence[float], stop_ids: Sequence[int] = ()) -> str:
        """Text that is settled now. A stop id has none; it counts as used, and nothing else is told of it."""
        settled = []
        for token, logprob in zip(tokens, logprobs, strict=True):
            if self.stop is not None:
                break
            self.count += 1
            if token in stop_ids:
                break
            data = self._table[token]
            self.tokens.append(Token(data.decode("utf-8", "replace"), data, float(logprob)))
            settled.append(self._add(self._decoder.decode(data)))
        return "".join(settled)

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        if self.stop is not None:
            return ""
        text = self._add(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text if self.stop is not None else text + held

    def _add(self, text: str) -> str:
        if not text or not self._stops:
            return text
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.stop = min(found)
            settled, self._held = self._held[:at], ""
            return settled
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        settled, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return settled


def _overlap(text: str, word: str) -> int:
    """Characters at the end of the text that begin the word, and are not all of it."""
    return next((size for size in range(min(len(text), len(word) - 1), 0, -1) if word.startswith(text[-size:])), 0)


# --- text to what an assistant message says ---


@dataclasses.dataclass(frozen=True)
class Reply:
    """An assistant message. Where its calls cannot be read there are none, and they stay in the content as written."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]


class ReplyStream:
    """Thoughts and content as far as they are settled, and in the end the rest and the calls.

    `<think>` opens thoughts up to `</think>`. From the first `<tool_call>` on everything waits for the end, since one
    malformed call makes content of them all. Newlines around thoughts and around the content are left out.
    With `calls` False there are none, whatever is written. With `single` the message is over with its first call, if
    that can be read: what follows is left out.
    """

    def __init__(self, calls: bool, single: bool = False):
        self.over = False  # the single call is there
        self._single = single
        self._tags = (THINK_OPEN, CALL_OPEN, CALL_CLOSE) if calls else (THINK_OPEN,)
        self._pattern = re.compile("|".join(map(re.escape, self._tags)))
        self._pending = ""
        self._thinking = False
        self._calls = False  # from here on all waits
        self._searched = 0  # characters of what waits in which no call ends
        self._content, self._reasoning = _Trimmed(), _Trimmed()

    def feed(self, text: str) -> Reply:
        """What is settled now, beyond what earlier calls gave; no calls yet."""
        if self.over:
            return Reply("", "", ())
        self._pending += text
        reasoning, content = [], []
        while not self._calls:
            if self._thinking:
                at = self._pending.find(THINK_CLOSE)
                end, tag = (at, THINK_CLOSE) if at >= 0 else (-1, "")
            else:
                match = self._pattern.search(self._pending)
                end, tag = (match.start(), match.group()) if match else (-1, "")
            closed = end >= 0
            if not closed:
                tags = (THINK_CLOSE,) if self._thinking else self._tags
                end = len(self._pending) - max(_overlap(self._pending, tag) for tag in tags)
            part, self._pending = self._pending[:end], self._pending[end:]
            if self._thinking:
                reasoning.append(self._reasoning.feed(part))
            else:
                content.append(self._content.feed(part))
            if not closed:
                break
            if tag in (CALL_OPEN, CALL_CLOSE):
                self._calls = True
                break
            self._pending = self._pending[len(tag) :]
            self._thinking = tag == THINK_OPEN
            if self._thinking:
                self._reasoning.begin_again()
        if self._calls and self._single:
            self._end_after_call()
        return Reply("".join(reasoning), "".join(content), ())

    def _end_after_call(self) -> None:
        # Not at any closing tag: an argument may have one in its text. Read only where a tag came, not for each token.
        while (at := self._pending.find(CALL_CLOSE, self._searched)) >= 0:
            self._searched = at + len(CALL_CLOSE)
            if parse_assistant(self._pending[: self._searched]).calls:
                self._pending, self.over = self._pending[: self._searched], True
                return
        self._searched = max(self._searched, len(self._pending) - len(CALL_CLOSE) + 1)

    def finish(self) -> Reply:
        """The rest, and the calls."""
        if not self._calls:
            target = self._reasoning if self._thinking else self._content
            rest = target.feed(self._pending)
            return Reply(rest, "", ()) if self._thinking else Reply("", rest, ())
        parsed = parse_assistant(self._pending)
        if parsed.error is not None:
            return Reply("", self._content.feed(self._pending), ())
        reasoning = content = ""
        if parsed.reasoning:
            self._reasoning.begin_again()
            reasoning = self._reasoning.feed(parsed.reasoning)
        if parsed.content:
            self._content.begin_again()
            content = self._content.feed(parsed.content)
        return Reply(reasoning, content, parsed.calls)


class _Trimmed:
    """Text without newlines at its beginning and end, as it comes."""

    def __init__(self) -> None:
        self._beginning, self._any = True, False
        self._newlines = ""

    def feed(self, text: str) -> str:
        if self._beginning:
            text = text.lstrip("\n")
        if not text:
            return ""
        whole = self._newlines + text
        kept = whole.rstrip("\n")
        self._beginning, self._any, self._newlines = False, True, whole[len(kept) :]
        return kept

    def begin_again(self) -> None:
        """The next text is another part, on a line of its own; newlines around it are left out too."""
        self._beginning, self._newlines = True, "\n" * self._any


def read_reply(text: str, calls: bool) -> Reply:
    """The whole message at once."""
    stream = ReplyStream(calls)
    first, rest = stream.feed(text), stream.finish()
    return Reply(first.reasoning + rest.reasoning, first.content + rest.content, rest.calls)
