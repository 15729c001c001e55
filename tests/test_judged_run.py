"""A training run whose turns a judge scores, with faults: nothing is scored 0 for them, and nothing else changes."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import re
import time
import zlib
from concurrent.futures import Future

import pytest
from endpoint_server import FaultyServer, Heartbeat
from train_helpers import judged, model_bytes, tiny_config

from envace_jax import config as configuration
from envace_jax import train
from envace_jax.data import write_tasks
from envace_jax.endpoint import Endpoint, EndpointSettings
from envace_jax.envs import tiny
from envace_jax.rewards import choose
from envace_jax.rewards.judge import JudgedReward
from envace_jax.sharding import make_mesh
from envace_jax.types import Trajectory

TRANSIENT = ("status 500", "truncated", "types", "reset")


def drawn(text: str) -> int:
    return zlib.crc32(text.encode())


def lost(question: str) -> bool:
    """Whether the judge can never be had for a question."""
    return drawn(question) % 5 == 0


def verdicts(question: str) -> str:
    steps, items = map(int, re.search(r"Give (\d+) lists of (\d+)", question).groups())
    return json.dumps({"verdicts": [[drawn(f"{question}{i}") % 3 > 0 for i in range(items)]] * steps})


def asked(body) -> str:
    return body["messages"][1]["content"]


@pytest.fixture(scope="module")
def mesh():
    return make_mesh()


@pytest.fixture
def config(tmp_path):
    write_tasks(tmp_path / "judged.jsonl", [judged(task) for task in tiny.tasks("train", 4, 0)])
    none = {"evaluation.heldout_tasks": 0, "evaluation.unseen_tasks": 0, "evaluation.fidelity_calls": 0}
    settings = none | {"data.source": str(tmp_path / "judged.jsonl"), "data.count": 0, "reward.most_masked": 0.9}
    return lambda **changes: tiny_config(**(settings | changes))


def test_a_run_under_faults_equals_one_where_what_was_lost_is_masked(config, mesh, tmp_path, monkeypatch):
    monkeypatch.setattr("envace_jax.endpoint.LONGEST_WAIT_S", 0.1)

    seen: collections.Counter[str] = collections.Counter()

    def fault(number, body):
        """A question meets up to two faults of its own, whenever its turn comes: none but the lost ones is given up."""
        question = asked(body)
        seen[question] += 1
        if lost(question):
            return "status 503"
        draw = drawn(f"{question} fault")
        return TRANSIENT[(draw + seen[question]) % 4] if seen[question] <= draw // 4 % 3 else None

    server = FaultyServer(lambda body: verdicts(asked(body)), fault)
    with server.running() as url:
        settings = {"reward.kind": "judge", "reward.urls": (url,), "reward.model": "judge", "reward.retries": 4}
        train.run(config(**settings, **{"reward.timeout_s": 5.0}), mesh, tmp_path / "faulty")

    def ask(messages, read, **options):
        future, question = Future(), messages[1]["content"]
        if lost(question):
            future.set_exception(RuntimeError("lost"))
        else:
            future.set_result(read(verdicts(question)))
        return future

    train.run(config(), mesh, tmp_path / "masked", reward=JudgedReward(ask, name="j"))
    assert model_bytes(tmp_path / "faulty") == model_bytes(tmp_path / "masked")
    lines = [json.loads(line) for line in (tmp_path / "faulty" / "metrics.jsonl").read_text().splitlines()]
    counts = [line for line in lines if "judge_tries" in line][-1]
    # Attempts that ask the same at once share the question, and its fate.
    assert sum(line.get("masked", 0) for line in lines) >= counts["judge_given_up"] > 0
    assert counts["judge_fault_status_503"] == server.injected["status 503"]
    assert counts["judge_fault_connection"] == server.injected["reset"]
    assert counts["judge_tries"] == len(server.bodies)
    assert all(server.injected[kind] > 0 for kind in TRANSIENT)
    # What was judged is on disk: the same run again asks for what was lost alone.
    kept = (tmp_path / "faulty" / choose.VERDICTS_FILE).read_text().splitlines()
    assert len(kept) == len({json.loads(line)[0] for line in kept}) > 0


FIVE_PERCENT = {0: "status 500", 4: "timeout", 8: "truncated", 12: "types", 16: "reset"}  # of 20 other requests


class Outage:
    """What goes wrong with a request: a twentieth of each kind, and for a time nothing works at all."""

    def __init__(self, seconds: float, first: int):
        self.seconds, self.first, self.began = seconds, first, math.inf
        self.counted = 0
        self.others = itertools.count()  # neither lost nor of the outage, so that each kind has its turn

    def __call__(self, number, body):
        now = time.monotonic()
        if number == self.first:
            self.began = now
        if self.began <= now < self.began + self.seconds:
            self.counted += 1
            return "reset" if number % 2 else "status 503"
        return "status 503" if lost(asked(body)) else FIVE_PERCENT.get(next(self.others) % 20)


def rollouts(monkeypatch, kept, mask=()):
    """Every rollout's trajectories go to `kept`, by step; those at the places (step, index) of `mask` are masked."""
    play = train.rollout

    def masked(*args, **options):
        step, played = options["step"], play(*args, **options)
        for index in [index for of, index in mask if of == step]:
            played[index] = dataclasses.replace(played[index], status="failed", reward=math.nan)
        kept[step] = played
        return played

    monkeypatch.setattr(train, "rollout", masked)


