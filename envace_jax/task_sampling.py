"""Which tasks a step attempts: those of a stream in its order, or those whose success is near one half more often; and
further ones in place of groups from which nothing can be learned.

Host only, and deterministic: what is taken is a function of the tasks, the seed, the step, and of `Drawn`, which a run
keeps in its checkpoints. Knows trajectories by their rewards; nothing of tokens, policies or losses.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from envace_jax.config import DataConfig
from envace_jax.data import TaskStream
from envace_jax.evaluate import FULL_REWARD
from envace_jax.grpo import REWARD_TOLERANCE
from envace_jax.task_store import StoredTasks
from envace_jax.types import Task, Trajectory

PRIOR = 1.0  # solved attempts, and as many that were not, that every task begins with: a new one counts as one half
KEPT = 0.8  # what earlier attempts still count for when a task is attempted again, since the policy has changed
FLOOR = 0.01  # added to p (1 - p), which is at most 0.25, so that no task is lost for good
SUCCESS_STREAM = 1  # tells the random numbers from those of the stream's own order

Record = dict[str, list[float]]  # task id -> [attempts, solved ones], older ones counting for less; plain JSON


@dataclasses.dataclass
class Drawn:
    """What a run has drawn so far; changed in place. Both are JSON values."""

    taken: int = 0  # tasks
    record: Record = dataclasses.field(default_factory=dict)

    def note(self, trajectories: Iterable[Trajectory]) -> None:
        """Adds how a step's attempts went. A masked one says nothing of its task."""
        found: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        for trajectory in trajectories:
            if trajectory.status == "ok" and np.isfinite(trajectory.reward):
                found[trajectory.task_id][0] += 1.0
                found[trajectory.task_id][1] += float(trajectory.reward >= FULL_REWARD)
        for task_id, (attempts, solved) in found.items():
            before = self.record.get(task_id, [0.0, 0.0])
            self.record[task_id] = [KEPT * before[0] + attempts, KEPT * before[1] + solved]


def weights(tasks: Sequence[Task], record: Mapping[str, Sequence[float]]) -> np.ndarray:
    """f64[tasks]: p (1 - p) + FLOOR, with p the mean of the Beta posterior of a task's success (`PRIOR`)."""
    ids = tasks.ids if isinstance(tasks, StoredTasks) else [task.task_id for task in tasks]
    attempts, solved = np.array([record.get(task_id, (0.0, 0.0)) for task_id in ids], np.float64).T
    p = (solved + PRIOR) / (attempts + 2 * PRIOR)
    return p * (1 - p) + FLOOR


def by_success(tasks: Sequence[Task], seed: int, step: int, record: Mapping[str, Sequence[float]]) -> Sequence[Task]:
    """All tasks in the order in which a step would draw them without putting back, each draw with `weights`."""
    # The largest of log-weight + Gumbel noise is a draw by weight, the next one a draw from what is left, and so on.
    noise = np.random.default_rng((seed, SUCCESS_STREAM, step)).gumbel(size=len(tasks))
    order = np.argsort(-(np.log(weights(tasks, record)) + noise), kind="stable")
    # Of tasks on disk only those that are taken are read.
    return tasks.chosen(order.tolist()) if isinstance(tasks, StoredTasks) else [tasks[place] for place in order]


def candidates(stream: TaskStream, step: int, drawn: Drawn, *, by: str, refilled: bool) -> Iterable[Task]:
    """The tasks that a step may take, the first `stream.batch_size` of them before any other.

    by "uniform" is the stream's own order: those of the step, or where groups are `refilled`, and steps take more or
    fewer, those after all that was taken. by "success" is `by_success`.
    """
    if by == "success":
        return by_success(stream.tasks, stream.seed, step, drawn.record)
    if not refilled:
        return stream.batch_at(step)
    # So many hold every task at least once beside those of the batch.
    return itertools.islice(stream.tasks_from(drawn.taken), stream.batch_size + len(stream.tasks))


