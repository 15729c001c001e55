"""Benchmarks: modules of this package, found by name, that `python -m envace_jax.evaluate` runs.

Most are suites of conversations, which every policy plays through the same `rollout()` (`runner.py`). Such a module has

    CATEGORIES                                names of what may be asked for by --categories
    read(options) -> Suite                    the cases, and what is left out and why
    outcome(case, trajectory, state) -> Future[Outcome]
    gold(case) -> list of Step, or None       what a policy would write that solves the case; None: nobody knows
    summary(attempts) -> dict                 figures of several categories, as the benchmark defines them

and may have `begin(case, carried) -> Future[Task]`, for cases that begin with what another one left, and `JUDGED`, True
where the settings' reward judges its user turns. A benchmark whose
own program plays the conversations has `CATEGORIES`, `about(options) -> dict`, all that a continued run must have in
common with the one before, and `run(options) -> dict` instead.

Nothing here knows how a model is loaded or asked.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envace_jax.config import UserError
from envace_jax.rewards import Reward
from envace_jax.types import Json, Message, Task, ToolCall

# A message of a scripted policy: its calls, or its text.
Step = str | tuple[ToolCall, ...]


@dataclasses.dataclass(frozen=True)
class Options:
    """What of a benchmark is asked for."""

    categories: tuple[str, ...] = ()  # () : those that can be run
    subset: str = "all"  # all, small, first:N, or a file with an id on each line
    seed: int = 0
    with_user: bool = False  # whether somebody plays the user where a task has a simulated one
    data: str = ""  # a file of the user's own
    environments: tuple[str, ...] = ()  # files of environments outside the package
    reward: Reward | None = None  # by which user turns are judged where a benchmark leaves that open
    vita_path: str = ""  # a checkout of the user's own
    server: str = ""  # address of the policy, where it is asked by one
    model: str = ""  # its name there
    request: Mapping[str, Json] = dataclasses.field(default_factory=dict)  # how it is to sample: temperature, ...
    user_url: str = ""
    user_model: str = ""
    out: Path = Path()
    trials: int = 1


@dataclasses.dataclass(frozen=True)
class Case:
    """One conversation of a benchmark."""

    case_id: str  # the benchmark's own
    category: str
    task: Task
    scored: bool = True  # False: it is only played for what it leaves to others
    after: str = ""  # id of the case whose end this one begins with
    one_message: bool = False  # only the first message counts, so no second one is asked for


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the benchmark says of a finished conversation."""

    score: float | None  # in [0, 1]; None for a case that is not scored
    detail: Json = None  # what else it says
    carried: Json = None  # what a case after it begins with


@dataclasses.dataclass(frozen=True)
class Suite:
    """The cases to play, in order; `missing` says of each category that is left out why it is."""

    package: str  # name and version of what scores them
    cases: tuple[Case, ...]
    missing: Mapping[str, str]
    reward: Reward | None = None  # of user turns, where the outcome depends on it
    steps: int = 30  # the most assistant messages in a conversation


def names() -> tuple[str, ...]:
    """The benchmarks' names, for people."""
    return tuple(name for name, module in _modules().items() if hasattr(module, "CATEGORIES"))


def load(name: str) -> types.ModuleType:
    """The module of a benchmark; raises UserError naming those there are."""
    if name not in names():
        raise UserError(f"--benchmark={name}: there is no such benchmark; there are: {', '.join(names())}")
    return _modules()[name]


def is_suite(module: types.ModuleType) -> bool:
    """Whether a module's conversations are played here."""
    return all(hasattr(module, name) for name in ("CATEGORIES", "read", "outcome", "gold", "summary"))


def chosen_categories(options: Options, known: Sequence[str]) -> tuple[str, ...]:
    """The categories asked for, in their order; () where none were. Raises UserError for an unknown one."""
    for name in options.categories:
        if name not in known:
            raise UserError(f"--categories: there is no {name!r}; there are: {', '.join(known)}")
    return options.categories


def subset(cases: Sequence[Case], options: Options, small: Mapping[str, int]) -> tuple[Case, ...]:
    """The cases that `options.subset` asks for, with those that they come after.

    `small` says how many of each category are the small subset, the first ones; what it does not name has all.
    Raises UserError for a subset that is no such thing, or an id that no case has.
    """
    text = options.subset
    scored = [case for case in cases if case.scored]
    if text == "all":
        chosen = {case.case_id for case in scored}
    elif text == "small" or text.startswith("first:"):
        count = text.removeprefix("first:")
        if text != "small" and not (count.isdigit() and int(count) > 0):
            raise UserError(f"--subset={text}: expected first:N with a number N of at least 1")
        chosen = set()
        for category in dict.fromkeys(case.category for case in scored):
            own = [case.case_id for case in scored if case.category == category]
            chosen |= set(own[: small.get(category, len(own)) if text == "small" else int(count)])
    else:
        chosen = _ids(Path(text).expanduser(), scored)
    by_id = {case.case_id: case for case in cases}
    needed = set(chosen)
    for name in chosen:
        while name := by_id[name].after:
            needed.add(name)
    return tuple(case for case in cases if case.case_id in needed)


def _ids(path: Path, cases: Sequence[Case]) -> set[str]:
    if not path.is_file():
        raise UserError(f"--subset={path}: expected all, small, first:N, or a file with an id on each line")
    wanted = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    known = {case.case_id for case in cases}
    for number, name in enumerate(wanted, start=1):
        if name not in known:
            raise UserError(f"--subset={path}, line {number}: no case of these categories has the id {name!r}")
    if not wanted:
        raise UserError(f"--subset={path}: no ids")
    return set(wanted)


def calls_in(messages: Sequence[Message]) -> list[str]:
    """The names of all tools that an assistant calls, in order."""
    found: list[str] = []
    for message in messages:
        if message["role"] == "assistant":
            found += [call.get("function", call)["name"] for call in message.get("tool_calls") or ()]
    return found


def _modules() -> dict[str, Any]:
    found = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in found}
