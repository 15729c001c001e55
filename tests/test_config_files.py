"""The files in configs/: complete, valid, and what they say of themselves."""

from __future__ import annotations

import dataclasses
import re

import pytest
from conftest import REPOSITORY
from test_config import CONFIGS, load

from envace_jax.config import from_config_dict


def test_all_config_files_are_there_and_valid() -> None:
    assert CONFIGS == [
        "qwen3_0p6b", "qwen3_0p6b_colab", "qwen3_14b", "qwen3_1p7b", "qwen3_1p7b_lora", "qwen3_32b", "qwen3_4b",
        "qwen3_8b", "tiny",
    ]  # fmt: skip
    for name in CONFIGS:
        from_config_dict(load(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_config_file_opens_with_command_source_and_cost(name: str) -> None:
    text = (REPOSITORY / "configs" / f"{name}.py").read_text().split('"""')[1]
    assert f"--config=configs/{name}.py" in text
    assert "Source:" in text and "Cost:" in text


def test_the_8b_config_has_the_authors_settings() -> None:
    run = from_config_dict(load("qwen3_8b"))
    assert run.model.path == "Qwen/Qwen3-8B"
    assert (run.steps, run.data.tasks_per_step, run.data.attempts) == (470, 16, 4)
    assert (run.prompts.max_act_prompt, run.prompts.max_rehearse_prompt) == (12_000, 12_000)
    assert (run.limits.act_response, run.limits.rehearse_response, run.limits.act_context) == (8_000, 8_000, 20_000)
    assert dataclasses.astuple(run.limits)[:4] == (30, 30, 20, 200)
    assert (run.optimizer.learning_rate, run.optimizer.weight_decay, run.optimizer.clip_norm) == (1e-6, 0.01, 1.0)
    assert (run.optimizer.schedule, run.optimizer.warmup_steps) == ("constant", 0)
    assert (run.grpo.clip_low, run.grpo.clip_high, run.grpo.dual_clip, run.grpo.kl_coef) == (0.2, 0.2, 3.0, 0.0)
    assert (run.grpo.baseline, run.grpo.scale, run.grpo.singleton) == ("segment_mean", "none", "raw")
    assert (run.sampler.temperature, run.sampler.top_p) == (1.0, 1.0)
    assert (run.evaluation.temperature, run.evaluation.top_p) == (0.6, 0.95)
    smaller = from_config_dict(load("qwen3_4b")).limits
    assert (smaller.act_response, smaller.act_context) == (6_000, 16_000)


ONE_CHIP = ("tiny", "qwen3_0p6b_colab", "qwen3_1p7b_lora")


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ONE_CHIP])
def test_a_mesh_needs_no_other_setting(name: str) -> None:
    """What the README says for several devices, and the configs' own "set it to your number of devices"."""
    shown = re.findall(r"--config\.(mesh\.\w+)=(\d+)", (REPOSITORY / "README.md").read_text())
    assert {key for key, _ in shown} == {"mesh.fsdp", "mesh.tensor"}
    for mesh in (shown, *([("mesh.fsdp", devices)] for devices in (1, 2, 4, 8, 16))):
        values = load(name)
        values.update_from_flattened_dict({key: int(size) for key, size in mesh})
        from_config_dict(values)
