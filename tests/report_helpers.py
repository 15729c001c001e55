"""Work folders as runs leave them, written without a run: numbers that look like learning, and every file of one."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from envace_jax.config import from_config_dict, to_json

ENDS = (
    "done",
    "required_item",
    "malformed_call",
    "act_limit",
    "turn_limit",
    "fault",
    "no_call",
    "unknown_tool",
    "context",
)
EVALUATIONS = ("real_success", "real_success_greedy", "unseen_domain", "unseen_domain_greedy", "fidelity",
               "fidelity_without_examples")  # fmt: skip


def training_line(step: int, steps: int, draw: random.Random) -> dict[str, Any]:
    """The metrics of one training step, with the names that a run uses."""
    done = step / steps
    reward = 0.5 + 0.35 * (1 - math.exp(-4 * done)) + draw.gauss(0, 0.04)
    values: dict[str, Any] = {"step": step, "reward": reward, "solved": reward - 0.2, "agreement": 0.8 + 0.15 * done}
    for role, scale in (("act", 1.0), ("rehearse", 0.6)):
        values[f"advantage_abs_{role}"] = scale * (0.2 - 0.1 * done) + draw.gauss(0, 0.01)
        values[f"reward_spread_{role}"] = scale * (0.6 - 0.3 * done) + draw.gauss(0, 0.03)
        values[f"zero_variance_groups_{role}"] = float(draw.randrange(1, 5))
        values[f"tokens_{role}"] = float(int(scale * (3500 + 900 * done + draw.gauss(0, 200))))
    for name, count in zip(ENDS, (50, 8, 3, 2, 1, 1, 1, 1, 1), strict=True):
        if draw.random() < 0.3 or count > 2:
            values[f"ended_{name}"] = float(draw.randrange(count, count + 5))
    values |= {"logprob_diff": 5e-7 * (1 + draw.random()), "logprob_diff_max": 1e-5 * (1 + draw.random())}
    values |= {
        "masked": float(draw.random() < 0.1),
        "judge_fault_timeout": float(step // 40),
        "grad_norm": draw.random(),
    }
    values |= {
        "seconds": 11 + draw.random(),
        "train_seconds": 5 + draw.random(),
        "tokens_per_second": 430 + draw.gauss(0, 20),
    }
    values |= {"slot_use": 0.9 + 0.05 * draw.random(), "compiled": 0.0 if step > 1 else 3.0, "sampled_tokens": 4800.0}
    return values | {f"other_{number}": draw.gauss(0, 1) for number in range(30)}  # as many as a run has besides


def evaluation_line(step: int, steps: int, draw: random.Random) -> dict[str, Any]:
    rates = {f"eval_{name}": min(1.0, 0.4 + 0.1 * i + 0.3 * step / steps) for i, name in enumerate(EVALUATIONS)}
    return {"step": step, **rates, "eval_masked": float(draw.randrange(2))}


def write_lines(path: Path, lines: list[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(folder: Path, steps: int = 20, seed: int = 0, every: int = 5, **changes: Any) -> Path:
    """A finished run's folder, but for its checkpoints and models. `changes` are of its settings, `__` for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    lines = [evaluation_line(0, steps, draw)] if every else []
    for step in range(1, steps + 1):
        lines.append(training_line(step, steps, draw))
        if every and (step % every == 0 or step == steps):
            lines.append(evaluation_line(step, steps, draw))
    write_lines(folder / "metrics.jsonl", lines)
    settings: dict[str, Any] = {"model": {"path": "asset:tiny_base"}, "data": {"source": "tiny", "count": 40}}
    settings |= {"seed": seed, "steps": steps, "optimizer": {"learning_rate": 3e-4}}
    for name, value in changes.items():
        group, _, key = name.partition("__")
        settings.setdefault(group, {})[key] = value
    (folder / "config.json").write_text(json.dumps(to_json(from_config_dict(settings))))
    versions = {"python": "3.11.9", "envace_jax": "0.1.0", "jax": f"0.10.{seed}"}
    start = {"time": "2026-01-01T00:00:00+00:00", "step": 0, "command": "python -m envace_jax.main"}
    start |= {"versions": versions, "backend": "cpu", "devices": {"cpu": 1}, "processes": 1}
    (folder / "environment.json").write_text(json.dumps([start]))
    (folder / "summary.json").write_text(
        json.dumps({"real_success_before": 0.4, "real_success_after": 0.7, "seed": seed})
    )
    return folder
