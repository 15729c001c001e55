"""Configuration: conversion, its errors, what a resumed run may change, and the command's answers to bad input."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from conftest import REPOSITORY

from envace_jax import batching, config, grpo, inputs, lora, main, moments, players, train, train_step
from envace_jax.config import ConfigError, RunConfig, default_config_dict, differing_keys, from_config_dict, to_json
from envace_jax.data import write_tasks
from envace_jax.envs import tiny
from envace_jax.models import kernels, qwen
from envace_jax.rewards.checklist import ChecklistReward

CONFIGS = sorted(path.stem for path in (REPOSITORY / "configs").glob("*.py"))


def load(name: str) -> typing.Any:
    """The ConfigDict of a file in configs/, made runnable where the file leaves a path to the user."""
    values = importlib.import_module(f"configs.{name}").get_config()
    if not values.data.source:
        values.data.source = "tasks.jsonl"
    return values


def problems_of(**changes: typing.Any) -> str:
    """The error text for the tiny config with dotted settings changed, dots written as two underscores."""
    values = load("tiny")
    for key, value in changes.items():
        values.update_from_flattened_dict({key.replace("__", "."): value})
    with pytest.raises(ConfigError) as caught:
        from_config_dict(values)
    return str(caught.value)


def test_library_defaults_are_the_authors_choice() -> None:
    run = RunConfig()
    assert (run.grpo.baseline, run.grpo.scale, run.grpo.singleton) == ("segment_mean", "none", "raw")
    assert run.optimizer == from_config_dict(load("qwen3_8b")).optimizer


def test_a_config_without_data_says_what_to_give() -> None:
    values = importlib.import_module("configs.qwen3_8b").get_config()
    with pytest.raises(ConfigError, match=r"data\.source: empty; .*--config\.data\.source=PATH"):
        from_config_dict(values)


def test_defaults_round_trip_through_config_dict_and_json() -> None:
    values = load("tiny")
    run = from_config_dict(values)
    assert from_config_dict(to_json(run)) == run
    assert from_config_dict(json.loads(json.dumps(to_json(run)))) == run
    assert hash(run) == hash(from_config_dict(load("tiny")))


def test_int_for_float_and_list_for_tuple_are_taken() -> None:
    values = to_json(from_config_dict(load("tiny")))
    values["optimizer"]["learning_rate"] = 1
    values["sampler"]["prefill_rows"] = [2, 4]
    run = from_config_dict(values)
    assert run.optimizer.learning_rate == 1.0 and isinstance(run.optimizer.learning_rate, float)
    assert run.sampler.prefill_rows == (2, 4)


@pytest.mark.parametrize(
    ("group", "key", "value", "expected"),
    [
        ("steps", None, True, "steps: expected int, got True"),
        ("steps", None, 1.0, "steps: expected int, got 1.0"),
        ("model", "path", 3, "model.path: expected str, got 3"),
        ("prompts", "thinking", 1, "prompts.thinking: expected bool, got 1"),
        ("optimizer", "b1", True, "optimizer.b1: expected a finite number, got True"),
        ("optimizer", "eps", float("nan"), "optimizer.eps: expected a finite number, got nan"),
        ("sampler", "prefill_rows", [1, "a"], "sampler.prefill_rows: expected a list of int, got [1, 'a']"),
        ("sampler", "prefill_rows", 4, "sampler.prefill_rows: expected a list of int, got 4"),
        ("grpo", None, 3, "grpo: expected a group of settings, got 3"),
        ("grpo", "scale", "sdt", "grpo.scale: expected one of none, std, got 'sdt'"),
        ("model", "unroll", "yes", "model.unroll: expected bool | None, got 'yes'"),
    ],
)
def test_wrong_types_are_errors(group: str, key: str | None, value: object, expected: str) -> None:
    values = to_json(from_config_dict(load("tiny")))
    if key is None:
        values[group] = value
    else:
        values[group][key] = value
    with pytest.raises(ConfigError) as caught:
        from_config_dict(values)
    assert str(caught.value) == expected


def test_unknown_keys_are_all_named_with_the_closest_known() -> None:
    with pytest.raises(ConfigError) as caught:
        from_config_dict({"grpo": {"basline": "x"}, "seeds": 1, "optimizer": {"lr": 1.0}, "learning_rate": 1.0})
    lines = str(caught.value).splitlines()
    assert lines[0] == "grpo.basline: unknown setting; the closest known: grpo.baseline"
    assert lines[1] == "seeds: unknown setting; the closest known: seed, steps"
    assert lines[2].startswith("optimizer.lr: unknown setting; known there: optimizer.learning_rate, ")
    assert lines[3] == "learning_rate: unknown setting; the closest known: optimizer.learning_rate"


def test_config_files_cannot_assign_unknown_keys() -> None:
    values = default_config_dict()
    with pytest.raises(AttributeError, match="lr"):
        values.optimizer.lr = 1.0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sampler__slots": 0}, "sampler.slots: 0 is too small; it must be at least 1"),
        ({"lora__rank": -1}, "lora.rank: -1 is too small; it must be at least 0"),
        ({"lora__rank": 8, "lora__alpha": 0.0}, "lora.alpha: 0.0 must be greater than 0"),
        (
            {"lora__rank": 8, "lora__targets": ("q_proj", "lm_head")},
            "lora.targets: ['q_proj', 'lm_head']; give some of",
        ),
        ({"lora__rank": 8, "lora__targets": ()}, "lora.targets: []; give some of q_proj, k_proj, v_proj, o_proj"),
        ({"lora__rank": 8, "lora__targets": ("up_proj", "up_proj")}, "lora.targets: ['up_proj', 'up_proj']; give some"),
        ({"lora__path": "there"}, "lora.path: there is not used with lora.rank=0; set that to the adapters' rank"),
        (
            {"model__quantize": "int8"},
            "model.quantize: int8 is for parameters that are not trained, and all are; set lora.rank, or a frozen",
        ),
        (
            {"model__quantize": "int8", "rollout__players": "separate"},
            "model.quantize: int8 is for parameters that are not trained, and all are",
        ),
        ({"batch__row_length": 511}, "batch.row_length: 511 is below the longest possible sequence, 512 tokens"),
        ({"limits__act_context": 513}, "sampler.max_length: 512 is below limits.act_context=513"),
        ({"limits__rehearse_response": 97}, "prompts.max_rehearse_prompt + limits.rehearse_response = 416 + 97"),
        ({"prompts__max_act_prompt": 500}, "prompts.max_act_prompt + limits.act_response = 500 + 96"),
        ({"data__longest_prompt": -1}, "data.longest_prompt: -1 is too small; it must be at least 0"),
        (
            {"data__longest_prompt": 321},
            "data.longest_prompt: 321 has no effect above prompts.max_act_prompt=320",
        ),
        (
            {"rollout__responder": "external", "external__model": "m"},
            "external.urls: []; a simulator needs addresses such as http://host:8000/v1",
        ),
        (
            {"rollout__responder": "external", "external__urls": ("http://h/v1",)},
            "external.model: empty; name the model that the simulator's address serves",
        ),
        ({"reward__kind": "judge", "reward__model": "m"}, "reward.urls: []; a judge needs addresses such as http"),
        (
            {"reward__checkpoint": "policy"},
            "reward.checkpoint: policy is for reward.kind=judge without reward.urls; they are checklist and []",
        ),
        ({"reward__urls": ("http://h/v1",)}, "reward.urls: nobody is asked with reward.kind=checklist"),
        ({"external__urls": ("http://h/v1",)}, "external.urls: nobody asks them with rollout.responder=rehearsed"),
        (
            {"reward__kind": "judge", "reward__checkpoint": "policy", "rollout__players": "frozen_act"},
            "reward.checkpoint: policy is whoever plays ACT, which rollout.players=frozen_act never trains",
        ),
        (
            {
                "fidelity__calls_per_step": 2,
                "rollout__responder": "external",
                "external__urls": ("http://h/v1",),
                "external__model": "m",
            },
            "fidelity.calls_per_step: 2 rewards rehearsals, which nobody learns",
        ),
        ({"external__timeout_s": 0.0}, "external.timeout_s: 0.0 must be greater than 0"),
        ({"external__top_p": 0.0}, "external.top_p: 0.0 must be greater than 0 and at most 1"),
        ({"grpo__kl_coef": -0.1}, "grpo.kl_coef: -0.1 is too small; it must be at least 0"),
        (
            {"batch__drop_zero_advantage": True, "grpo__kl_coef": 0.1},
            "batch.drop_zero_advantage: with grpo.kl_coef=0.1 sequences without advantage have a loss too",
        ),
        ({"grpo__dual_clip": 0.5}, "grpo.dual_clip: 0.5 must be above 1, or 0 to turn it off"),
        ({"grpo__clip_low": 1.0}, "grpo.clip_low: 1.0 must be below 1"),
        ({"grpo__loss": "cispo", "grpo__clip_low": 1.5}, "grpo.clip_low: 1.5 must be below 1"),
        ({"grpo__loss": "gspo"}, "grpo.loss: gspo is ppo where every ratio is 1, and with grpo.old_logprobs=trainer"),
        ({"grpo__tis_cap": 0.5}, "grpo.tis_cap: 0.5 must be at least 1, or 0 to turn it off"),
        ({"grpo__tis_cap": 2.0, "grpo__old_logprobs": "sampler"}, "grpo.tis_cap: 2.0 corrects from sampler to trainer"),
        ({"fidelity__calls_per_step": 2, "fidelity__attempts": 1}, "fidelity.attempts: a group of 1 rehearsal"),
        (
            {"fidelity__calls_per_step": 2, "rollout__players": "frozen_rehearse"},
            "fidelity.calls_per_step: 2 rewards rehearsals, which nobody learns",
        ),
        ({"fidelity__threshold": 0.0}, "fidelity.threshold: 0.0 must be greater than 0 and at most 1"),
        ({"fidelity__weight": 0.0}, "fidelity.weight: 0.0 must be greater than 0"),
        ({"data__attempts": 1, "data__filter_zero_variance": True}, "data.filter_zero_variance: a group of 1 attempt"),
        ({"data__extra_rollouts": -1}, "data.extra_rollouts: -1 is too small; it must be at least 0"),
        ({"data__attempts": 1, "grpo__singleton": "zero"}, "data.attempts: a group of 1 gives no signal"),
        ({"sampler__top_p": 0.0}, "sampler.top_p: 0.0 must be greater than 0 and at most 1"),
        ({"evaluation__top_p": 1.1}, "evaluation.top_p: 1.1 must be greater than 0 and at most 1"),
        ({"sampler__temperature": 0.0}, "sampler.temperature: 0 makes all attempts at a task equal"),
        ({"batch__micro_batch_rows": 5}, "batch.micro_batch_rows: 5 does not divide rows_multiple=16"),
        ({"batch__row_buckets": (32, 16)}, "batch.row_buckets: [32, 16] must be a list of increasing numbers of rows"),
        ({"batch__row_buckets": (0, 32)}, "batch.row_buckets: 0 is not a positive multiple of rows_multiple=16"),
        ({"batch__row_buckets": (16, 40)}, "batch.row_buckets: 40 is not a positive multiple of rows_multiple=16"),
        ({"sampler__cache_rows": 63}, "sampler.cache_rows: 63 is below sampler.slots=64 (or 0)"),
        (
            {"sampler__pages": 8},
            "sampler.pages: 8 is below 9: each of 1 shards must hold sampler.max_length=512 in pages",
        ),
        ({"sampler__pages": 33, "mesh__fsdp": 2}, "sampler.pages: 33 is not a multiple of mesh.data x mesh.fsdp = 2"),
        ({"sampler__page_size": 0}, "sampler.page_size: 0 is too small; it must be at least 1"),
        ({"sampler__refill_share": 0.0}, "sampler.refill_share: 0.0 must be greater than 0 and at most 1"),
        ({"mesh__fsdp": 3}, "sampler.slots: 64 is not a multiple of mesh.data x mesh.fsdp = 3"),
        ({"sampler__cache_lengths": (256,)}, "sampler.cache_lengths: the last one, 256, is below sampler.max_length"),
        ({"sampler__prefill_rows": (4, 2)}, "sampler.prefill_rows: [4, 2] must be a list of increasing sizes"),
        ({"optimizer__b2": 1.0}, "optimizer.b2: 1.0 must be at least 0 and less than 1"),
        ({"optimizer__clip_norm": 0.0}, "optimizer.clip_norm: 0.0 must be greater than 0"),
        (
            {"optimizer__schedule": "cosine", "optimizer__warmup_steps": 80, "steps": 80},
            "optimizer.warmup_steps: 80 leaves none of the 80 steps to the cosine schedule",
        ),
        ({"data__source": "tasks.jsonl"}, "evaluation.unseen_tasks: only data.source=tiny has what it needs"),
        (
            {"data__source": "tasks.jsonl", "evaluation__heldout_tasks": 0},
            "evaluation.fidelity_calls: needs held-out tasks; set evaluation.heldout_tasks too, or it to 0",
        ),
        (
            {"evaluation__source": "tasks.jsonl", "evaluation__heldout_tasks": 0},
            "evaluation.source: tasks.jsonl is not played with evaluation.heldout_tasks=0; say how many tasks",
        ),
        ({"data__count": 0}, "data.count: the tiny world generates its tasks"),
        ({"data__split": "heldout"}, "data.split: training on the held-out tasks leaves nothing to evaluate on"),
        ({"model__path": ""}, "model.path: empty; give a checkpoint folder, a hub id"),
        (
            {"rollout__players": "frozen_rehearse", "rollout__responder": "real"},
            "rollout.players: frozen_rehearse says who rehearses, which rollout.responder=real leaves to others",
        ),
        (
            {"rollout__players": "separate", "rollout__responder": "external", "external__checkpoint": "a"},
            "rollout.players: separate says who rehearses, which rollout.responder=external leaves to others",
        ),
        (
            {"rollout__players": "separate", "rollout__frozen_checkpoint": "a"},
            "rollout.frozen_checkpoint: nobody plays it with rollout.players=separate",
        ),
        ({"external__cache": True}, "external.cache: nothing is asked with rollout.responder=rehearsed"),
        ({"external__checkpoint": "a"}, "external.checkpoint: nobody asks it with rollout.responder=rehearsed"),
        ({"rollout__responder": "external"}, "external.urls: []; a simulator needs addresses such as http://host:8000"),
        (
            {"rollout__responder": "external", "external__checkpoint": "a", "external__cache": True},
            "external.checkpoint: a answers in this process, by the policy's sampling settings, and noth",
        ),
        ({"user__model": "m", "user__urls": ("here:80",)}, "user.urls: ['here:80']; a simulated user needs addresses"),
        ({"user__urls": ("http://here/v1",)}, "user.model: empty; a simulated user needs both"),
        ({"user__model": "m"}, "user.urls: empty; a simulated user needs both"),
        ({"user__timeout_s": 0.0}, "user.timeout_s: 0.0 must be greater than 0"),
        (
            {"model__attention": "kernel", "batch__layout": "shared"},
            "model.attention: no kernel reads rows of batch.layout=shared; set the layout to packed, or attention to",
        ),
    ],
)
def test_impossible_settings_are_errors(changes: dict[str, typing.Any], expected: str) -> None:
    pinned = {"batch__row_length": 512, "batch__rows_multiple": 16, "batch__micro_batch_rows": 16}
    pinned |= {"sampler__slots": 64, "sampler__max_length": 512, "sampler__cache_lengths": (256, 512)}
    pinned |= {"prompts__max_act_prompt": 320, "prompts__max_rehearse_prompt": 416, "limits__act_context": 512}
    pinned |= {"limits__act_response": 96, "limits__rehearse_response": 96}
    assert expected in problems_of(**(pinned | changes))


def test_choices_are_those_of_the_modules_that_use_them() -> None:
    hints = typing.get_type_hints(config.GrpoConfig)
    for key, known in (("baseline", grpo.BASELINES), ("scale", grpo.SCALES), ("denominator", grpo.DENOMINATORS)):
        assert set(typing.get_args(hints[key])) == set(known)
    assert set(typing.get_args(hints["old_logprobs"])) == set(train_step.OLD_LOGPROBS)
    assert set(typing.get_args(typing.get_type_hints(config.OptimizerConfig)["schedule"])) == set(train_step.SCHEDULES)
    assert set(typing.get_args(typing.get_type_hints(config.BatchConfig)["layout"])) == set(batching.LAYOUTS)
    model, optimizer = (typing.get_type_hints(group) for group in (config.ModelConfig, config.OptimizerConfig))
    assert set(typing.get_args(model["attention"])) == set(kernels.CHOICES)
    assert set(typing.get_args(model["remat"])) == set(qwen.REMAT)
    assert set(typing.get_args(optimizer["moments_dtype"])) == set(moments.MOMENTS_DTYPES)
    assert set(typing.get_args(typing.get_type_hints(config.RolloutConfig)["players"])) == set(players.LEARNERS)
    assert config.LoraConfig().targets == tuple(lora.TARGETS)


def test_what_is_never_trained_may_be_int8() -> None:
    for changes in ({"lora.rank": 8}, {"rollout.players": "frozen_act"}):
        values = load("tiny")
        values.update_from_flattened_dict({"model.quantize": "int8", **changes})
        assert from_config_dict(values).model.quantize == "int8"


def test_asset_paths() -> None:
    assert config.model_path("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    with pytest.raises(ConfigError, match="no such asset"):
        config.model_path("asset:nothing_of_that_name")


# --- what a resumed run may change ---


def changed(run: RunConfig, group: str, **values: object) -> RunConfig:
    return dataclasses.replace(run, **{group: dataclasses.replace(getattr(run, group), **values)})


def test_differing_keys_are_named_and_free_ones_are_not() -> None:
    run = changed(from_config_dict(load("tiny")), "optimizer", schedule="constant")  # else steps are fixed
    saved = to_json(run)
    assert differing_keys(saved, run) == []
    free = changed(changed(run, "logging", tensorboard=False), "evaluation", heldout_tasks=1)
    free = dataclasses.replace(changed(free, "checkpoint", keep=9), steps=run.steps + 1, compilation_cache="off")
    free = dataclasses.replace(free, warm_up=not run.warm_up)
    free = changed(changed(free, "external", urls=("http://h/v1",), retries=1), "reward", timeout_s=1.0)
    free = changed(changed(free, "user", urls=("http://h/v1",), retries=1), "mesh", data=8)
    assert differing_keys(saved, free) == []
    assert differing_keys(saved, changed(run, "external", cache=True)) == ["external.cache: False -> True"]
    other = dataclasses.replace(changed(run, "optimizer", learning_rate=0.5), seed=run.seed + 1)
    other = changed(other, "user", model="another")
    assert differing_keys(saved, other) == [
        f"optimizer.learning_rate: {run.optimizer.learning_rate!r} -> 0.5",
        f"seed: {run.seed} -> {run.seed + 1}",
        "user.model: '' -> 'another'",
    ]
    del saved["grpo"]["scale"]
    assert differing_keys(saved, run) == ["grpo.scale: 'absent' -> 'none'"]


def test_steps_are_fixed_when_the_schedule_is_stretched_over_them() -> None:
    run = changed(from_config_dict(load("tiny")), "optimizer", schedule="cosine")
    longer = dataclasses.replace(run, steps=run.steps + 1)
    assert differing_keys(to_json(run), longer) == [f"steps: {run.steps} -> {run.steps + 1}"]


# --- the command line ---


def command_line(*arguments: str) -> tuple[RunConfig, Path]:
    return main.read_flags(["main", *arguments])


def test_overrides_and_default_workdir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    run, workdir = command_line(
        "--config=configs/tiny.py",
        "--config.optimizer.learning_rate=1",
        "--config.model.unroll=False",
        "--config.sampler.prefill_rows=(4, 8)",
        "--noconfig.logging.tensorboard",
    )
    assert run.optimizer.learning_rate == 1.0 and run.model.unroll is False and not run.logging.tensorboard
    assert run.sampler.prefill_rows == (4, 8)
    assert workdir == Path("runs/tiny")
    assert command_line("--config=configs/tiny.py", "--workdir=elsewhere")[1] == Path("elsewhere")


def test_a_tilde_is_the_home_folder_wherever_a_path_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text((REPOSITORY / "configs" / "tiny.py").read_text())
    write_tasks(tmp_path / "tasks.jsonl", tiny.tasks("train", 2, 0))
    few = [f"--config.evaluation.{name}=0" for name in ("heldout_tasks", "unseen_tasks", "fidelity_calls")]
    few.append("--config.data.tasks_per_step=2")
    run, workdir = command_line("--config=~/mine.py", "--workdir=~/runs/a", "--config.data.source=~/tasks.jsonl", *few)
    assert workdir == tmp_path / "runs" / "a"
    assert len(inputs.read_inputs(run, ChecklistReward()).tasks) == 2
    assert config.model_path("~/models/a") == str(tmp_path / "models" / "a")
    monkeypatch.setattr(main.jax.config, "update", lambda *_: None)
    main.use_compilation_cache("~/cache")
    assert (tmp_path / "cache").is_dir()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "--config is missing; try --config=configs/tiny.py"),
        (("--config=configs/tiny.py", "--config.optimizer.lr=1"), "optimizer.lr: unknown setting; known there"),
        (
            ("--config=configs/tiny.py", "--config.optimizr.b1=1"),
            "optimizr.b1: unknown setting; the closest known: opt",
        ),
        (("--config=configs/tiny.py", "--config.steps=ten"), "--config.steps=ten: invalid literal for int()"),
        (("--config=configs/tiny.py", "--config.data.attempts=0"), "data.attempts: 0 is too small"),
        (
            ("--config=configs/tiny.py", "--config.model=x"),
            "model: a group of settings, which has no value of its own; ",
        ),
        (("--config=configs/tiny.py", "--config.grpo"), "give one to grpo.baseline, grpo.scale, "),
        (("--config=configs/tiny.py:foo",), "tiny.py:foo: the file cannot be used: TypeError: get_config() takes 0"),
        (("--config=configs/tiny.py", "--wrkdir=x"), "Did you mean: workdir"),
        (
            ("--config=configs/tiny.py", "--workdir=gs://bucket/run"),
            "--workdir=gs://bucket/run: an address, not a folder",
        ),
        (("--config=configs/tiny.py", "more"), "unexpected argument 'more'"),
        (("--config=configs/tinny.py",), "--config=configs/tinny.py: no such file; configs holds qwen3_0p6b.py"),
        (("--config=configs",), "--config=configs: no such file"),
    ],
)
def test_bad_command_lines(arguments: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(ConfigError) as caught:
        command_line(*arguments)
    assert expected in str(caught.value)


DEFAULTS = "from envace_jax.config import default_config_dict\n\ndef get_config():\n    c = default_config_dict()\n    "


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("x = 1\n", "AttributeError: module .* has no attribute 'get_config'"),
        ("def get_config(:\n", r"SyntaxError: invalid syntax \(broken.py, line 1\)"),
        ("def get_config():\n    return 3\n", "must return a ConfigDict"),
        ("import nothing_of_that_name\n", "line 1: .* ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("raise RuntimeError('two\\nlines')\n", "line 1: the file cannot be used: RuntimeError: two lines$"),
        (DEFAULTS + "c.steps = 'x'\n", "line 5: .* TypeError: Could not override field 'steps'"),
        (DEFAULTS + "c.steps = 1 / 0\n", "line 5: .* ZeroDivisionError: division by zero$"),
        (DEFAULTS + "c.steps = steps\n", "line 5: .* NameError: name 'steps' is not defined$"),
        (DEFAULTS + "c.stepz = 5\n", 'line 5: .*Key "stepz" does not exist .* is locked. Did you mean "steps"'),
    ],
)
def test_unusable_config_files(content: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.endswith("config_config")
    ]:  # a config read before, under one name
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "broken.py").write_text(content)
    for arguments in ((f"--config={tmp_path / 'broken.py'}",), ("--config", str(tmp_path / "broken.py"))):
        with pytest.raises(ConfigError, match=expected) as caught:
            command_line(*arguments)
        assert str(caught.value).startswith(f"--config={tmp_path / 'broken.py'}") and "\n" not in str(caught.value)


def test_bad_input_exits_with_2_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "envace_jax.main", "--config=configs/tiny.py", "--config.grpo.scales=std"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: grpo.scales: unknown setting; the closest known: grpo.scale\n"


def test_a_script_may_bring_its_own_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, given = object(), []
    monkeypatch.setattr(train, "run", lambda *arguments: given.append(arguments[3]))
    command = ["main", f"--config={REPOSITORY}/configs/tiny.py", f"--workdir={tmp_path}"]
    assert main.main([*command, "--config.compilation_cache=off"], reward=mine) == 0
    assert given == [mine]


def test_which_errors_are_messages() -> None:
    def raised(function: typing.Callable[[], object]) -> BaseException:
        with pytest.raises(Exception) as caught:
            function()
        return caught.value

    assert main.is_message(raised(lambda: config.model_path("asset:nothing")))
    assert main.is_message(raised(lambda: open("/nothing/of/that/name")))
    assert main.is_message(raised(lambda: grpo.check_name("scale", "sdt", grpo.SCALES)))  # a plain ValueError of ours
    assert not main.is_message(raised(lambda: int("x")))
    assert not main.is_message(raised(lambda: json.loads("{")))
