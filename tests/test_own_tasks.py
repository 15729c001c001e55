"""Tasks in an environment of one's own: evaluated during a run and by the evaluate command, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
from endpoint_server import FaultyServer
from train_helpers import judged, tiny_config

from envace_jax import benchmarks, envs, inputs
from envace_jax.benchmarks import Options, command, tasks
from envace_jax.config import ConfigError, UserError
from envace_jax.data import write_tasks
from envace_jax.envs import tiny
from envace_jax.rewards.checklist import ChecklistReward
from envace_jax.types import CheckItem, Task, ToolCall

COUNTER = """
from envace_jax.envs import function_schema

TOOLS = [function_schema("add", amount={"type": "integer"})]


def execute(state, name, arguments):
    state = {"count": state["count"] + arguments["amount"]}
    return state, state
"""
SIZES = {
    "prompts.max_act_prompt": 300, "limits.act_context": 500, "sampler.max_length": 500, "batch.row_length": 640,
    "sampler.cache_lengths": (500,), "evaluation.unseen_tasks": 0,
}  # fmt: skip


def task(number: int) -> Task:
    call, result = ToolCall("add", {"amount": number}), json.dumps({"count": number})
    checks = ({"kind": "call", "name": "add", "arguments": call.arguments}, {"kind": "reply", "words": [str(number)]})
    return Task(
        task_id=f"counter/{number}",
        messages=(),
        tools=({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},),
        user_turns=(f"add {number}",),
        checklist=(tuple(CheckItem(f"Is it {check['kind']}?", 0.5, check=check) for check in checks),),
        reference=((call, result),),
        environment={"name": "counter", "state": {"count": 0}},
        conversation=(
            {"role": "user", "content": f"add {number}"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"name": "add", "arguments": dict(call.arguments)}],
            },
            {"role": "tool", "name": "add", "content": result},
            {"role": "assistant", "content": f"it is {number}"},
        ),
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """One with the environment, ten tasks and three others."""
    monkeypatch.setattr(envs, "_own", {})
    (tmp_path / "counter.py").write_text(COUNTER)
    write_tasks(tmp_path / "tasks.jsonl", [task(number) for number in range(1, 11)])
    write_tasks(tmp_path / "other.jsonl", [task(number) for number in range(11, 14)])
    return tmp_path


def read(folder, **changes):
    own = {"data.source": str(folder / "tasks.jsonl"), "data.environments": (str(folder / "counter.py"),)}
    return inputs.read_inputs(tiny_config(**SIZES, **own, **changes), ChecklistReward())


# --- in a run ---


def test_held_out_tasks_are_taken_out_of_the_file(folder):
    found = read(folder, **{"data.count": 0, "evaluation.heldout_tasks": 3})
    held, kept = ([task.task_id for task in own] for own in (found.heldout, found.tasks))
    assert len(held) == 3 and sorted([*held, *kept]) == sorted(f"counter/{number}" for number in range(1, 11))
    again = read(folder, **{"data.count": 0, "evaluation.heldout_tasks": 3})
    assert [task.task_id for task in again.heldout] == held
    # A count is of those that are left, as for a benchmark.
    assert [task.task_id for task in read(folder, **{"data.count": 4, "evaluation.heldout_tasks": 3}).tasks] == kept[:4]


def test_or_are_the_first_of_a_source_of_their_own(folder):
    found = read(
        folder, **{"data.count": 0, "evaluation.heldout_tasks": 2, "evaluation.source": str(folder / "other.jsonl")}
    )
    assert [task.task_id for task in found.heldout] == ["counter/11", "counter/12"] and len(found.tasks) == 10
    world = read(folder, **{"data.count": 0, "evaluation.heldout_tasks": 2, "evaluation.source": "tiny"})
    assert len(world.heldout) == 2 and len(world.tasks) == 10 and "shop" not in world.tasks[0].task_id


@pytest.mark.parametrize(
    ("change", "settings", "reason"),
    [
        ({"environment": None}, {}, "evaluation.heldout_tasks: task 'counter/11' of .*other.jsonl has no executable"),
        ({"environment": {"name": "x", "state": {}}}, {}, "no environment is called 'x'; there are: .*counter"),
        ({}, {"evaluation.heldout_tasks": 9}, "evaluation.heldout_tasks: 9 is more than the 1 tasks of .*other.jsonl"),
        ({"task_id": "counter/1"}, {}, "data.source and the evaluation: 1 tasks are both trained on and evaluated"),
    ],
)
def test_what_could_not_be_evaluated_is_refused(folder, change, settings, reason):
    write_tasks(folder / "other.jsonl", [dataclasses.replace(task(11), **change)])
    wanted = {"evaluation.heldout_tasks": 1, "evaluation.source": str(folder / "other.jsonl"), "data.count": 0}
    with pytest.raises((ConfigError, ValueError), match=reason) as refused:
        read(folder, **wanted | settings)
    assert "\n" not in str(refused.value)


def test_rehearsed_results_are_compared_only_where_a_conversation_tells_of_them(folder):
    envs.add_file(folder / "counter.py")
    silent = dataclasses.replace(task(1), conversation=())  # as those of BFCL
    with pytest.raises(ConfigError, match="evaluation.fidelity_calls: no held-out task of tiny has a reference conv"):
        inputs._check_heldout(tiny_config(**{"evaluation.fidelity_calls": 1}), [silent], ChecklistReward())


def test_held_out_tasks_that_only_a_judge_could_score_are_refused_or_counted(folder, capsys):
    wanted = {"evaluation.heldout_tasks": 2, "evaluation.source": str(folder / "other.jsonl"), "data.count": 0}
    write_tasks(folder / "other.jsonl", [judged(task(11)), task(12)])
    read(folder, **wanted)
    assert "1 of 2 held-out tasks have items that need a judge, so they are masked" in capsys.readouterr().out
    write_tasks(folder / "other.jsonl", [judged(task(11)), judged(task(12))])
    with pytest.raises(ConfigError, match="every one of .*other.jsonl has checklist items that need a judge"):
        read(folder, **wanted)


# --- by the command ---


def evaluate(folder, *flags):
    named = [f"--data={folder / 'tasks.jsonl'}", f"--config.data.environments=('{folder / 'counter.py'}',)"]
    code = command.run(["evaluate", "--benchmark=tasks", *named, f"--out={folder / 'out'}", *flags])
    path = folder / "out" / "results.json"
    return code, json.loads(path.read_text()) if path.is_file() else None


@pytest.mark.parametrize(("policy", "score"), [("gold", 100.0), ("noop", 0.0), ("garbage", 0.0)])
def test_gold_solves_ones_own_tasks_and_other_scripts_none(folder, policy, score):
    code, found = evaluate(folder, f"--policy={policy}")
    assert code == 0 and benchmarks.is_suite(tasks)
    own = found["results"]["categories"]
    assert {name: (one["score"], one["cases"], one["masked"]) for name, one in own.items()} == {
        "counter": (score, 10, 0)
    }


def test_a_judge_decides_what_no_program_checks(folder):
    write_tasks(folder / "tasks.jsonl", [judged(task(1)), judged(task(2))])
    code, found = evaluate(folder, "--policy=gold")
    assert code == 2 and found is None
    server = FaultyServer(lambda body: json.dumps({"verdicts": [[True, True]] * 2}))
    with server.running() as url:
        flags = ["--config.reward.kind=judge", f"--config.reward.urls=('{url}',)", "--config.reward.model=judge"]
        code, found = evaluate(folder, "--policy=gold", *flags)
    assert code == 0 and len(server.bodies) == 2
    assert found["judge"]["model"] == "judge" and "urls" not in found["judge"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"environment": None}, "task 'counter/1' of .* has no executable environment"),
        ({"environment": {"name": "bfcl", "state": {}}}, "is one of bfcl: measure it by --benchmark=bfcl"),
        ({"scenario": "You want more."}, "has a simulated user, which a model plays"),
        ({"checklist": judged(task(1)).checklist}, "every task has items without a program check, which need a judge"),
    ],
)
def test_tasks_that_could_not_be_measured_are_refused(folder, change, reason):
    write_tasks(folder / "tasks.jsonl", [dataclasses.replace(task(1), **change)])
    options = Options(
        data=str(folder / "tasks.jsonl"), environments=(str(folder / "counter.py"),), reward=ChecklistReward()
    )
    with pytest.raises(UserError, match=reason) as refused:
        tasks.read(options)
    assert "\n" not in str(refused.value)


def test_what_is_missing_is_said_in_one_line(folder, capsys):
    assert command.run(["evaluate", "--benchmark=tasks", "--policy=gold", f"--out={folder / 'out'}"]) == 2
    assert "--benchmark=tasks needs --data=FILE" in capsys.readouterr().err
    assert evaluate(folder, "--policy=gold", "--categories=shop")[0] == 2
    assert "there is no 'shop'; there are: counter" in capsys.readouterr().err
    flags = ["--config.reward.kind=judge", "--config.reward.checkpoint=asset:tiny_base"]
    assert evaluate(folder, "--policy=gold", *flags)[0] == 2
    assert "an evaluation asks its judge by an address" in capsys.readouterr().err


def test_an_environment_that_raises_is_told_by_its_own_words(folder, capsys):
    (folder / "counter.py").write_text(
        COUNTER.replace("    state = ", "    assert arguments['amount'] != 3, 'boom'\n    state = ")
    )
    code, found = evaluate(folder, "--policy=gold")
    assert code == 0 and found["results"]["masked"] == 1 and found["results"]["categories"]["counter"]["score"] == 100.0
    ((reason, count),) = found["results"]["faults"].items()
    assert "boom" in reason and count == 1
    out = capsys.readouterr().out
    assert "1 attempts are masked, and the same command tries them again; why:" in out and "  1 x " in out


def test_a_config_with_a_judge_is_no_matter_to_benchmarks_that_check_themselves(tmp_path):
    flags = ["--benchmark=tiny", "--policy=gold", "--subset=first:1", f"--out={tmp_path}", "--config.reward.kind=judge"]
    assert command.run(["evaluate", *flags, "--config.reward.checkpoint=asset:tiny_base"]) == 0
    assert "judge" not in json.loads((tmp_path / "results.json").read_text())
    assert not (tmp_path / "verdicts.jsonl").exists()


# --- validate ---


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weight": 0.3}, "task counter/1: .*the weights of the checklist of turn 0 sum to 0.8, not 1"),
        ({"dependence": (3,)}, "task counter/1: .*dependence .3. does not name items of the same turn"),
        ({"check": {"kind": "replay"}}, "task counter/1: .*unknown check kind 'replay'; there are: "),
    ],
)
def test_validate_refuses_what_a_file_of_tasks_is_refused_for(folder, change, reason):
    envs.add_file(folder / "counter.py")
    first, second = task(1).checklist[0]
    changed = dataclasses.replace(task(1), checklist=((dataclasses.replace(first, **change), second),))
    with pytest.raises(ValueError, match=reason):
        tiny.validate([changed])


def test_validate_scores_no_turn_that_only_a_judge_could(folder):
    envs.add_file(folder / "counter.py")
    tiny.validate([judged(task(1))])
    with pytest.raises(ValueError, match="are not what executing them gives"):
        tiny.validate([dataclasses.replace(judged(task(1)), environment={"name": "counter", "state": {"count": 5}})])
