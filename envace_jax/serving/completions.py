"""Chat completions: from a request to prompts in the engine, and from its pieces to the answer, whole or in chunks.

Knows the engine, texts and OpenAI's objects; nothing of HTTP.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from envace_jax.chat import Chat
from envace_jax.episode import Limits
from envace_jax.roles import Prompts, call_entries
from envace_jax.sampling import SampleRequest
from envace_jax.serving import conversation
from envace_jax.serving.engine import Engine, Piece, merged
from envace_jax.serving.protocol import ChatRequest, NamedChoice, RequestError
from envace_jax.serving.text import Reply, ReplyStream, TextStream, Token, TokenBytes
from envace_jax.types import Json, Message

STREAM = -6  # random numbers that no training step, evaluation or judge uses
LEAST_TOP_P = 1e-6  # the most likely token alone


@dataclasses.dataclass(frozen=True)
class Served:
    """A model that is served: who decodes, how it is written to, and its name."""

    engine: Engine
    chat: Chat
    prompts: Prompts  # of rehearsals; plain requests take `thinking` from them
    limits: Limits  # of rehearsals
    name: str
    created: int  # seconds since 1970
    token_bytes: TokenBytes


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request that was read: the conversation as it stands, and how its answer is to be drawn and read."""

    request: ChatRequest
    messages: list[Message]
    tools: tuple[Mapping[str, Json], ...]  # as they were sent; none where none may be called
    prompts: Prompts  # how it is written, and a rehearsal's prompts
    forced: list[int]  # tokens that the answer begins with; it begins with no thoughts then
    seed: int
    prompt: list[int]  # up to the answer, `forced` included


def read_conversation(served: Served, request: ChatRequest, body: Mapping[str, Any]) -> Asked:
    """What a request asks for. Raises RequestError. Takes as long as its text is long: not for an event loop."""
    if request.model != served.name:
        message = f"The model {request.model[:100]!r} does not exist; served is {served.name!r}"
        raise RequestError(404, message, param="model", code="model_not_found")
    messages = conversation.plain(body["messages"])
    wrong = conversation.problem(messages, body.get("tools") or ())
    if wrong is not None:
        raise RequestError(400, f"Invalid value for '{wrong[0]}': {wrong[1]}", param=wrong[0], code="invalid_value")
    choice = request.tool_choice
    # A model that sees no tools calls none.
    tools = tuple(body.get("tools") or ()) if choice != "none" else ()
    options = request.chat_template_kwargs
    prompts = served.prompts
    if options is not None and options.enable_thinking is not None:
        prompts = dataclasses.replace(prompts, thinking=options.enable_thinking)
    seed = secrets.randbits(63) if request.seed is None else request.seed
    asked = Asked(request, messages, tools, prompts, forced=[], seed=seed, prompt=[])
    asked = with_messages(served, asked, messages)  # first: of tools that fit, the possible calls are soon written
    forced = _forced(served.chat, tools, choice)
    return with_messages(served, dataclasses.replace(asked, forced=forced), messages) if forced else asked


def with_messages(served: Served, asked: Asked, messages: list[Message]) -> Asked:
    """The same request with other messages. Raises RequestError where they leave no room for an answer."""
    tokens = conversation.prompt(
        served.chat, messages, asked.tools, asked.prompts.thinking, asked.prompts.as_sampled, asked.forced
    )
    longest = served.engine.max_length
    if len(tokens) >= longest:
        raise RequestError(
            400,
            f"This model's maximum context length is {longest} tokens; the messages and tools take {len(tokens)}, "
            "which leaves none for an answer",
            param="messages",
            code="context_length_exceeded",
        )
    return dataclasses.replace(asked, messages=messages, prompt=tokens)


def _forced(chat: Chat, tools: Sequence[Mapping[str, Json]], choice: Any) -> list[int]:
    """What the answer must begin with so that it calls a tool where `tool_choice` wants that."""
    if choice == "required":
        if not tools:
            raise RequestError(400, "tool_choice 'required' needs 'tools'", param="tool_choice", code="invalid_value")
        return conversation.forced_beginning(chat, tools)
    if isinstance(choice, NamedChoice):
        name = choice.function.name
        if name not in [tool["function"]["name"] for tool in tools]:
            raise RequestError(
                400, f"tool_choice names '{name}', which is not among 'tools'", param="tool_choice",
                code="invalid_value",
            )  # fmt: skip
        return conversation.forced_beginning(chat, tools, name)
    return []


@dataclasses.dataclass(frozen=True)
class Delta:
    """What is new of one choice; with a finish reason it is the last."""

    choice: int
    reply: Reply
    tokens: list[Token]
    finish_reason: str | None = None


class Generation:
    """The choices of one request under way. To be closed in the end, however it ends."""

    def __init__(self, served: Served, asked: Asked):
        request = asked.request
        self._served, self._engine = served, served.engine
        self._choices = [_Choice(served, asked) for _ in range(request.n or 1)]
        limit = request.max_completion_tokens or request.max_tokens or served.engine.max_length
        self._handles = [
            self._engine.submit(
                SampleRequest(
                    request_id=place,
                    prompt_tokens=asked.prompt,
                    max_tokens=limit,
                    key_ids=(asked.seed, STREAM, place),
                    temperature=1.0 if request.temperature is None else request.temperature,
                    top_p=1.0 if request.top_p is None else max(request.top_p, LEAST_TOP_P),
                )
            )
            for place in range(len(self._choices))
        ]
        self._prompt_tokens = len(asked.prompt)
        self._submitted, self._first = time.monotonic(), 0.0

    def usage(self) -> dict[str, Any]:
        """OpenAI's; of the prompt's cached tokens, those of whichever choice found the least."""
        cached = min(choice.cached for choice in self._choices)
        return usage(self._prompt_tokens, sum(choice.text.count for choice in self._choices), cached)

    @property
    def queue_seconds(self) -> list[float]:
        """From submission to a slot, for choices that got one."""
        return [handle.started - handle.submitted for handle in self._handles if handle.started is not None]

    @property
    def first_token_seconds(self) -> float:
        return self._first - self._submitted

    async def deltas(self) -> AsyncIterator[Delta]:
        """What comes, until all choices are finished. Raises EngineStopped."""
        left = len(self._choices)
        async for place, piece in merged(self._handles):
            self._first = self._first or time.monotonic()
            choice = self._choices[place]
            if choice.over:
                continue
            delta = choice.feed(place, piece)
            if choice.over:
                left -= 1
                if piece.finish_reason is None:
                    self._engine.cancel(self._handles[place])
            yield delta
            if not left:
                return

    def close(self) -> None:
        for handle in self._handles:
            if not handle.sample.done():
                self._engine.cancel(handle)


