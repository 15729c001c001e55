"""BFCL's tasks in a profile, a rollout, an evaluation and a whole run; they need the package (see test_bfcl.py)."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import environment_baselines
import numpy as np
import pytest
import scripted
from test_bfcl import WAIT, with_package
from test_rollout import LIMITS, ScriptedSampler, play

from envace_jax import config as configuration
from envace_jax import data_profile, envs, evaluate, inputs
from envace_jax.envs import bfcl, worker
from envace_jax.responders import Real
from envace_jax.rewards.checklist import ChecklistReward


@pytest.fixture(scope="module")
def base():
    return bfcl.tasks("multi_turn_base")


@with_package
@pytest.mark.parametrize(("category", "calls"), [("multi_turn_base", 1142), ("multi_turn_miss_func", None)])
def test_a_benchmark_has_a_profile_too(capsys, category, calls):
    assert data_profile.main([f"--path=bfcl:{category}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tasks"] == found["tasks with an environment"] == found["tasks with program checks alone"] == 200
    if calls is not None:  # the other has calls of tools that are told of later
        assert sum(called for _, _, called in found["tools"]) == calls


@with_package
def test_held_out_tasks_are_drawn_by_the_seed_and_never_trained_on(tmp_path):
    def read(seed, count):
        values = configuration.default_config_dict()
        values.model.path = "asset:tiny_base"
        values.data.source, values.data.seed, values.evaluation.heldout_tasks = "bfcl:simple_python", seed, count
        values.limits.act_context = values.limits.act_response = values.limits.rehearse_response = 300
        values.limits.act_context = 2000
        values.prompts.max_act_prompt, values.prompts.max_rehearse_prompt = 1000, 1700
        values.rollout.responder = "real"
        return inputs.read_inputs(configuration.from_config_dict(values), ChecklistReward())

    first, again, other = read(1, 30), read(1, 30), read(2, 30)
    names = [{task.task_id for task in part} for part in (first.tasks, first.heldout)]
    assert [len(part) for part in names] == [370, 30] and not names[0] & names[1]
    assert first.heldout == again.heldout and first.heldout != other.heldout
    with pytest.raises(configuration.ConfigError, match="400 of the 400 tasks there are leave none to train on"):
        read(1, 400)


def gold_script(task):
    """What a policy would write that makes the gold calls, a message a turn, and rehearses the known results."""
    plan = environment_baselines._gold_calls(task)
    results = iter(result for _, result in task.reference)

    def script(prompt, key_ids):
        if "Simulate the tools." in prompt:
            return scripted.answering(next(results))
        turn = max(number for number, text in enumerate(task.user_turns) if text in prompt)
        answered = "<tool_response>" in prompt.rsplit(task.user_turns[turn], 1)[1]
        return scripted.calling(*plan[turn]) if plan[turn] and not answered else "Done."

    return script


ROOM = {
    "prompts": scripted.prompts(max_act_prompt=300_000, max_rehearse_prompt=300_000),
    "limits": dataclasses.replace(LIMITS, act_context=400_000),
}


@with_package
@pytest.mark.parametrize("who", ["real", "rehearsed"])
def test_rollouts_of_gold_conversations_are_rewarded(base, who):
    task = min(base, key=lambda task: len(json.dumps(task.tools)))
    responder = {"responder": Real(envs.make_environment)} if who == "real" else {}
    before = envs.execution_count()
    (trajectory,) = play(gold_script(task), [task], attempts=1, reward=ChecklistReward(), **responder, **ROOM)
    assert (trajectory.status, trajectory.reason, trajectory.reward) == ("ok", "done", 1.0)
    assert envs.execution_count() - before == (len(task.reference) if who == "real" else 0)
    results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert results == [result for _, result in task.reference]
    assert bfcl.score(task, trajectory.messages).result(WAIT) == 1.0


@with_package
def test_evaluation_takes_the_official_outcome_and_masks_what_it_cannot_know(base, monkeypatch):
    tasks = sorted(base, key=lambda task: len(json.dumps(task.tools)))[:2]
    solve = gold_script(tasks[0])

    def script(prompt, key_ids):  # the second task's first message is a reply, and so are all others
        return solve(prompt, key_ids) if tasks[0].user_turns[0] in prompt else "No."

    def measured():
        return evaluate.success(
            ScriptedSampler(script), "params", tasks, reward=ChecklistReward(), samples=2, temperature=1.0, top_p=1.0,
            seed=1, **ROOM,
        )  # fmt: skip

    result = measured()
    assert result.per_task.tolist() == [1.0, 0.0] and result.rate == 0.5
    monkeypatch.setattr(bfcl, "score", lambda task, messages: broken())
    result = measured()
    assert np.isnan(result.rate) and {trajectory.status for trajectory in result.trajectories} == {"failed"}
    assert {trajectory.reason for trajectory in result.trajectories} == {"fault: EnvironmentFault: gone"}


@with_package
@pytest.mark.slow
@pytest.mark.parametrize("who", ["real", "rehearsed"])
def test_the_main_command_trains_on_bfcl(tmp_path, who):
    settings = {
        "steps": 2, "data.source": "bfcl:simple_python", "data.count": 0, "data.tasks_per_step": 4, "data.attempts": 2,
        "rollout.responder": who, "evaluation.heldout_tasks": 8, "evaluation.samples": 1, "evaluation.unseen_tasks": 0,
        "evaluation.fidelity_calls": 0, "prompts.max_act_prompt": 900, "prompts.max_rehearse_prompt": 1100,
        "limits.act_context": 1200, "sampler.max_length": 1200, "sampler.cache_lengths": "(1200,)",
        "sampler.prefill_lengths": "(128,512,1200)", "batch.row_length": 1200, "batch.row_buckets": "(32,)",
        "compilation_cache": "off", "warm_up": False,
    }  # fmt: skip
    flags = [f"--config.{name}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "envace_jax.main", "--config=configs/tiny.py", f"--workdir={tmp_path}", *flags]
    done = subprocess.run(command, cwd=Path(bfcl.__file__).parents[2], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["real_success_after"], summary["masked_after"], summary["steps"]) == (0.0, 0.0, 2)


def broken():
    future = scripted.Future()
    future.set_exception(worker.EnvironmentFault("gone"))
    return future
