"""A training run whose tasks have a simulated user: what it says is kept, its faults mask, and it is counted."""

from __future__ import annotations

import dataclasses
import json
import shutil
import zlib

import pytest
from endpoint_server import FaultyServer
from train_helpers import model_bytes, tiny_config

from envace_jax import train, users
from envace_jax.data import write_tasks
from envace_jax.envs import tiny
from envace_jax.sharding import make_mesh


def said(body) -> str:
    return json.dumps(body["messages"], sort_keys=True)


def lost(body) -> bool:
    """Whether the user can never be had in a conversation."""
    return zlib.crc32(said(body).encode()) % 8 == 0


def answer(body) -> str:
    """One more message, or the end; which one follows from the conversation."""
    spoken = sum(message["role"] == "assistant" for message in body["messages"])
    return "and then ?" if spoken == 1 and zlib.crc32(said(body).encode()) % 2 else "###STOP###"


def with_user(task):
    return dataclasses.replace(
        task, user_turns=task.user_turns[:1], checklist=task.checklist[:1], scenario=f"You ask: {task.user_turns[0]}"
    )


@pytest.mark.slow
def test_a_run_with_a_simulated_user_is_repeated_from_what_it_said(tmp_path):
    write_tasks(tmp_path / "tasks.jsonl", [with_user(task) for task in tiny.tasks("train", 6, 0)])
    none = {"evaluation.heldout_tasks": 0, "evaluation.unseen_tasks": 0, "evaluation.fidelity_calls": 0}
    settings = none | {"data.source": str(tmp_path / "tasks.jsonl"), "data.count": 0, "reward.most_masked": 1.0}
    settings |= {"user.model": "player", "user.retries": 1, "logging.trajectories_per_step": 8}
    server = FaultyServer(answer, lambda number, body: "status 401" if lost(body) else None)
    with server.running() as url:
        train.run(tiny_config(**settings, **{"user.urls": (url,)}), make_mesh(), tmp_path / "first")
    (tmp_path / "second").mkdir()
    shutil.copy(tmp_path / "first" / users.ANSWERS_FILE, tmp_path / "second" / users.ANSWERS_FILE)
    with FaultyServer(answer, lambda number, body: "status 401").running() as url:
        train.run(tiny_config(**settings, **{"user.urls": (url,)}), make_mesh(), tmp_path / "second")
    assert model_bytes(tmp_path / "first") == model_bytes(tmp_path / "second")

    lines = [json.loads(line) for line in (tmp_path / "first" / "metrics.jsonl").read_text().splitlines()]
    counts = [line for line in lines if "user_tries" in line][-1]
    assert counts["user_tries"] == len(server.bodies) and counts["user_given_up"] == server.injected["status 401"] > 0
    assert sum(line.get("masked", 0) for line in lines) >= counts["user_given_up"]  # one question may be of several
    played = [json.loads(line) for line in (tmp_path / "first" / "trajectories.jsonl").read_text().splitlines()]
    heard = [[m["content"] for m in one["messages"] if m["role"] == "user"] for one in played]
    assert any(texts[1:] == ["and then ?"] for texts in heard) and all(len(texts) <= 2 for texts in heard)
