"""The reward that a run's settings ask for."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from envace_jax.config import RewardConfig, UserError
from envace_jax.endpoint import Endpoint, EndpointSettings
from envace_jax.rewards import Reward
from envace_jax.rewards.checklist import ChecklistReward
from envace_jax.rewards.judge import JudgedReward
from envace_jax.types import Trajectory

VERDICTS_FILE = "verdicts.jsonl"  # in the work folder


@contextlib.contextmanager
def chosen(settings: RewardConfig, workdir: Path) -> Iterator[Reward]:
    """Program checks alone, or those and a judge whose verdicts are kept in the work folder; closed in the end."""
    if settings.kind == "checklist":
        yield ChecklistReward()
        return
    endpoint = Endpoint(
        EndpointSettings(
            settings.urls,
            settings.model,
            key_variable=settings.key_variable,
            concurrency=settings.concurrency,
            timeout_s=settings.timeout_s,
            retries=settings.retries,
        )
    )
    options = {"temperature": settings.temperature, "top_p": settings.top_p, "max_tokens": settings.max_tokens}
    cache = workdir / VERDICTS_FILE if settings.keep_verdicts else None
    reward = JudgedReward(endpoint.ask, name=settings.model, cache=cache, options=options, counts=endpoint.counts)
    try:
        yield reward
    finally:
        endpoint.close()
        reward.close()


def check_masked(trajectories: Sequence[Trajectory], most_masked: float) -> None:
    """Raises UserError where more than a share of a step's trajectories are masked: something outside is broken, and to
    go on would train on what happens to be left."""
    failed = [trajectory for trajectory in trajectories if trajectory.status == "failed"]
    if len(failed) <= most_masked * len(trajectories):
        return
    reasons = collections.Counter(trajectory.reason for trajectory in failed)
    reason, count = reasons.most_common(1)[0]
    raise UserError(
        f"{len(failed)} of {len(trajectories)} trajectories of a step are masked, more than reward.most_masked="
        f"{most_masked:g} allows; the most frequent reason ({count} x): {reason}"
    )
