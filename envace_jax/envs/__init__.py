"""Executable environments: pure domain modules, found by name, behind one small stateful class.

A domain is one file of this package with `TOOLS` (OpenAI function schemas) and
`execute(state, name, arguments) -> (new_state, result)`. Arguments are checked against the schemas here, so a
domain sees only well-formed calls. Nothing here knows about policies, prompts or rewards.
"""

from __future__ import annotations

import copy
import functools
import importlib
import pkgutil
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Protocol

import jsonschema

from envace_jax.types import Json

_count_lock = threading.Lock()
_executions = 0


class Environment(Protocol):
    """What answers tool calls for real: stateful, used by one trajectory at a time."""

    def call(self, name: str, arguments: Mapping[str, Json]) -> Json:
        """The JSON result of one call; what goes wrong is a result too, never an exception."""
        ...

    def state(self) -> Json:
        """A copy of the present state."""
        ...


def execution_count() -> int:
    """How many calls the executable environments of this process have answered so far, refused ones included."""
    with _count_lock:
        return _executions


def tool_error(code: str, message: str, details: Json = None) -> dict[str, Json]:
    """A call that is not well-formed, as a result: `{"error_tool_call": {"code", "message", "details"}}`."""
    return {"error_tool_call": {"code": code, "message": message, "details": details}}


def function_schema(name: str, /, **properties: Json) -> dict[str, Json]:
    """The OpenAI schema of a tool whose arguments are all required: `properties` maps argument to JSON schema."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@functools.cache
def domain_names() -> tuple[str, ...]:
    """Names of the modules of this package that are domains (they have `TOOLS` and `execute`)."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(name for name in names if _is_domain(importlib.import_module(f"{__name__}.{name}")))


def load_domain(name: str) -> ModuleType:
    """The domain module called `name`; raises ValueError naming the domains there are."""
    if name not in domain_names():
        raise ValueError(f"no environment is called {name!r}; there are: {', '.join(domain_names())}")
    return importlib.import_module(f"{__name__}.{name}")


def make_environment(spec: Mapping[str, Json]) -> Environment:
    """A fresh environment from `{"name": domain, "state": its initial state}`; the given state is never changed."""
    if not isinstance(spec, Mapping) or set(spec) != {"name", "state"}:
        raise ValueError(f"an environment is {{'name': ..., 'state': ...}}, not {spec!r}")
    return _DomainEnvironment(load_domain(spec["name"]), spec["state"])


class _DomainEnvironment:
    """Applies a pure domain module to a state, one call after the other."""

    def __init__(self, domain: ModuleType, state: Json):
        self._domain = domain
        self._state = copy.deepcopy(state)

    def call(self, name: str, arguments: Mapping[str, Json]) -> Json:
        global _executions
        with _count_lock:
            _executions += 1
        validators = _validators(self._domain)
        if name not in validators:
            return tool_error("unknown_tool", f"no tool is called {name}", sorted(validators))
        problems = sorted(error.message for error in validators[name].iter_errors(arguments))
        if problems:
            return tool_error("invalid_arguments", f"the arguments do not fit {name}", problems)
        self._state, result = self._domain.execute(self._state, name, _plain_integers(arguments))
        return result

    def state(self) -> Json:
        return copy.deepcopy(self._state)


def _is_domain(module: ModuleType) -> bool:
    return hasattr(module, "TOOLS") and hasattr(module, "execute")


@functools.cache
def _validators(domain: ModuleType) -> dict[str, jsonschema.Draft202012Validator]:
    """One validator per tool. Schemas that do not say otherwise are closed: unknown arguments are refused."""
    validators = {}
    for tool in domain.TOOLS:
        schema = {"additionalProperties": False, **tool["function"]["parameters"]}
        validators[tool["function"]["name"]] = jsonschema.Draft202012Validator(schema)
    return validators


def _plain_integers(arguments: Mapping[str, Json]) -> dict[str, Json]:
    """JSON Schema takes 50.0 for an integer; the domains and their results should not have to see it."""
    return {
        key: int(value) if isinstance(value, float) and value.is_integer() else value
        for key, value in arguments.items()
    }
