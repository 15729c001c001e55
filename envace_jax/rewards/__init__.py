"""Rewards: what scores a finished user turn. The interface and the one fault every reward may report."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from envace_jax.futures import done
from envace_jax.types import MessageList, Task, TurnScore


class RewardUnavailable(RuntimeError):
    """A turn's score cannot be known (no judge, a judge's fault). The trajectory is masked, never scored 0."""


class Reward(Protocol):
    """Scores user turns; slow rewards answer later, through the future.

    A reward may also have `can_score(task) -> bool`: a run of tasks none of which it can score is refused at the start;
    and `model`, a LocalModel that it asks: the rollout moves that along, and waits for its answers without end.
    """

    def score_turn(self, task: Task, turn: int, turn_messages: MessageList) -> Future[TurnScore]:
        """Scores a turn from its user message and what followed. An exception in the future masks the trajectory."""
        ...


class Unscored:
    """Lets every user turn begin and says nothing of it: where nobody judges, or a benchmark does in the end."""

    def score_turn(self, task: Task, turn: int, turn_messages: MessageList) -> Future[TurnScore]:
        return done(TurnScore(0.0, (), True))
