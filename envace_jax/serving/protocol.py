"""What clients may send, as pydantic models, and the errors they get: OpenAI's chat completions and our `rehearsal`.

Unknown fields are ignored; a known one that is wrong, or that asks for what is not there, is an error of one line.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from envace_jax import json_values

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_ATTEMPTS = 64


class RequestError(Exception):
    """A request that is answered by OpenAI's error object and an HTTP status."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: bool = False
    ):
        super().__init__(message)
        self.status, self.retry = status, retry
        self.close = False  # whether the connection ends with the answer
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status)
        kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class ErrorDetail(Model):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Model):
    error: ErrorDetail


# --- messages ---


class TextPart(Model):
    type: Literal["text"]
    text: str


Text = str | list[TextPart]


class SystemMessage(Model):
    role: Literal["system", "developer"]
    content: Text


class UserMessage(Model):
    role: Literal["user"]
    content: Text


class CallFunction(Model):
    name: str = Field(min_length=1)
    arguments: str | dict[str, Any]


class Call(Model):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CallFunction


class AssistantMessage(Model):
    role: Literal["assistant"]
    content: Text | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None


class ToolMessage(Model):
    role: Literal["tool"]
    content: Text
    tool_call_id: str | None = None
    name: str | None = None


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


# --- tools ---


class Function(Model):
    name: str = Field(min_length=1, max_length=256, pattern=r'^[^"\\\x00-\x1f]+$')
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Model):
    type: Literal["function"]
    function: Function


class ChosenFunction(Model):
    name: str


class NamedChoice(Model):
    type: Literal["function"]
    function: ChosenFunction


# --- requests ---


class StreamOptions(Model):
    include_usage: bool = False


class TemplateOptions(Model):
    enable_thinking: bool | None = None


class ResponseFormat(Model):
    type: Literal["text"]  # answers cannot be held to a schema


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


_WHOLE = pydantic.BeforeValidator(_whole)  # to JSON, 2.0 is 2
Tokens = Annotated[int, Field(ge=1), _WHOLE]
Attempts = Annotated[int, Field(ge=1, le=MAX_ATTEMPTS), _WHOLE]
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES), _WHOLE]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), _WHOLE]
No = Annotated[int, Field(ge=0, le=0), _WHOLE]


class Rehearsal(Model):
    """Private rehearsal before the answer; what is left out is the server's default."""

    mode: Literal["none", "parallel", "sequential"] | None = None
    n: Attempts | None = None
    return_transcript: bool = False
    # The memory of an earlier request of the same user turn; None: only where the request has no seed.
    reuse: bool | None = None


Stop = Annotated[str, Field(min_length=1, max_length=256)]
Only0 = Annotated[float, Field(ge=0, le=0)]


class Conversation(Model):
    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] | None = None
    seed: Seed | None = None
    chat_template_kwargs: TemplateOptions | None = None


class ChatRequest(Conversation):
    """The body of POST /v1/chat/completions."""

    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    n: Choices | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    # Only the sampled token's own log-probability is known.
    top_logprobs: No | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Only0 | None = None
    frequency_penalty: Only0 | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    response_format: ResponseFormat | None = None
    rehearsal: Rehearsal | None = None


class RehearsalRequest(Conversation):
    """The body of POST /v1/rehearsals, which shows a rehearsal under way and what is then said."""

    mode: Literal["none", "parallel", "sequential"] = "parallel"
    n: Attempts = 4
    temperature: float = Field(default=0.0, ge=0, le=2)  # of what is said
    max_tokens: Tokens | None = None


UNSUPPORTED = {
    "top_logprobs": "not supported beyond 0: only the sampled token's own log-probability is known",
    "presence_penalty": "not supported; only 0 is accepted",
    "frequency_penalty": "not supported; only 0 is accepted",
    "logit_bias": "not supported; only an empty object is accepted",
    "response_format": 'only {"type": "text"} is supported: answers cannot be held to a schema',
}


def parse(body: bytes) -> Any:
    """JSON of a body. Raises RequestError (400) for what is no JSON in UTF-8, for keys that stand twice, NaN, lone
    surrogates, and nesting that what writes or compares it later could not follow."""
    try:
        value = json_values.parse(body.decode("utf-8"))
        json_values.check_writable(value, "the body")
    except UnicodeDecodeError:
        raise RequestError(400, "the body is not UTF-8", code="invalid_json") from None
    except ValueError as error:
        message = " ".join(f"the body is not valid JSON: {error}".split())
        raise RequestError(400, message[:400], code="invalid_json") from None
    return value


def read(kind: type[Model], value: Any) -> Any:
    """The model of a body's parsed JSON. Raises RequestError (400) for the first thing that is wrong with it."""
    if not isinstance(value, dict):
        raise RequestError(400, "the body must be a JSON object", code="invalid_type")
    for name in ("functions", "function_call"):
        if value.get(name):
            raise RequestError(400, f"'{name}' is not supported; use 'tools' and 'tool_choice'", param=name)
    try:
        return kind.model_validate(value)
    except pydantic.ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: pydantic.ValidationError) -> RequestError:
    """OpenAI's words for the first mistake; where a value may be of several kinds, of the kind that was meant."""
    found = error.errors(include_url=False)
    same = [one for one in found if one["loc"][:2] == found[0]["loc"][:2]]
    meant = [one for one in same if not one["type"].endswith("_type")] or same
    first = max(meant, key=lambda one: len(one["loc"]))
    place = ".".join(str(part) for part in first["loc"] if not _is_branch(part))
    if first["type"] == "missing":
        return RequestError(
            400, f"Missing required parameter: '{place}'", param=place, code="missing_required_parameter"
        )
    message = UNSUPPORTED.get(str(first["loc"][0]), first["msg"])
    if isinstance(first["input"], str) and len(first["input"]) < 50:
        message += f", not {first['input']!r}"
    message = " ".join(f"Invalid value for '{place}': {message}".split())
    return RequestError(400, message[:400], param=place, code="invalid_value")


def _is_branch(part: Any) -> bool:
    """Whether a part of an error's place names a member of a union, not a field or an index."""
    return isinstance(part, str) and (
        part in ("str", "system", "developer", "user", "assistant", "tool", "NamedChoice")
        or part.startswith(("list[", "literal[", "constrained-", "dict["))
    )
