"""The reward that a run's settings ask for."""

from __future__ import annotations

import collections
import contextlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from envace_jax import fingerprint
from envace_jax.config import RewardConfig, UserError, model_path
from envace_jax.endpoint import open_endpoint, sampling_options
from envace_jax.local_model import LocalModel
from envace_jax.models import hf
from envace_jax.rewards import Reward, RewardUnavailable
from envace_jax.rewards.checklist import ChecklistReward
from envace_jax.rewards.judge import JudgedReward
from envace_jax.types import Trajectory

POLICY = "policy"  # the checkpoint that is no folder: the trained policy as it is
VERDICTS_FILE = "verdicts.jsonl"  # in the work folder


@contextlib.contextmanager
def chosen(settings: RewardConfig, workdir: Path, seed: int = 0) -> Iterator[Reward]:
    """Program checks alone, or those and a judge whose verdicts are kept in the work folder; closed in the end.

    A judge in this process is yet to be bound to its model (`LocalModel.bind`).
    """
    if settings.kind == "checklist":
        yield ChecklistReward()
        return
    options = sampling_options(settings)
    name, cache = _kept_verdicts(settings, workdir)
    with contextlib.ExitStack() as opened:
        if settings.checkpoint:
            local = LocalModel(seed=seed, retries=settings.retries)
            reward = JudgedReward(local.ask, name=name, cache=cache, options=options, counts=local.counts, model=local)
        else:
            endpoint = open_endpoint(settings)
            opened.callback(endpoint.close)
            reward = JudgedReward(endpoint.ask, name=name, cache=cache, options=options, counts=endpoint.counts)
        opened.callback(reward.close)
        yield reward


def kept(settings: RewardConfig, workdir: Path) -> Reward:
    """Gives the scores of `chosen`'s reward as far as program checks and kept verdicts go. It asks nobody and writes
    nothing: a turn with an item whose verdict is not kept is unavailable."""
    if settings.kind == "checklist":
        return ChecklistReward()
    try:
        name, cache = _kept_verdicts(settings, workdir)
    except FileNotFoundError:  # a judge's folder that is gone; its name there was made of its files
        name, cache = "", None

    def nobody(*_: Any, **__: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_exception(RewardUnavailable("no verdict is kept"))
        return answer

    return JudgedReward(nobody, name=name, cache=cache, options=sampling_options(settings))


def _kept_verdicts(settings: RewardConfig, workdir: Path) -> tuple[str, Path | None]:
    """The judge's name in the file of verdicts, and the file. Raises as `judge_folder`."""
    cache = workdir / VERDICTS_FILE if settings.keep_verdicts else None
    if not settings.checkpoint:
        return settings.model, cache
    folder = judge_folder(settings)
    if folder is None:
        return POLICY, None  # what it would say changes with every step
    return json.dumps(fingerprint.of_model(folder)), cache


def judge_folder(settings: RewardConfig) -> Path | None:
    """The folder of a judge's own checkpoint in this process, or None where the judge is none. Raises
    FileNotFoundError or ConfigError where the settings name one that is not there."""
    if settings.checkpoint in ("", POLICY):
        return None
    return hf.resolve(model_path(settings.checkpoint, "reward.checkpoint"))


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
