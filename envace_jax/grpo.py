"""Role-wise GRPO: advantages per segment (numpy, before any batching) and losses per token (jnp).

A group is (group_id, role): all segments that the attempts at one task wrote in one role. Every segment carries
its trajectory's reward. Losses take arrays and the whole batch's denominators; this module knows neither the
model, nor how rows are laid out, nor the optimizer. A new baseline, scale or loss is a function and a dict line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envace_jax.types import Role, Trajectory

ROLES = tuple(Role)
SINGLETONS = ("raw", "zero")
DENOMINATORS = ("tokens", "role")
REWARD_TOLERANCE = 1e-6  # rewards of a group that lie closer together are alike
# exp() of a larger difference of log-probabilities says nothing more and may overflow (verl clamps at the same value).
MAX_LOG_RATIO = 20.0


# --- baselines: (rewards f64[n], trajectory i64[n]) of one group's segments -> f64[n]; nan where there is none ---


def segment_mean(rewards: np.ndarray, trajectory: np.ndarray) -> np.ndarray:
    """Mean over the group's segments, so a trajectory with more of them weighs more (the authors' choice)."""
    return np.full_like(rewards, rewards.mean())


def trajectory_mean(rewards: np.ndarray, trajectory: np.ndarray) -> np.ndarray:
    """Mean over the group's trajectories that have a segment in this role, each counted once."""
    first_segments = np.unique(trajectory, return_index=True)[1]
    return np.full_like(rewards, rewards[first_segments].mean())


def leave_one_out(rewards: np.ndarray, trajectory: np.ndarray) -> np.ndarray:
    """Mean over the *other* trajectories that have a segment in this role, each counted once; nan without others."""
    _, first_segments, member = np.unique(trajectory, return_index=True, return_inverse=True)
    own = rewards[first_segments]
    others = len(own) - 1
    if others == 0:
        return np.full_like(rewards, np.nan)
    return ((own.sum() - own) / others)[member]


# --- scales: rewards f64[n] of one group's segments (n >= 2, not all equal) -> the positive number to divide by ---


def no_scale(rewards: np.ndarray) -> float:
    """Advantages stay in units of reward (the authors' choice)."""
    return 1.0


def standard_deviation(rewards: np.ndarray) -> float:
    """Sample standard deviation (n - 1) over the group's segments, as in GRPO."""
    return float(rewards.std(ddof=1))


BASELINES: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "segment_mean": segment_mean,
    "trajectory_mean": trajectory_mean,
    "leave_one_out": leave_one_out,
}
SCALES: Mapping[str, Callable[[np.ndarray], float]] = {"none": no_scale, "std": standard_deviation}


def role_advantages(
    trajectories: Sequence[Trajectory],
    *,
    baseline: str = "segment_mean",
    scale: str = "none",
    singleton: str = "raw",
    tolerance: float = REWARD_TOLERANCE,
) -> tuple[list[np.ndarray], dict[str, float]]:
    """Advantage of every segment against its own (group_id, role) group.

    * A failed trajectory (an outside fault) has advantage 0 everywhere and enters no baseline.
    * So has one whose reward is not finite; those are counted in the statistics.
    * A group whose rewards differ by less than `tolerance` has advantage exactly 0, whatever the scale.
    * A group of one segment, and under `leave_one_out` a group of one trajectory, has nothing to be compared with:
      `singleton="raw"` keeps the reward itself, unscaled (the authors' code), `"zero"` gives 0.

    Returns:
      One f32[number of segments] array per trajectory, in order, and a dict of plain floats: per role (`_act`,
      `_rehearse`) `segments`, `advantage_abs` (mean over segments), `reward_spread` (mean over groups of max - min),
      `groups`, `zero_variance_groups` and `singleton_groups`; `masked_trajectories`, `nonfinite_rewards`.

    Raises:
      ValueError: an unknown name.
    """
    for what, name, known in (
        ("baseline", baseline, BASELINES),
        ("scale", scale, SCALES),
        ("singleton", singleton, SINGLETONS),
    ):
        check_name(what, name, known)
    advantages = [np.zeros(len(trajectory.segments), np.float32) for trajectory in trajectories]
    groups: dict[tuple[int, Role], list[tuple[int, int]]] = defaultdict(list)
    masked = nonfinite = 0
    for i, trajectory in enumerate(trajectories):
        if trajectory.status != "ok":
            masked += 1
        elif not np.isfinite(trajectory.reward):
            nonfinite += 1
        else:
            for j, segment in enumerate(trajectory.segments):
                groups[trajectory.group_id, Role(segment.role)].append((i, j))

    stats = {"masked_trajectories": float(masked), "nonfinite_rewards": float(nonfinite)}
    for role in ROLES:
        spreads: list[float] = []
        absolute: list[float] = []
        singletons = flat = 0
        for (_, group_role), members in groups.items():
            if group_role is not role:
                continue
            owner = np.array([i for i, _ in members])
            rewards = np.array([trajectories[i].reward for i in owner], np.float64)
            values = compare(rewards, owner, baseline, scale, singleton, tolerance).advantages
            for (i, j), value in zip(members, values, strict=True):
                advantages[i][j] = value
            spreads.append(float(np.ptp(rewards)))
            absolute.extend(np.abs(values).tolist())
            singletons += len(members) == 1
            flat += len(members) > 1 and spreads[-1] < tolerance
        name = role.name.lower()
        stats[f"segments_{name}"] = float(len(absolute))
        stats[f"advantage_abs_{name}"] = float(np.mean(absolute)) if absolute else 0.0
        stats[f"reward_spread_{name}"] = float(np.mean(spreads)) if spreads else 0.0
        stats[f"groups_{name}"] = float(len(spreads))
        stats[f"zero_variance_groups_{name}"] = float(flat)
        stats[f"singleton_groups_{name}"] = float(singletons)
    return advantages, stats


