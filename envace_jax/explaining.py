"""Says in words how each advantage and each mask of a task came about in a step.

The numbers are those of the functions that training calls (`grpo.compare`, `learning.segments_trained`). Knows
trajectories and settings; no device or file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from envace_jax import config_checks, learning, players
from envace_jax.config import RunConfig, UserError
from envace_jax.grpo import REWARD_TOLERANCE, ROLES, Compared, compare
from envace_jax.learning import Rollouts
from envace_jax.types import Role, Trajectory


@dataclasses.dataclass(frozen=True, eq=False)
class _Member:
    """An attempt of the group that is told of."""

    trajectory: Trajectory
    advantages: np.ndarray  # f32[segments]
    trained: np.ndarray  # bool[segments]
    kept: bool  # whether its group is trained on
    weight: float  # of its advantages

    @property
    def counts(self) -> bool:
        """Whether it enters baselines."""
        return self.trajectory.status == "ok" and bool(np.isfinite(self.trajectory.reward))

    def of(self, role: Role) -> np.ndarray:
        """bool[segments]: those in a role."""
        return np.array([segment.role is role for segment in self.trajectory.segments], bool)

    def tokens(self, role: Role) -> int:
        return sum(len(segment.tokens) for segment in self.trajectory.segments if segment.role is role)


def explain(rollouts: Rollouts, config: RunConfig, asked: str) -> list[str]:
    """Lines about one task, `asked` being its id, or about one attempt at it, as ID:ATTEMPT. Raises UserError."""
    task_id, attempt = _asked(rollouts, asked)
    members = _members(rollouts, config, task_id)
    lines = [f"step {rollouts.step + 1}, task {task_id}"]
    for group in dict.fromkeys(member.trajectory.group_id for member in members):
        lines += _group([member for member in members if member.trajectory.group_id == group], config, attempt)
    return lines


def _asked(rollouts: Rollouts, asked: str) -> tuple[str, int | None]:
    known = {trajectory.task_id: trajectory.attempt for trajectory in rollouts.all}
    if asked in known:
        return asked, None
    task_id, _, number = asked.rpartition(":")
    if task_id not in known or not number.isdigit():
        shown = ", ".join(list(known)[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
        raise UserError(f"--explain={asked}: step {rollouts.step + 1} has no such task; it has {shown or 'none'}")
    there = sorted({trajectory.attempt for trajectory in rollouts.all if trajectory.task_id == task_id})
    if int(number) not in there:
        raise UserError(f"--explain={asked}: task {task_id} has the attempts {', '.join(map(str, there))}")
    return task_id, int(number)


def _members(rollouts: Rollouts, config: RunConfig, task_id: str) -> list[_Member]:
    advantages, _ = learning.advantages_of(config, rollouts)
    told = zip(
        rollouts.all,
        learning.segment_advantages(rollouts, advantages),
        learning.segments_trained(config, rollouts, advantages),
        strict=True,
    )
    kept = {trajectory.group_id for trajectory in rollouts.learned}
    rehearsed = {trajectory.group_id for trajectory in rollouts.rehearsed}
    return [
        _Member(one, values, mask, one.group_id in kept, config.fidelity.weight if one.group_id in rehearsed else 1.0)
        for one, values, mask in told
        if one.task_id == task_id
    ]


def _group(members: Sequence[_Member], config: RunConfig, attempt: int | None) -> Iterator[str]:
    grpo, first = config.grpo, members[0].trajectory
    what = "attempts" if first.group_id >= 0 else "rehearsals of a held-out result (the fidelity reward)"
    yield ""
    yield (
        f"group {first.group_id}: {len(members)} {what}; grpo.baseline={grpo.baseline} grpo.scale={grpo.scale} "
        f"grpo.singleton={grpo.singleton}"
    )
    for member in members:
        one = member.trajectory
        sampled = [
            f"{role.name} {_count(member.of(role).sum(), 'segment')} ({_count(member.tokens(role), 'token')})"
            for role in ROLES
        ]
        yield f"  attempt {one.attempt}: {_outcome(member)}; {', '.join(sampled)}"
    for role in ROLES:
        yield from _role(members, config, role, attempt)


def _outcome(member: _Member) -> str:
    one = member.trajectory
    if one.status != "ok":
        return f"masked ({one.reason})"
    return f"reward {one.reward:.6g}, ended by {one.reason}" + ("" if member.counts else " (not finite: not compared)")


def _role(members: Sequence[_Member], config: RunConfig, role: Role, attempt: int | None) -> Iterator[str]:
    """What became of a group's segments in one role."""
    playing = [member for member in members if member.of(role).any()]
    counted = [member for member in playing if member.counts]
    if not playing:
        yield f"  {role.name}: no segments"
        return
    sizes = [int(member.of(role).sum()) for member in counted]
    found = None
    if counted:
        rewards = np.repeat([member.trajectory.reward for member in counted], sizes)
        grpo, owner = config.grpo, np.repeat(np.arange(len(counted)), sizes)
        found = compare(rewards, owner, grpo.baseline, grpo.scale, grpo.singleton, REWARD_TOLERANCE)
    compared = f"{_count(sum(sizes), 'segment')} of {_count(len(counted), 'attempt')}"
    yield f"  {role.name}: {compared}{_rule(found, config)}"
    places = np.cumsum([0, *sizes])
    for member in playing:
        if attempt in (None, member.trajectory.attempt):
            place = int(places[counted.index(member)]) if member in counted else None
            told = f"{_sum(member, role, found, place)}; {_mask(member, config, role)}"
            yield f"    attempt {member.trajectory.attempt}: {told}"


def _rule(found: Compared | None, config: RunConfig) -> str:
    if found is None:
        return ": nothing is compared"
    if found.rule == "alike":
        return f": their rewards differ by less than {REWARD_TOLERANCE:g}, so every advantage is 0"
    if found.rule == "singleton":
        raw = "the reward itself is the advantage" if config.grpo.singleton == "raw" else "the advantage is 0"
        return f", too few to be compared: {raw} (grpo.singleton={config.grpo.singleton})"
    return f" are compared, and divided by {found.scale:.6g}"


def _sum(member: _Member, role: Role, found: Compared | None, place: int | None) -> str:
    """The advantage of a member's segments in a role, as a sum."""
    if place is None or found is None:
        return "advantage 0, enters no baseline"
    value = float(member.advantages[member.of(role)][0]) if member.kept else float(found.advantages[place])
    text = f"advantage {value:+.6g}"
    if found.rule == "compared":
        weight = "" if member.weight == 1.0 else f" x fidelity.weight {member.weight:g}"
        text += f" = ({member.trajectory.reward:.6g} - {found.baseline[place]:.6g}) / {found.scale:.6g}{weight}"
    return text


def _mask(member: _Member, config: RunConfig, role: Role) -> str:
    """Why a member's tokens in a role are trained or not."""
    kind, setting, _ = config_checks.cast(config)
    if member.trajectory.status != "ok":
        return "not trained: a fault outside the policy masks the attempt"
    if not member.kept:
        return "not trained: data.filter_zero_variance leaves groups that are rewarded alike out"
    if not any(role in roles for roles in players.LEARNERS[kind].values()):
        return f"not trained: nobody learns {role.name} ({setting or 'rollout.players'}: {kind})"
    if not member.trained[member.of(role)].all():
        return "not trained: batch.drop_zero_advantage leaves it out; its tokens count in the loss's mean all the same"
    return f"trained: {_count(member.tokens(role), 'token')} in the loss mask"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