@pytest.mark.parametrize(
    ("outage_s", "backoff_s", "longest_s", "timeout_s"),
    [(1.5, 0.05, 0.5, 2.0), pytest.param(30.0, 1.0, 10.0, 10.0, marks=pytest.mark.slow)],
)
def test_an_outage_among_other_faults_only_masks(
    outage_s, backoff_s, longest_s, timeout_s, config, mesh, tmp_path, monkeypatch
):
    """The waits and the outage are scaled alike: 30 s with the defaults, or all of it 20 times faster."""
    monkeypatch.setattr("envace_jax.endpoint.LONGEST_WAIT_S", longest_s)
    settings = config(**{"data.tasks_per_step": 4, "batch.row_buckets": (48,)})
    outage, faulty, masked = Outage(outage_s, first=15), {}, {}
    server = FaultyServer(lambda body: verdicts(asked(body)), outage, stall_s=timeout_s + 1)
    with server.running() as url, monkeypatch.context() as patch, Heartbeat() as heartbeat:
        rollouts(patch, faulty)
        endpoint = Endpoint(EndpointSettings((url,), "judge", timeout_s=timeout_s, backoff_s=backoff_s))
        train.run(settings, mesh, tmp_path / "faulty", JudgedReward(endpoint.ask, name="j", counts=endpoint.counts))
        endpoint.close()
    assert outage.counted > 3 and min(server.injected[kind] for kind in FIVE_PERCENT.values()) > 0
    counts, injected = endpoint.counts, server.injected
    late = counts["fault_timeout"] - injected["timeout"]  # good answers for which a stalled machine left no time
    assert late == 0 or (late > 0 and heartbeat.longest > timeout_s / 4)
    assert {name: count for name, count in counts.items() if name.startswith("fault")} == {
        "fault_status_500": injected["status 500"],
        "fault_status_503": injected["status 503"],
        "fault_timeout": injected["timeout"] + late,
        "fault_body": injected["truncated"] + injected["types"],
        "fault_connection": injected["reset"],
    }
    faults = sum(count for kind, count in injected.items() if kind)
    assert counts["tries"] == len(server.bodies) == counts["answers"] + faults + late
    gone = [(step, index) for step in faulty for index, t in enumerate(faulty[step]) if t.status == "failed"]
    assert len(gone) == counts["given_up"] > 0 and all(math.isnan(faulty[step][i].reward) for step, i in gone)

    def ask(messages, read, **options):
        future = Future()
        future.set_result(read(verdicts(messages[1]["content"])))
        return future

    with monkeypatch.context() as patch:
        rollouts(patch, masked, gone)
        train.run(settings, mesh, tmp_path / "masked", JudgedReward(ask, name="j"))
    assert model_bytes(tmp_path / "faulty") == model_bytes(tmp_path / "masked")
    for step in faulty:
        for one, other in zip(faulty[step], masked[step], strict=True):
            if one.status == "ok":
                assert one.reward == other.reward and one.turn_scores == other.turn_scores
                assert [s.tokens.tolist() for s in one.segments] == [s.tokens.tolist() for s in other.segments]


def test_too_many_masked_trajectories_end_the_run_with_the_reason(config, mesh, tmp_path):
    with FaultyServer(str, lambda *_: "status 401").running() as url:
        settings = {"reward.kind": "judge", "reward.urls": (url,), "reward.model": "judge", "reward.most_masked": 0.5}
        with pytest.raises(configuration.UserError, match=r"are masked, more than reward.most_masked=0.5 .*status 401"):
            train.run(config(**settings), mesh, tmp_path / "run")


def test_the_share_of_masked_trajectories_is_counted_exactly():
    ok = Trajectory("t", 0, 0, (), 1.0, "ok", "done")
    failed = Trajectory("t", 0, 0, (), float("nan"), "failed", "fault: X: y")
    choose.check_masked([ok, failed], 0.5)
    choose.check_masked([failed, failed], 1.0)
    with pytest.raises(configuration.UserError, match=r"2 of 3 .* \(2 x\): fault: X: y"):
        choose.check_masked([ok, failed, failed], 0.5)