class Compared(NamedTuple):
    """How the advantages of one group came about."""

    advantages: np.ndarray  # f64[n]
    baseline: np.ndarray  # f64[n]; nan where there is none
    scale: float  # what the differences are divided by, where they are compared
    rule: Literal["compared", "alike", "singleton"]


def compare(
    rewards: np.ndarray, owner: np.ndarray, baseline: str, scale: str, singleton: str, tolerance: float
) -> Compared:
    """Advantages of the n segments of one group; rewards are finite, owner[n] numbers each segment's trajectory."""
    base = BASELINES[baseline](rewards, owner)
    if len(rewards) == 1 or np.isnan(base).any():
        return Compared(rewards if singleton == "raw" else np.zeros_like(rewards), base, 1.0, "singleton")
    if np.ptp(rewards) < tolerance:
        return Compared(np.zeros_like(rewards), base, 1.0, "alike")
    divisor = SCALES[scale](rewards)
    return Compared((rewards - base) / divisor, base, divisor, "compared")


def check_name(what: str, name: str, known: Mapping[str, object] | Sequence[str]) -> None:
    """One clear error for a name that is not among `known`."""
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; choose one of {', '.join(map(repr, known))}")


# --- losses ---


class Denominators(NamedTuple):
    """What sums over tokens are divided by: counts of the *whole* batch, taken before it is cut into micro-batches."""

    loss: jax.Array  # f32[number of roles], for the loss of a token in that role
    tokens: jax.Array  # f32[], trained tokens that are in the rows (at least 1), for the statistics


def count_role_tokens(loss_mask: jax.Array, role: jax.Array) -> jax.Array:
    """f32[number of roles]: trained tokens of each role; loss_mask bool[B, T], role i32[B, T]."""
    return jnp.stack([jnp.sum(loss_mask & (role == r)) for r in ROLES]).astype(jnp.float32)


def count_denominators(
    loss_mask: jax.Array, role: jax.Array, denominator: str = "tokens", role_tokens: jax.Array | None = None
) -> Denominators:
    """Denominators of a whole batch: loss_mask bool[B, T], role i32[B, T].

    `"tokens"` makes the loss the mean over all trained tokens (the authors' choice). `"role"` makes it the
    mean, over the roles that occur, of each role's own token mean, so a talkative role does not drown the other.

    role_tokens f32[number of roles] are the trained tokens that the loss is divided by where the rows do not hold them
    all (`batching.make_batch` left those without advantage out); None counts what the rows hold.
    """
    check_name("denominator", denominator, DENOMINATORS)
    held = count_role_tokens(loss_mask, role)
    per_role = held if role_tokens is None else role_tokens
    if denominator == "tokens":
        loss = jnp.full_like(per_role, jnp.maximum(jnp.sum(per_role), 1.0))
    else:
        loss = jnp.maximum(per_role * jnp.sum(per_role > 0), 1.0)
    return Denominators(loss, jnp.maximum(jnp.sum(held), 1.0))


