"""Who plays the two roles, and whose tokens train whom.

    shared             one set of parameters plays both roles and learns from both (the method)
    separate           each role has its own, which learns from that role's tokens alone, with its own optimizer state
    frozen_act         ACT is played by parameters that never change; the others play and learn REHEARSE
    frozen_rehearse    the same with the roles exchanged

Knows parameters, samplers and train states; nothing of tasks, rewards, or how a step is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envace_jax.grpo import ROLES
from envace_jax.responders import Rehearsed
from envace_jax.rollout import Player
from envace_jax.sampling import Sampler
from envace_jax.types import Params, Role, TrainState, Trajectory

# What a run trains: one train state, or one for each role by its name ("act", "rehearse").
State = TrainState | dict[str, TrainState]
Stats = dict[str, float]

ACT, REHEARSE = (role.name.lower() for role in ROLES)
LEARNERS: Mapping[str, Mapping[str, tuple[Role, ...]]] = {
    "shared": {"": ROLES},
    "separate": {ACT: (Role.ACT,), REHEARSE: (Role.REHEARSE,)},
    "frozen_act": {"": (Role.REHEARSE,)},
    "frozen_rehearse": {"": (Role.ACT,)},
}


@dataclasses.dataclass(frozen=True)
class Cast:
    """The samplers of both roles, the frozen parameters if there are any, and who learns what."""

    kind: str  # a key of LEARNERS
    for_decoding: Callable[[Params], Params]  # of the trained parameters
    sampler: Sampler  # ACT's, and REHEARSE's where one set of parameters plays both
    rehearse_sampler: Sampler | None = None
    frozen: Params | None = None  # as decoding wants them, made once

    @property
    def learners(self) -> Mapping[str, tuple[Role, ...]]:
        """The roles that each set of trained parameters learns from, by the name of its part of the state."""
        return LEARNERS[self.kind]

    def players(self, state: State) -> tuple[Player, Player | None]:
        """Who plays ACT, and who plays REHEARSE where that is another; trained parameters are made ready to decode."""
        if self.rehearse_sampler is None:
            return Player(self.sampler, self.for_decoding(part(state, "").params)), None
        act, rehearse = (
            self.frozen if self.kind == f"frozen_{role}" else self.for_decoding(part(state, role).params)
            for role in (ACT, REHEARSE)
        )
        return Player(self.sampler, act), Player(self.rehearse_sampler, rehearse)

    def to_compile(self, state: State) -> list[Player]:
        """Players whose samplers have programs of their own: what one compiles, its twin need not."""
        act, rehearse = self.players(state)
        return [act] if rehearse is None or same_programs(act.sampler, rehearse.sampler) else [act, rehearse]

    def slot_steps(self) -> tuple[int, int]:
        """Slots that drew a token, and all that could have, summed over decoding steps since the samplers were made."""
        stats = [(sampler.stats, sampler.slots) for sampler in self._samplers()]
        return sum(own.busy_slot_steps for own, _ in stats), sum(own.decode_steps * slots for own, slots in stats)

    def reset(self) -> None:
        """Empties the samplers, so that their caches take no memory."""
        for sampler in self._samplers():
            sampler.reset()

    def _samplers(self) -> list[Sampler]:
        return [sampler for sampler in (self.sampler, self.rehearse_sampler) if sampler is not None]


def same_programs(one: Sampler, other: Sampler) -> bool:
    return one.programs is other.programs


# --- the state's parts ---


def begin(kind: str, params: Params, init: Callable[[Params], TrainState]) -> State:
    """The state at step 0: every learner starts from `params`, which are taken over."""
    names = list(LEARNERS[kind])
    parts = {name: init(params if name == names[-1] else jax.tree.map(jnp.copy, params)) for name in names}
    return parts if len(parts) > 1 else parts[names[0]]


def part(state: State, name: str) -> TrainState:
    """The train state by that name; the only one where there is one."""
    return state if isinstance(state, TrainState) else state[name]


def with_part(state: State, name: str, new: TrainState) -> State:
    return new if isinstance(state, TrainState) else {**state, name: new}


# --- what each learns from ---


def of_roles(
    trajectories: Sequence[Trajectory], advantages: Sequence[np.ndarray], roles: Sequence[Role]
) -> tuple[Sequence[Trajectory], Sequence[np.ndarray]]:
    """The trajectories with the segments in these roles alone, and the advantages f32[segments] of those.

    What is left out enters no batch, no count and no gradient.
    """
    if set(roles) == set(ROLES):
        return trajectories, advantages
    kept = [[segment.role in roles for segment in trajectory.segments] for trajectory in trajectories]
    left = [
        dataclasses.replace(
            trajectory,
            segments=tuple(segment for segment, keep in zip(trajectory.segments, keeps, strict=True) if keep),
        )
        for trajectory, keeps in zip(trajectories, kept, strict=True)
    ]
    return left, [values[np.array(keeps, bool)] for values, keeps in zip(advantages, kept, strict=True)]


def slot_use(before: tuple[int, int], after: tuple[int, int]) -> Stats:
    """The share of slots that drew, between two readings of `Cast.slot_steps`; nothing where no step was decoded."""
    busy, offered = (now - then for then, now in zip(before, after, strict=True))
    return {"slot_use": busy / offered} if offered else {}


def frozen_stats(learners: Mapping[str, tuple[Role, ...]]) -> Stats:
    """What is to be said of the advantages of a role that nobody learns: whatever they would be, they are not used."""
    learned = {role for roles in learners.values() for role in roles}
    return {f"advantage_abs_{role.name.lower()}": 0.0 for role in ROLES if role not in learned}


# --- statistics of several learners as those of one step ---


def joined_stats(by_learner: Mapping[str, Stats]) -> Stats:
    """Statistics of the train steps (`make_train_step`) of all learners, as plain numbers.

    A role's own come from the one that learns it. Of the others there is one for each learner, such as `loss_act`, and
    one of the whole: the sum of the losses, the norm over all parameters, the maximum, or the mean over all tokens.
    """
    if len(by_learner) == 1:
        return next(iter(by_learner.values()))
    endings = tuple(f"_{role.name.lower()}" for role in ROLES)
    joined: Stats = {}
    for name, stats in by_learner.items():
        joined |= {key: value for key, value in stats.items() if key.endswith(f"_{name}")}
        joined |= {f"{key}_{name}": value for key, value in stats.items() if not key.endswith(endings)}
    tokens = np.array([stats["tokens"] for stats in by_learner.values()])
    for key in next(iter(by_learner.values())):
        if not key.endswith(endings):
            joined[key] = _joined(key, np.array([stats[key] for stats in by_learner.values()]), tokens)
    return joined


def _joined(key: str, values: np.ndarray, tokens: np.ndarray) -> float:
    if key in ("tokens", "loss"):
        return float(values.sum())
    if key in ("grad_norm", "update_norm"):
        return float(np.sqrt(np.square(values).sum()))
    if key.endswith("_max") or key == "skipped":
        return float(values.max())
    return float((values * tokens).sum() / max(tokens.sum(), 1.0))


def joined_batch_stats(by_learner: Sequence[Stats]) -> Stats:
    """Statistics of the learners' batches (`make_batch`) together: sums, and the share of their rows that is filled."""
    if len(by_learner) == 1:
        return by_learner[0]
    joined = {key: sum(stats[key] for stats in by_learner) for key in by_learner[0]}
    return joined | {"fill": sum(stats["fill"] * stats["rows"] for stats in by_learner) / max(joined["rows"], 1.0)}


# --- another checkpoint in place of a simulator's address ---


class Simulator(Rehearsed):
    """Another checkpoint in process answers all calls, by the same REHEARSE prompts as an address would be sent.

    The rollout samples them with its `rehearser`; this counts their tokens, as an address does in its answers' `usage`.
    """

    prompted = True  # what it cannot answer is no doing of the policy's

    def __init__(self) -> None:
        self.counts: dict[str, Any] = {"prompt_tokens": 0, "completion_tokens": 0}

    def count(self, trajectories: Sequence[Trajectory]) -> None:
        """Adds the tokens of a rollout's rehearsals, masked trajectories included: they were sampled all the same."""
        for trajectory in trajectories:
            for segment in trajectory.segments:
                if segment.role is Role.REHEARSE:
                    self.counts["prompt_tokens"] += len(segment.prompt_tokens)
                    self.counts["completion_tokens"] += len(segment.tokens)
