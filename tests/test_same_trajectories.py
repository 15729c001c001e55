"""Training from the authors' format and from our JSON lines gives the same trajectories, token by token.

The authors' rows are written out here by hand, with nothing of ours in them: no checks, no environment, no task ids. So
a judge scores them, which answers by what it is asked alone.
"""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import Future

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_judged_run import verdicts
from train_helpers import judged, tiny_config

from envace_jax import fingerprint, inputs, train
from envace_jax.data import TaskStream, write_tasks
from envace_jax.envs import tiny
from envace_jax.rewards.judge import JudgedReward
from envace_jax.sharding import make_mesh

STEPS = 2
NONE = {"evaluation.heldout_tasks": 0, "evaluation.unseen_tasks": 0, "evaluation.fidelity_calls": 0, "data.count": 0}


def our_tasks():
    """Tiny tasks without what only ours have, named as the authors' rows are."""
    tasks = [dataclasses.replace(judged(task), environment=None) for task in tiny.tasks("train", 6, 0)]
    return [dataclasses.replace(task, task_id=f"cm2/{100 + index}") for index, task in enumerate(tasks)]


def authors_row(task, index):
    """The task as a row of the authors' files, after method.md ("Training data format of the authors")."""
    messages = [{"role": "system", "content": message["content"]} for message in task.messages]
    waiting, number = [], 0
    for message in task.conversation:
        calls = [
            {
                "id": f"call_{number + place}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for place, call in enumerate(message.get("tool_calls", ()))
        ]
        if message["role"] == "tool":
            messages.append({"role": "tool", "tool_call_id": waiting.pop(0), "content": message["content"]})
        elif calls:
            waiting, number = [call["id"] for call in calls], number + len(calls)
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        else:
            messages.append({"role": message["role"], "content": message["content"]})
    checklist = [
        [
            {
                "question": item.question,
                "focus_on": item.focus_on,
                "pass_condition": item.pass_condition,
                "failure_examples": list(item.failure_examples),
                "evidence": [{"snippet": text, "turn": 0} for text in item.evidence],
                "weight": item.weight,
                "required_for_next_turn": item.required_for_next_turn,
                "dependence": list(item.dependence),
            }
            for item in turn
        ]
        for turn in task.checklist
    ]
    opening = next(place for place, message in enumerate(messages) if message["role"] == "user") + 1
    return {
        "data_source": "cm2",
        "ability": "tools",
        "messages": messages[:opening],
        "extra_info": {
            "index": index,
            "original_index": 3 * index,
            "tools": json.dumps(task.tools),
            "messages": messages,
            "interaction_kwargs": {"name": "caller", "checklist_list": [checklist, checklist[:1] * len(checklist)]},
        },
    }


def ask(messages, read, **options):
    future = Future()
    future.set_result(read(verdicts(messages[1]["content"])))
    return future


def write_sources(folder):
    """The same tasks three times; the names of the files."""
    tasks = our_tasks()
    rows = [authors_row(task, 100 + index) for index, task in enumerate(tasks)]
    assert not any(ours in json.dumps(rows) for ours in ('"check"', '"environment"', '"task_id"'))
    write_tasks(folder / "ours.jsonl", tasks)
    (folder / "authors.json").write_text(json.dumps(rows))
    datasets.Dataset.from_list(rows).to_parquet(folder / "authors.parquet")
    return "ours.jsonl", "authors.json", "authors.parquet"


def test_both_formats_are_the_same_tasks_and_batches(tmp_path):
    """All that a trajectory depends on besides the settings and the parameters: tasks, their ids, and their order."""
    tasks = our_tasks()
    for name in write_sources(tmp_path):
        config = tiny_config(**NONE, **{"data.source": str(tmp_path / name)})
        read = inputs.read_inputs(config, JudgedReward(ask, name="scripted"))
        assert list(read.tasks) == tasks and read.fingerprints()["tasks"] == fingerprint.of_tasks(tasks)
        assert TaskStream(read.tasks, 4, 7).batch_at(9) == TaskStream(tasks, 4, 7).batch_at(9)


@pytest.mark.slow
def test_both_formats_give_the_same_trajectories_and_the_same_parameters(tmp_path):
    def config(name):
        return tiny_config(**NONE, **{"data.source": str(tmp_path / name), "optimizer.learning_rate": 1e-3})

    names, reward = write_sources(tmp_path), JudgedReward(ask, name="scripted")
    setup, begun = train.build(config("ours.jsonl"), make_mesh(), reward)
    played, trained = {}, {}
    for name in names:
        read = inputs.read_inputs(config(name), reward)
        one = dataclasses.replace(setup, stream=TaskStream(read.tasks, 2, setup.config.data.seed))
        state, played[name] = jax.tree.map(jnp.copy, begun), []
        for step in range(STEPS):
            state, _, trajectories = train.iterate(one, state, step)
            played[name] += trajectories
        trained[name] = state.params
    ours = played.pop("ours.jsonl")
    assert len(ours) == STEPS * 8 and all(trajectory.status == "ok" for trajectory in ours)
    assert len({trajectory.reward for trajectory in ours}) > 1 and sum(len(t.segments) for t in ours) > 2 * len(ours)
    for name, theirs in played.items():
        for one, other in zip(ours, theirs, strict=True):
            assert (one.task_id, one.attempt, one.reward, one.reason) == (
                other.task_id, other.attempt, other.reward, other.reason,
            ), name  # fmt: skip
            assert one.messages == other.messages and one.turn_scores == other.turn_scores
            for mine, its in zip(one.segments, other.segments, strict=True):
                assert mine.role == its.role
                for field in ("prompt_tokens", "tokens", "logprobs"):
                    np.testing.assert_array_equal(getattr(mine, field), getattr(its, field))
        jax.tree.map(np.testing.assert_array_equal, trained["ours.jsonl"], trained[name])
    moved = jax.tree.map(lambda one, other: bool(jnp.any(one != other)), begun.params, trained["ours.jsonl"])
    assert any(jax.tree.leaves(moved))
