"""Scores the conversations of a dump anew, without asking anybody.

Program checks are made again from the conversation. What a judge said comes from the run's file of verdicts, or else
from the dump. Knows conversations and rewards; no token, device or file.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from envace_jax.episode import earned
from envace_jax.learning import Rollouts
from envace_jax.rewards import Reward, RewardUnavailable
from envace_jax.rewards.checklist import passes, read_turn, turn_score
from envace_jax.task_sampling import gathered
from envace_jax.types import Message, MessageList, Task, Trajectory, TurnScore

# Where the scores of turns came from, as a person is told it.
CHECKED = "by program checks"
KEPT = "by the run's kept verdicts"
DUMPED_VERDICTS = "by the dumped verdicts, and program checks where there are any"
DUMPED = "as dumped"


def rescored(rollouts: Rollouts, reward: Reward | None, *, filtered: bool) -> tuple[Rollouts, dict[str, int]]:
    """The rollouts with their attempts scored by `reward` (None: as they are), and how many turns were scored how.

    Masked attempts stay masked. Rehearsals of held-out results keep their rewards: what they are compared with is not
    in the dump. `filtered` is `data.filter_zero_variance`.
    """
    old = rollouts.gathered
    tasks = {task.task_id: task for task in old.tasks}
    sources: collections.Counter[str] = collections.Counter()
    whole = [_rescored(tasks, trajectory, reward, sources) for trajectory in old.trajectories]
    new = gathered(old.tasks, whole, old.taken, filtered=filtered)
    return dataclasses.replace(rollouts, gathered=new), dict(sources)


def _rescored(
    tasks: Mapping[str, Task], trajectory: Trajectory, reward: Reward | None, sources: collections.Counter[str]
) -> Trajectory:
    if trajectory.status != "ok":
        return trajectory
    task, scores = tasks[trajectory.task_id], []
    for turn, dumped in enumerate(trajectory.turn_scores):
        said = turn_messages(task, trajectory.messages, turn)
        score, source = (dumped, DUMPED) if reward is None else _scored(reward, task, turn, said, dumped)
        scores.append(score)
        sources[source] += 1
    return dataclasses.replace(trajectory, turn_scores=tuple(scores), reward=earned(task, scores))


def _scored(reward: Reward, task: Task, turn: int, said: MessageList, dumped: TurnScore) -> tuple[TurnScore, str]:
    items = task.checklist[turn]
    judged = any(item.check is None for item in items)
    try:
        return reward.score_turn(task, turn, said).result(), KEPT if judged else CHECKED
    except Exception:  # whatever keeps it from scoring: the dump knows what it said then
        pass
    steps, reply = read_turn(said)
    try:
        held = [
            verdict if item.check is None else passes(item, steps, reply)
            for item, verdict in zip(items, dumped.verdicts, strict=True)
        ]
    except (RewardUnavailable, ValueError):  # another kind of reward, with other verdicts or none
        return dumped, DUMPED
    return turn_score(items, held), DUMPED_VERDICTS


def turn_messages(task: Task, messages: tuple[Message, ...], turn: int) -> tuple[Message, ...]:
    """A user turn of a conversation, from its user message on, as `episode.py` hands it to a reward."""
    given = len(task.messages)
    if task.scenario:  # the user answers within the one turn
        return messages[given:]
    if not task.user_turns:
        users = [place for place, message in enumerate(task.messages) if message["role"] == "user"]
        return messages[users[-1] if users else 0 :]
    begins = [place for place in range(given, len(messages)) if messages[place]["role"] == "user"]
    end = begins[turn + 1] if turn + 1 < len(begins) else len(messages)
    return messages[begins[turn] : end]