class _Choice:
    """One answer as it comes."""

    def __init__(self, served: Served, asked: Asked):
        request = asked.request
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        self._single = request.parallel_tool_calls is False
        self.text = TextStream(served.token_bytes, stops)
        self.over = False
        self.cached = 0
        self._stop_ids = served.engine.stop_ids
        self._reply = ReplyStream(calls=bool(asked.tools), single=self._single)
        self._reply.feed(served.chat.decode(asked.forced))  # a call's beginning, if anything: none of it is told yet

    def feed(self, place: int, piece: Piece) -> Delta:
        self.cached = piece.cached_tokens
        told = [self._reply.feed(text) for text in self._texts(piece)]
        self.over = piece.finish_reason is not None or self.text.stop is not None or self._reply.over
        if self.over:
            told += [self._reply.feed(self.text.finish()), self._reply.finish()]
        reply = Reply("".join(one.reasoning for one in told), "".join(one.content for one in told), ())
        tokens, self.text.tokens = self.text.tokens, []
        if not self.over:
            return Delta(place, reply, tokens)
        reply = dataclasses.replace(reply, calls=told[-1].calls)
        if reply.calls:
            reason = "tool_calls"
        else:
            reason = "stop" if self.text.stop is not None else piece.finish_reason or "stop"
        return Delta(place, reply, tokens, reason)

    def _texts(self, piece: Piece) -> Iterator[str]:
        tokens, logprobs = piece.tokens.tolist(), piece.logprobs.tolist()
        # Where a call may end the answer, token by token: those after it are not used.
        size = 1 if self._single else max(1, len(tokens))
        for begin in range(0, len(tokens), size):
            if self._reply.over:
                return
            yield self.text.feed(tokens[begin : begin + size], logprobs[begin : begin + size], self._stop_ids)


# --- OpenAI's objects ---


def new_id() -> str:
    return f"chatcmpl-{secrets.token_hex(12)}"


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chunk(served: Served, identity: tuple[str, int], choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A `chat.completion.chunk`; `identity` is the id and the time of creation."""
    head = {"id": identity[0], "object": "chat.completion.chunk", "created": identity[1], "model": served.name}
    return head | {"choices": choices} | more


def chunk_choices(delta: Delta, logprobs: bool) -> list[dict[str, Any]]:
    """What a delta is in a chunk: one choice, or two where it also ends."""
    told: dict[str, Any] = {}
    if delta.reply.reasoning:
        told["reasoning_content"] = delta.reply.reasoning
    if delta.reply.content:
        told["content"] = delta.reply.content
    if delta.reply.calls:
        told["tool_calls"] = [{"index": number, **call} for number, call in enumerate(_calls(delta.reply))]
    choices = []
    if told or (logprobs and delta.tokens):
        choices.append(_choice(delta.choice, told, _logprobs(delta.tokens) if logprobs else None, None))
    if delta.finish_reason is not None:
        choices.append(_choice(delta.choice, {}, None, delta.finish_reason))
    return choices


def _choice(index: int, delta: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def opening_choice(index: int) -> dict[str, Any]:
    return _choice(index, {"role": "assistant", "content": ""}, None, None)


def completion(
    served: Served, identity: tuple[str, int], deltas: Sequence[Delta], logprobs: bool, **more: Any
) -> dict[str, Any]:
    """A whole `chat.completion` of all its deltas."""
    choices = []
    of_choice: dict[int, list[Delta]] = {}
    for delta in deltas:
        of_choice.setdefault(delta.choice, []).append(delta)
    for index, own in sorted(of_choice.items()):
        reply = Reply(
            "".join(delta.reply.reasoning for delta in own),
            "".join(delta.reply.content for delta in own),
            own[-1].reply.calls,
        )
        tokens = [token for delta in own for token in delta.tokens]
        choices.append(
            {
                "index": index,
                "message": message(reply),
                "logprobs": _logprobs(tokens) if logprobs else None,
                "finish_reason": own[-1].finish_reason,
            }
        )
    head = {"id": identity[0], "object": "chat.completion", "created": identity[1], "model": served.name}
    return head | {"choices": choices} | more


def message(reply: Reply) -> dict[str, Any]:
    """The assistant message, to be sent and to be sent back."""
    made: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning:
        made["reasoning_content"] = reply.reasoning
    if reply.calls:
        made["content"] = reply.content or None
        made["tool_calls"] = _calls(reply)
    return made


def _calls(reply: Reply) -> list[dict[str, Any]]:
    return [{"id": f"call_{secrets.token_hex(12)}"} | entry for entry in call_entries(reply.calls, as_text=True)]


def _logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    return {
        "content": [
            {"token": token.text, "logprob": token.logprob, "bytes": list(token.data), "top_logprobs": []}
            for token in tokens
        ],
        "refusal": None,
    }