def of_step(
    data: DataConfig,
    stream: TaskStream,
    step: int,
    drawn: Drawn,
    play: Callable[[Sequence[Task], int], Sequence[Trajectory]],
) -> Gathered:
    """The attempts of a step; `drawn` is brought up to date. `play` is given tasks and the first one's group id."""
    most = data.tasks_per_step * (1 + data.extra_rollouts * data.filter_zero_variance)  # groups of any step
    found = gather(
        candidates(stream, step, drawn, by=data.sampling, refilled=data.filter_zero_variance),
        data.tasks_per_step,
        lambda tasks, before: play(tasks, step * most + before),
        filtered=data.filter_zero_variance,
        extra_rollouts=data.extra_rollouts,
    )
    drawn.taken += found.taken
    if data.sampling == "success":
        drawn.note(found.trajectories)
    return found


@dataclasses.dataclass(frozen=True)
class Gathered:
    """The attempts of a step."""

    tasks: tuple[Task, ...]  # all that were attempted
    trajectories: tuple[Trajectory, ...]  # all of them, task by task
    trained: tuple[Trajectory, ...]  # those of the groups that are trained on
    taken: int  # candidates used up

    def metrics(self, attempts: int) -> dict[str, float]:
        """What filtering did: groups left out, and tasks attempted beyond the step's own."""
        groups = len(self.trained) // attempts
        return {"groups_trained": float(groups), "groups_left_out": float(len(self.tasks) - groups)}


def gather(
    upcoming: Iterable[Task],
    wanted: int,
    play: Callable[[Sequence[Task], int], Sequence[Trajectory]],
    *,
    filtered: bool = False,
    extra_rollouts: int = 0,
) -> Gathered:
    """Attempts the first `wanted` tasks; if `filtered`, leaves out groups that were rewarded alike and fills up.

    For every group that is missing one more task is attempted, in up to `extra_rollouts` further rollouts, as in DAPO's
    dynamic sampling (arXiv:2503.14476). A step does not come back to a task that it has attempted. What is found by
    then is trained on, even if it is nothing.

    Args:
      play: rolls out tasks; the number is how many the step has attempted before, for the group ids.
    """
    coming = iter(upcoming)
    tasks = list(itertools.islice(coming, wanted))
    trajectories = list(play(tasks, 0))
    taken = len(tasks)
    if not filtered:
        return gathered(tasks, trajectories, taken, filtered=False)
    attempted = {task.task_id for task in tasks}
    for _ in range(extra_rollouts):
        more: list[Task] = []
        missing = wanted - len(informative_groups(trajectories))
        while len(more) < missing and (task := next(coming, None)) is not None:
            taken += 1
            if task.task_id not in attempted:
                attempted.add(task.task_id)
                more.append(task)
        if not more:
            break
        trajectories += play(more, len(tasks))
        tasks += more
    return gathered(tasks, trajectories, taken, filtered=True)


def gathered(tasks: Iterable[Task], trajectories: Iterable[Trajectory], taken: int, *, filtered: bool) -> Gathered:
    """The attempts, and those that are trained on: all, or if `filtered` the informative groups'."""
    whole = tuple(trajectories)
    kept = informative_groups(whole) if filtered else {trajectory.group_id for trajectory in whole}
    trained = tuple(trajectory for trajectory in whole if trajectory.group_id in kept)
    return Gathered(tuple(tasks), whole, trained, taken)


def informative_groups(trajectories: Iterable[Trajectory]) -> set[int]:
    """Ids of the groups whose attempts were not all rewarded alike; masked attempts do not count."""
    rewards: dict[int, list[float]] = collections.defaultdict(list)
    for trajectory in trajectories:
        if trajectory.status == "ok" and np.isfinite(trajectory.reward):
            rewards[trajectory.group_id].append(trajectory.reward)
    return {group for group, found in rewards.items() if max(found) - min(found) >= REWARD_TOLERANCE}
