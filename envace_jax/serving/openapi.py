"""The OpenAPI document: bodies are read by hand, for their limits, so what they hold is described by hand too."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from envace_jax.serving.protocol import ChatRequest, ErrorBody, RehearsalRequest

Json = dict[str, Any]
SCHEMAS = "#/components/schemas/"
REASONS = {
    400: "The request is malformed, or asks for what is not supported",
    401: "An API key is needed",
    403: "The server is called by a name that is not its own",
    404: "There is no such model or path",
    413: "The body is too large",
    415: "The body is not sent as JSON",
    429: "Too many requests are under way",
    500: "The server failed",
    503: "The server is shutting down",
}
COMPLETION: Json = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "chat.completion"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "minItems": 1, "items": {"$ref": f"{SCHEMAS}Choice"}},
        "usage": {"$ref": f"{SCHEMAS}Usage"},
        "rehearsal": {"type": "object", "required": ["memory", "attempts"]},
    },
}
CHOICE: Json = {
    "type": "object",
    "required": ["index", "message", "logprobs", "finish_reason"],
    "properties": {
        "index": {"type": "integer"},
        "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
        "logprobs": {"type": ["object", "null"]},
        "message": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "role": {"const": "assistant"},
                "content": {"type": ["string", "null"]},
                "reasoning_content": {"type": "string"},
                "tool_calls": {"type": "array", "minItems": 1, "items": {"type": "object"}},
            },
        },
    },
}
COUNTS = {name: {"type": "integer", "minimum": 0} for name in ("prompt_tokens", "completion_tokens", "cached_tokens")}
USAGE: Json = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"],
    "properties": {
        "prompt_tokens": COUNTS["prompt_tokens"],
        "completion_tokens": COUNTS["completion_tokens"],
        "total_tokens": {"type": "integer", "minimum": 0},
        "prompt_tokens_details": {"type": "object", "properties": {"cached_tokens": COUNTS["cached_tokens"]}},
        "rehearsal_tokens": {"type": "object", "required": list(COUNTS), "properties": COUNTS},
    },
}
MODEL: Json = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
        "max_model_len": {"type": "integer"},
    },
}
MODELS: Json = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": {"$ref": f"{SCHEMAS}Model"}}},
}


def chat_completions() -> Json:
    """What the route's decorator takes, as all of these."""
    answers = {"application/json": {"schema": {"$ref": f"{SCHEMAS}Completion"}}, "text/event-stream": {}}
    return _route("ChatRequest", 200, "The answer, whole or as server-sent events", answers, *REASONS)


def rehearsals() -> Json:
    text = "Server-sent events: segment, memory, message, done"
    return _route("RehearsalRequest", 200, text, {"text/event-stream": {}}, *REASONS)


def models() -> Json:
    answers = {"application/json": {"schema": {"$ref": f"{SCHEMAS}Models"}}}
    return _route(None, 200, "The served model", answers, 401, 403, 503)


def model() -> Json:
    answers = {"application/json": {"schema": {"$ref": f"{SCHEMAS}Model"}}}
    return _route(None, 200, "The served model", answers, 401, 403, 404, 503)


def health() -> Json:
    return _route(None, 200, "Requests are taken", {"application/json": {"schema": {"type": "object"}}}, 503)


def text() -> Json:
    return _route(None, 200, "Counters in Prometheus' format", {"text/plain": {"schema": {"type": "string"}}})


def _route(body: str | None, status: int, description: str, answers: Json, *refusals: int) -> Json:
    error = {"application/json": {"schema": {"$ref": f"{SCHEMAS}ErrorBody"}}}
    responses: dict[int | str, Json] = {status: {"description": description, "content": answers}}
    responses |= {code: {"description": REASONS[code], "content": error} for code in refusals}
    extra: Json = {"responses": {str(code): response for code, response in responses.items()}}
    if body is not None:
        schema = {"schema": {"$ref": f"{SCHEMAS}{body}"}}
        extra["requestBody"] = {"required": True, "content": {"application/json": schema}}
    return {"openapi_extra": extra, "response_model": None}


def describe(app: FastAPI) -> None:
    """Has the application give a document with all that."""

    def document() -> Json:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version="1", routes=app.routes)
            schemas: Json = {"Completion": COMPLETION, "Choice": CHOICE, "Usage": USAGE, "Model": MODEL}
            schemas |= {"Models": MODELS}
            for kind in (ChatRequest, RehearsalRequest, ErrorBody):
                schema = TypeAdapter(kind).json_schema(ref_template=SCHEMAS + "{model}")
                schemas |= schema.pop("$defs", {}) | {kind.__name__: schema}
            made.setdefault("components", {})["schemas"] = schemas
            made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for path in made["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
