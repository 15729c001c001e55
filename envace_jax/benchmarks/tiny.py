"""The tiny world as a benchmark: held-out tasks of the domains that policies are trained on, and of one that is new.

The tasks are the first of those that training's own evaluation measures, and solved is as strict: the whole checklist
holds and the environment ends in the state that the reference calls lead to (`evaluate.is_solved`). The tiny policy
needs its own prompts and lengths: give --config=configs/tiny.py, and with --rehearsal room for a memory
(limits.act_context, sampler.max_length and sampler.cache_lengths of 640).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from envace_jax.benchmarks import Case, Options, Outcome, Step, Suite, chosen_categories, subset
from envace_jax.benchmarks.scores import Attempt
from envace_jax.envs import tiny
from envace_jax.evaluate import is_solved, reference_state
from envace_jax.rewards.checklist import ChecklistReward
from envace_jax.roles import message_calls
from envace_jax.types import Json, Trajectory

COUNTS = {"heldout": 256, "unseen": 64}  # cases of each category; as in configs/tiny.py
SMALL = {"heldout": 32, "unseen": 16}
CATEGORIES = tuple(COUNTS)
TASK_SEED = 0  # as data.seed there


def read(options: Options) -> Suite:
    """The cases of the categories asked for, by default of both."""
    asked = chosen_categories(options, CATEGORIES)
    cases = [
        Case(task.task_id, category, task)
        for category in asked or CATEGORIES
        for task in tiny.tasks(category, COUNTS[category], TASK_SEED)
    ]
    missing = {category: "not asked for" for category in CATEGORIES if asked and category not in asked}
    return Suite("the tiny world of this package", subset(cases, options, SMALL), missing, reward=ChecklistReward())


def outcome(case: Case, trajectory: Trajectory, state: Json) -> Future[Outcome]:
    """1 where the task is solved, else 0; the detail is the share of its checklist that held."""
    solved = is_solved(trajectory, state, reference_state(case.task))
    answer: Future[Outcome] = Future()
    answer.set_result(Outcome(float(solved), {"reward": trajectory.reward}))
    return answer


def gold(case: Case) -> list[Step]:
    """The assistant messages of the reference conversation."""
    steps: list[Step] = []
    for message in tiny.conversation(case.task):
        if message["role"] == "assistant":
            steps.append(tuple(message_calls(message)) or message["content"])
    return steps


def summary(attempts: Sequence[Attempt]) -> Mapping[str, Any]:
    """Nothing beyond the categories: what is new must not be averaged with what is not."""
    del attempts
    return {}