def low_variance_kl(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """KL(policy || reference) per token by the k3 estimator exp(d) - d - 1, d = ref - logprobs (never negative)."""
    difference = jnp.clip(ref_logprobs - logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.exp(difference) - difference - 1.0


class Clips(NamedTuple):
    low: float = 0.2
    high: float = 0.2  # above `low`: clip-higher (DAPO, arXiv:2503.14476)
    dual: float = 3.0  # 0: none


# (logprobs, old_logprobs, advantages f32[B, T], mask bool[B, T], clips) -> (loss of each token, ratio, whether a clip
# changed it). Masked places hold 0, and what comes out there is not looked at. `policy_loss` does the rest.
Surrogate = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, Clips], tuple[jax.Array, jax.Array, jax.Array]]


def clipped_ratio(
    logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, mask: jax.Array, clips: Clips
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """PPO (arXiv:1707.06347; dual clip, arXiv:1912.09729): with r = exp(logprobs - old_logprobs) and advantage A,
    max(-A r, -A clip(r, 1 - low, 1 + high)), at most -A dual where A < 0. What is clipped has no gradient."""
    return _clipped(_ratio(logprobs, old_logprobs), advantages, clips)


def clipped_segment_ratio(
    logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, mask: jax.Array, clips: Clips
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """GSPO (arXiv:2507.18071): PPO's loss with one ratio for a whole segment, the geometric mean of its tokens'.

    A segment is a run of True in a row of the mask: `batching.make_batch` lets no two touch and cuts none. So a clip
    keeps or drops segments, not tokens, and the ratio lies far nearer to 1: the paper clips at low 3e-4 and high 4e-4
    (its section 5.1). Every token carries its segment's loss, so at ratio 1 the gradient is PPO's; the paper then
    takes the mean over segments, here the denominators say how, as for every loss.
    """
    log_ratio = jnp.clip(logprobs - old_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    mean = run_means(jax.lax.stop_gradient(log_ratio), mask)
    # The segment's ratio s at every token, but each with the gradient s through its own log-probability alone: over n
    # tokens that is n times the gradient of s, as it should be for n tokens that each carry the loss of s.
    return _clipped(jnp.exp(mean + (logprobs - jax.lax.stop_gradient(logprobs))), advantages, clips)


def clipped_weight(
    logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, mask: jax.Array, clips: Clips
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """CISPO (arXiv:2506.13585): -A sg(clip(r, 1 - low, 1 + high)) logprobs, sg being no gradient.

    The importance weight is clipped and every token keeps its gradient. The paper has no lower bound (low 1) and tunes
    the upper one; a bounded weight needs no dual clip.
    """
    ratio = jax.lax.stop_gradient(_ratio(logprobs, old_logprobs))
    weight = jnp.clip(ratio, 1.0 - clips.low, 1.0 + clips.high)
    return -advantages * weight * logprobs, ratio, weight != ratio


LOSSES: Mapping[str, Surrogate] = {
    "ppo": clipped_ratio,
    "gspo": clipped_segment_ratio,
    "cispo": clipped_weight,
}

# Losses that are sums over tokens, each from its own values alone: the train step forms them where it forms the logits.
# Any other (one ratio for a segment, say) is given log-probabilities of whole rows.
TOKENWISE = frozenset({"ppo", "cispo"})


def policy_loss(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    role: jax.Array,
    ref_logprobs: jax.Array | None = None,
    weights: jax.Array | None = None,
    *,
    denominators: Denominators,
    loss: str = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
    kl_coef: float = 0.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Policy-gradient loss: the sum over trained tokens of l / denominators.loss[role].

    l is `LOSSES[loss]` of the token, times its weight where there are weights (`truncated_weights`), plus kl_coef times
    `low_variance_kl`.

    All arrays are [B, T]; mask is bool and role i32. What masked places hold, nan and inf included, reaches neither
    the loss nor a gradient. Summing the loss and the statistics over micro-batches (taking the maximum of those named
    `*_max`) gives the whole batch's: `ratio` (mean), `ratio_deviation_max` (max |r - 1|), `clip_fraction` (tokens
    whose gradient, or in CISPO weight, a clip changed) and, with ref_logprobs, `kl` (mean).
    """
    # Replaced *before* any arithmetic: where() after exp() would still send 0 * nan backwards.
    logprobs, advantages = _masked(mask, logprobs), _masked(mask, advantages)
    clips = Clips(clip_low, clip_high, dual_clip)
    per_token, ratio, was_clipped = LOSSES[loss](logprobs, _masked(mask, old_logprobs), advantages, mask, clips)
    stats = {
        "ratio": jnp.sum(_masked(mask, ratio)) / denominators.tokens,
        "ratio_deviation_max": jnp.max(_masked(mask, jnp.abs(ratio - 1.0)), initial=0.0),
        "clip_fraction": jnp.sum(mask & was_clipped) / denominators.tokens,
    }
    if weights is not None:
        per_token *= weights
    if ref_logprobs is not None:
        kl = low_variance_kl(logprobs, _masked(mask, ref_logprobs))
        stats["kl"] = jnp.sum(_masked(mask, kl)) / denominators.tokens
        per_token += kl_coef * kl
    weight = 1.0 / denominators.loss[jnp.where(mask, role, 0)]
    total = jnp.sum(jnp.where(mask, per_token * weight, 0.0))
    return total, {name: jax.lax.stop_gradient(value) for name, value in stats.items()}


def truncated_weights(
    trainer_logprobs: jax.Array, sampler_logprobs: jax.Array, mask: jax.Array, *, cap: float, tokens: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Truncated importance weights min(exp(trainer - sampler), cap), without a gradient; 0 where not `mask`.

    They correct for a sampler that is not quite the trainer's function (other kernels, other precision) where the loss
    itself divides by the trainer's own log-probabilities. Arrays are [B, T]; tokens f32[] is what means divide by.

    Returns:
      The weights f32[B, T], and statistics of exp(trainer - sampler): `mismatch` (mean), `mismatch_max`, and
      `mismatch_truncated` (share of tokens above the cap).
    """
    trainer = _masked(mask, jax.lax.stop_gradient(trainer_logprobs))
    ratio = _masked(mask, _ratio(trainer, _masked(mask, sampler_logprobs)))
    stats = {
        "mismatch": jnp.sum(ratio) / tokens,
        "mismatch_max": jnp.max(ratio, initial=0.0),
        "mismatch_truncated": jnp.sum(ratio > cap) / tokens,
    }
    return jnp.minimum(ratio, cap), stats


def run_means(values: jax.Array, mask: jax.Array) -> jax.Array:
    """f32[B, T]: at each place of a run of True in a row of mask bool[B, T] the mean of the run's values; else 0.

    Scans along T: rows stay on their devices, and nothing is added up in an order that varies from call to call.
    """

    def since(first: jax.Array, numbers: jax.Array, reverse: bool = False) -> jax.Array:
        """Running sums that begin anew at every `first`."""

        def join(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return jnp.where(right[1], right[0], left[0] + right[0]), left[1] | right[1]

        return jax.lax.associative_scan(join, (numbers, first), reverse=reverse, axis=1)[0]

    around = jnp.pad(mask, ((0, 0), (1, 1)))
    first, last = mask & ~around[:, :-2], mask & ~around[:, 2:]
    total, count = since(first, _masked(mask, values)), since(first, _masked(mask, mask))
    mean = jnp.where(last, total / jnp.maximum(count, 1.0), 0.0)
    return jnp.where(mask, since(last, mean, reverse=True), 0.0)


def _masked(mask: jax.Array, values: jax.Array) -> jax.Array:
    """The values in float32 where `mask`, else 0."""
    return jnp.where(mask, values.astype(jnp.float32), 0.0)


def _ratio(logprobs: jax.Array, old_logprobs: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(logprobs - old_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _clipped(ratio: jax.Array, advantages: jax.Array, clips: Clips) -> tuple[jax.Array, jax.Array, jax.Array]:
    """PPO's clipped surrogate of a ratio: (loss, ratio, whether a clip removed the gradient)."""
    unclipped = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - clips.low, 1.0 + clips.high)
    per_token = jnp.maximum(unclipped, clipped)
    was_clipped = clipped > unclipped
    if clips.dual:
        limit = -advantages * clips.dual
        beyond = (advantages < 0.0) & (per_token > limit)
        per_token = jnp.where(beyond, limit, per_token)
        was_clipped |= beyond
    return per_token, ratio, was_clipped
