"""Whether a call fits the JSON schema of its tool, and the structured error for one that does not.

A task's schemas are data: one that cannot be read decides nothing, and nothing is looked up outside it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import referencing

from envace_jax.types import Json, ToolCall


def refusal(tools: Sequence[Mapping[str, Json]], call: ToolCall) -> str | None:
    """The JSON text of `{"error_tool_call": ...}` for a call that names none of the tools (OpenAI function schemas) or
    whose arguments do not fit; None where they fit or where the schema cannot be read.

    Arguments that are not among the schema's properties are refused, as in the REHEARSE prompt, unless it says
    otherwise; a schema that lists no properties says nothing about arguments.
    """
    functions = {function["name"]: function for function in (tool.get("function", tool) for tool in tools)}
    if call.name not in functions:
        return _error("unknown_tool", f"no tool is called {call.name}", sorted(functions))
    validator = _validator(json.dumps(functions[call.name].get("parameters") or {}))
    if validator is None:
        return None
    try:
        problems = sorted(error.message for error in validator.iter_errors(dict(call.arguments)))
    except Exception:  # a reference that leads nowhere, a pattern that is none: the schema's fault, not the call's
        return None
    return _error("invalid_arguments", f"the arguments do not fit {call.name}", problems) if problems else None


@functools.lru_cache(maxsize=4096)
def _validator(schema_text: str) -> Any:
    schema = json.loads(schema_text)
    try:
        schema = {"additionalProperties": "properties" not in schema, **schema}
        jsonschema.Draft202012Validator.check_schema(schema)
    except (TypeError, jsonschema.SchemaError):
        return None
    return jsonschema.Draft202012Validator(schema, registry=referencing.Registry())  # which fetches nothing


def _error(code: str, message: str, details: Json) -> str:
    error = {"error_tool_call": {"code": code, "message": message, "details": details}}
    return json.dumps(error, ensure_ascii=False)
