"""tau2-bench as a suite: its domains in this package's environments, outcomes by its own evaluation (`envs/tau2.py`).

mock_solo and telecom_small are worked from a ticket. airline, retail and three of mock's tasks have a simulated user,
which a language model behind an address plays.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from envace_jax.benchmarks import Case, Options, Outcome, Step, Suite, chosen_categories, subset
from envace_jax.benchmarks.scores import Attempt, pass_hat
from envace_jax.config import UserError
from envace_jax.envs import tau2
from envace_jax.futures import done, then
from envace_jax.types import Json, Trajectory

CATEGORIES = tau2.SETS
SOLO = ("mock_solo", "telecom_small")  # those that need no simulated user
SMALL = {"mock": 9, "mock_solo": 6, "telecom_small": 5, "airline": 5, "retail": 5}  # cases of each
STEPS = 100  # the most assistant messages; tau2 counts 200 messages of all
NOT_HERE = {"telecom": "its user calls tools of its own, and is not played here; telecom_small has tickets instead"}
NEEDS_USER = "needs a language model for the user: --config.user.urls=http://HOST:PORT/v1 --config.user.model=NAME"


def read(options: Options) -> Suite:
    """The tasks of the sets asked for; by default those without a simulated user, and with one airline and retail."""
    asked = chosen_categories(options, CATEGORIES)
    default = (*SOLO, "airline", "retail") if options.with_user else SOLO
    cases = [
        Case(task.task_id.removeprefix("tau2:"), name, task) for name in asked or default for task in tau2.tasks(name)
    ]
    missing = dict(NOT_HERE)
    if not options.with_user:
        needing = sorted({case.category for case in cases if case.task.scenario})
        if needing:
            raise UserError(f"--categories: {', '.join(needing)} {NEEDS_USER}")
        missing |= {name: NEEDS_USER for name in ("airline", "retail")}
    missing |= {name: "not asked for" for name in CATEGORIES if asked and name not in (*asked, *missing)}
    return Suite(tau2.package(), subset(cases, options, SMALL), missing, steps=STEPS)


def outcome(case: Case, trajectory: Trajectory, state: Json) -> Future[Outcome]:
    """tau2's reward; 0 for a conversation that met a limit, as there."""
    if trajectory.reason != "done":
        return done(Outcome(0.0, {"ended": trajectory.reason}))
    return then(tau2.score(case.task, trajectory.messages), Outcome)


def gold(case: Case) -> list[Step] | None:
    """The gold actions, a message each, then a reply that says all that is to be said."""
    said = [word for item in case.task.checklist[0] for word in (item.check or {}).get("words", ())]
    return [*((call,) for call, _ in case.task.reference), "\n".join(said) or "It is done."]


def summary(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """pass^k of every set, in percent."""
    trials = 1 + max((attempt.trial for attempt in attempts), default=0)
    found = {}
    for name in dict.fromkeys(attempt.category for attempt in attempts):
        found[name] = pass_hat([attempt for attempt in attempts if attempt.category == name], trials)
    return {"pass_hat": found}
