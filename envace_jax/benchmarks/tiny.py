"""The tiny world as a suite: tasks that no training sees, solved where the checklist holds and the end state is right.

It needs nothing but this package. The shipped base was taught the forms of its config:

    python -m envace_jax.evaluate --benchmark=tiny --model=asset:tiny_base --config=configs/tiny.py --temperature=1
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from envace_jax import __version__
from envace_jax.benchmarks import Case, Options, Outcome, Step, Suite, chosen_categories, subset
from envace_jax.benchmarks.scores import Attempt
from envace_jax.envs import tiny
from envace_jax.evaluate import is_solved, reference_state
from envace_jax.rewards.checklist import ChecklistReward
from envace_jax.roles import message_calls
from envace_jax.types import Json, Trajectory

COUNTS = {"heldout": 256, "unseen": 64}  # tasks of the domains that are trained on, and of one that is not
CATEGORIES = tuple(COUNTS)
SMALL = {"heldout": 32, "unseen": 8}  # cases of each
TASK_SEED = 0  # which tasks they are, whatever the seed of the attempts


def read(options: Options) -> Suite:
    """The tasks of the splits asked for."""
    chosen = chosen_categories(options, CATEGORIES) or CATEGORIES
    cases = [Case(task.task_id, name, task) for name in chosen for task in tiny.tasks(name, COUNTS[name], TASK_SEED)]
    missing = {name: "not asked for" for name in CATEGORIES if name not in chosen}
    return Suite(f"envace_jax {__version__}", subset(cases, options, SMALL), missing, ChecklistReward())


def outcome(case: Case, trajectory: Trajectory, state: Json) -> Future[Outcome]:
    """Whether the task is solved."""
    answer: Future[Outcome] = Future()
    solved = is_solved(trajectory, state, reference_state(case.task))
    answer.set_result(Outcome(float(solved), {"reward": trajectory.reward}))
    return answer


def gold(case: Case) -> list[Step] | None:
    """The assistant's messages of the recorded conversation."""
    said = [message for message in case.task.conversation if message["role"] == "assistant"]
    return [tuple(message_calls(message)) or str(message["content"]) for message in said]


def summary(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """The mean checklist reward, in percent."""
    rewards = [attempt.detail["reward"] for attempt in attempts if attempt.detail is not None]
    return {"reward": 100 * sum(rewards) / len(rewards) if rewards else None}
