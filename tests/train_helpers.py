"""A training run of a few small steps on the shipped tiny base, for tests."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path

import jax

from envace_jax import config as configuration
from envace_jax.config import RunConfig
from envace_jax.types import Task

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {
    "data.count": 40, "data.tasks_per_step": 2, "data.attempts": 4, "sampler.slots": 8, "sampler.prefill_rows": (8,),
    "sampler.prefill_lengths": (64, 256), "sampler.cache_lengths": (512,), "batch.rows_multiple": 4,
    "batch.micro_batch_rows": 4, "batch.row_buckets": (24,), "evaluation.heldout_tasks": 4, "evaluation.samples": 1,
    "evaluation.unseen_tasks": 2, "evaluation.fidelity_calls": 4, "checkpoint.every": 1, "logging.tensorboard": False,
    "steps": 3, "optimizer.schedule": "constant",
}  # fmt: skip


def tiny_config(**changes) -> RunConfig:
    """configs/tiny.py, smaller still."""
    values = runpy.run_path(str(ROOT / "configs" / "tiny.py"))["get_config"]()
    values.update_from_flattened_dict({**SETTINGS, **changes})
    return configuration.from_config_dict(values)


def bits(tree) -> list[bytes]:
    """The leaves of a pytree of arrays, bit by bit."""
    return [leaf.tobytes() for leaf in jax.tree.leaves(jax.device_get(tree))]


def model_bytes(workdir: Path) -> bytes:
    return (workdir / "model" / "model.safetensors").read_bytes()


def judged(task: Task) -> Task:
    """The task without its program checks: only a judge could score it."""
    items = [tuple(dataclasses.replace(item, check=None) for item in turn) for turn in task.checklist]
    return dataclasses.replace(task, checklist=tuple(items))
