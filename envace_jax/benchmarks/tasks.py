"""Tasks of one's own as a benchmark: a file of executable tasks (`--data`), each played in its environment.

A task names a domain of this package or a file of the settings (`--config.data.environments`). Solved is as strict as
in training's own evaluation: the whole checklist holds and the environment ends in the state that the reference calls
lead to. Items without a program check need a judge with an address (`--config.reward.kind=judge`). The categories are
the environments' names.
"""

from __future__ import annotations

from collections.abc import Sequence

from envace_jax import data, envs
from envace_jax.benchmarks import Case, Options, Suite, chosen_categories, subset, tiny
from envace_jax.config import UserError, local_path
from envace_jax.rewards import Reward
from envace_jax.types import Task

CATEGORIES: tuple[str, ...] = ()  # whatever environments the file's tasks name
JUDGED = True  # by the settings' reward
SMALL = 16  # tasks of each environment
NEEDED = "--benchmark=tasks needs --data=FILE, tasks with an `environment` (docs/howto_environment.md)"

outcome, gold, summary = tiny.outcome, tiny.gold, tiny.summary


def read(options: Options) -> Suite:
    """A case for every task of the file. Raises UserError, ValueError or FileNotFoundError, one line each."""
    if not options.data:
        raise UserError(NEEDED)
    for file in options.environments:
        envs.add_file(local_path(file))
    tasks = data.read_tasks(local_path(options.data))
    cases = [Case(task.task_id, _environment_of(task, options), task) for task in tasks]
    known = tuple(dict.fromkeys(case.category for case in cases))
    asked = chosen_categories(options, known)
    cases = [case for case in cases if not asked or case.category in asked]
    _check_scores([case.task for case in cases], options.reward)
    missing = {name: "not asked for" for name in known if asked and name not in asked}
    chosen = subset(cases, options, dict.fromkeys(known, SMALL))
    return Suite(f"tasks of {options.data}", chosen, missing, reward=options.reward)


def _environment_of(task: Task, options: Options) -> str:
    """The name of the task's environment. Raises UserError where the task could not be played in it."""
    if task.environment is None:
        raise UserError(f"--data: task {task.task_id!r} of {options.data} has no executable environment. {NEEDED}")
    name = str(task.environment["name"])
    if envs.load_process(name) is not None:
        raise UserError(f"--data: task {task.task_id!r} is one of {name}: measure it by --benchmark={name}")
    envs.load_domain(name)
    if task.scenario and not options.with_user:
        raise UserError(
            f"--data: task {task.task_id!r} has a simulated user, which a model plays: give one (--config.user.urls, "
            "user.model)"
        )
    return name


def _check_scores(tasks: Sequence[Task], reward: Reward | None) -> None:
    """Raises UserError where no task could be scored, and says how many cannot be."""
    can_score = getattr(reward, "can_score", lambda task: True)  # only some rewards know
    lost = [task for task in tasks if not can_score(task)]
    told = "items without a program check, which need a judge (--config.reward.kind=judge, reward.urls, reward.model)"
    if lost and len(lost) == len(tasks):
        raise UserError(f"--data: every task has {told}")
    if lost:
        print(f"--data: {len(lost)} of {len(tasks)} tasks, the first {lost[0].task_id!r}, have {told}", flush=True)
