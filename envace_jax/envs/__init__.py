"""Executable environments: modules of this package, found by name. There are two kinds.

A *domain* is one file, of this package or one's own (`add_file`), with `TOOLS` (OpenAI function schemas) and
`execute(state, name, arguments) -> (new_state, result)`, pure and run in this process. Arguments are checked against
the schemas here, so a domain sees only well-formed calls.

A *process module* is a benchmark that runs in worker processes (`worker.py`), and has

    tasks(source) -> list[Task]                  the benchmark's tasks, whose environments say {"name", "state"}
    open(spec) -> Environment                    its calls may be futures
    score(task, messages) -> Future[float]       the benchmark's own outcome, in [0, 1], of a finished conversation

Nothing here knows about policies, prompts or rewards.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import pkgutil
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Protocol

import jsonschema

from envace_jax.types import Json

_count_lock = threading.Lock()
_executions = 0
_own: dict[str, ModuleType] = {}  # by name, what `add_file` has loaded


class Environment(Protocol):
    """What answers tool calls for real: stateful, used by one trajectory at a time."""

    def call(self, name: str, arguments: Mapping[str, Json]) -> Json | Future[Json]:
        """The JSON result of one call; what goes wrong is a result too, never an exception.

        It may be a future, and further calls made before it is there: they are executed in order. An exception in it
        (`worker.EnvironmentFault`) is a fault from outside, not a result.
        """
        ...

    def state(self) -> Json | Future[Json]:
        """A copy of the present state, likewise."""
        ...

    def close(self) -> None:
        """Nothing more will be asked."""
        ...


def execution_count() -> int:
    """How many calls the executable environments of this process have answered so far, refused ones included."""
    with _count_lock:
        return _executions


def count_execution() -> None:
    """For environments of process modules to say that they were asked to execute a call."""
    global _executions
    with _count_lock:
        _executions += 1


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
    return tuple(name for name, module in _modules().items() if hasattr(module, "TOOLS") and hasattr(module, "execute"))


@functools.cache
def process_names() -> tuple[str, ...]:
    """Names of the modules of this package that are process modules (they have `tasks`, `open` and `score`)."""
    wanted = ("tasks", "open", "score")
    return tuple(name for name, module in _modules().items() if all(hasattr(module, attribute) for attribute in wanted))


def add_file(path: Path) -> None:
    """Makes a file from outside the package a domain, called by the file's name without `.py`.

    The file is executed. That is why a person names it in the settings, and a task, which may come from anywhere, can
    only choose among those. Raises ValueError where it is no domain or its name is another's, FileNotFoundError where
    it is missing.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no environment file {path}")
    name, file = path.stem, str(path.resolve())
    if name in _modules() or (name in _own and _own[name].__file__ != file):
        raise ValueError(f"{path}: an environment is called {name!r} already; rename the file")
    spec = importlib.util.spec_from_file_location(f"{__name__}.own.{name}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: not a Python file; an environment's name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # some of what a file may hold looks itself up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # it is a program: it may raise anything
        message = " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be loaded: {type(error).__name__}: {message}") from error
    if not (hasattr(module, "TOOLS") and hasattr(module, "execute")):
        raise ValueError(f"{path}: no environment, which has TOOLS and execute(state, name, arguments)")
    _own[name] = module


def load_domain(name: str) -> ModuleType:
    """The domain module called `name`; raises ValueError naming the environments there are."""
    if name in _own:
        return _own[name]
    if name not in domain_names():
        there = ", ".join((*domain_names(), *process_names(), *_own))
        raise ValueError(f"no environment is called {name!r}; there are: {there}")
    return _modules()[name]


def load_process(name: str) -> ModuleType | None:
    """The process module called `name`, or None where there is none of that name."""
    return _modules()[name] if name in process_names() else None


def make_environment(spec: Mapping[str, Json]) -> Environment:
    """A fresh environment from `{"name": module, "state": its initial state}`; the given state is never changed."""
    if not isinstance(spec, Mapping) or set(spec) != {"name", "state"}:
        raise ValueError(f"an environment is {{'name': ..., 'state': ...}}, not {spec!r}")
    if (process := load_process(spec["name"])) is not None:
        return process.open(spec)
    return _DomainEnvironment(load_domain(spec["name"]), spec["state"])


class _DomainEnvironment:
    """Applies a pure domain module to a state, one call after the other."""

    def __init__(self, domain: ModuleType, state: Json):
        self._domain = domain
        self._state = copy.deepcopy(state)

    def call(self, name: str, arguments: Mapping[str, Json]) -> Json:
        count_execution()
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

    def close(self) -> None:
        pass


@functools.cache
def _modules() -> dict[str, ModuleType]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}


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
