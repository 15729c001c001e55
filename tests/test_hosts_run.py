"""Several real processes train as one: the numbers of one process, and an orderly end whatever ends one of them."""

from __future__ import annotations

import json
import re
import signal
import time
import zlib
from pathlib import Path

import pytest
from endpoint_server import FaultyServer
from hosts_helpers import assert_same_run, drawn, finished, free_port, lines, started
from train_helpers import judged, model_bytes

from envace_jax import watch
from envace_jax.data import write_tasks
from envace_jax.envs import tiny
from envace_jax.metrics import read_json_lines

TWO = {"mesh.data": 2}
# One axis: with two, XLA's CPU backend may take collectives in another order in each process, and wait for ever
# (docs/hosts.md). Meshes of several axes are compared within a process: test_train_step_mesh.py, test_decode_mesh.py.
FOUR = {"mesh.fsdp": 4}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Programs that one run compiled are found by the next."""
    return tmp_path_factory.mktemp("xla")


def verdicts(body) -> str:
    question = body["messages"][1]["content"]
    steps, items = map(int, re.search(r"Give (\d+) lists of (\d+)", question).groups())
    passed = [zlib.crc32(f"{question}{item}".encode()) % 3 > 0 for item in range(items)]
    return json.dumps({"verdicts": [passed] * steps})


def test_two_processes_train_as_one_with_environments_and_a_judge(tmp_path, cache):
    """Against one process with one device: losses, trajectories, and every count of what was asked outside."""
    write_tasks(tmp_path / "judged.jsonl", [judged(task) for task in tiny.tasks("train", 4, 0)])
    settings = {"data.source": str(tmp_path / "judged.jsonl"), "data.count": 0, "rollout.responder": "real"}
    server = FaultyServer(verdicts)
    with server.running() as url:
        settings |= {"reward.kind": "judge", "reward.urls": (url,), "reward.model": "judge"}
        finished(1, tmp_path / "one", cache, **settings)
        asked = len(server.bodies)
        two = finished(2, tmp_path / "two", cache, **settings, **TWO)
    assert asked > 0 and len(server.bodies) == 2 * asked
    assert_same_run(tmp_path / "one", tmp_path / "two")
    assert lines(tmp_path / "two")[-1]["judge_tries"] == asked
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two")]
    calls = [summary["real_env_calls_in_training"] for summary in summaries]
    assert calls[0] == calls[1] > 0
    assert "2 devices of 2 processes" in two.output(0, "out") and "step 2/2" in two.output(0, "out")
    assert two.output(1) == "" and "step" not in two.output(1, "out")
    files = [file for file in (tmp_path / "two").glob("verdicts*.jsonl") if file.stat().st_size]
    kept = [json.loads(line)[0] for file in files for line in file.read_text().splitlines()]
    assert len(files) == 2 and len(kept) == len(set(kept)) > 0


# --- how a run ends ---

# The command with a run that only talks: every step is an exchange. What ends processes is the same.
TALK = """
import os, pathlib, sys, time
from envace_jax import hosts, main, stopping, train, watch
watch.PULSE_S, watch.TELL_S, watch.LAST_S = 0.3, 2.0, 5.0

def run(config, mesh, workdir, reward, stop):
    for step in range(100000):
        if any(hosts.exchange(stop())):
            raise stopping.Stopped(step)
        time.sleep(0.05)
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / f"{hosts.index()}.{step}").touch()
        END

train.run = run
sys.exit(main.main(sys.argv))
"""


def talking(tmp_path, cache, processes=2, end="pass", **options):
    code = TALK.replace("END", end)
    return started(processes, tmp_path / "run", cache, code=code, **{"mesh.data": processes, **options})


def wait_for(file: Path, run) -> None:
    until = time.monotonic() + 200
    while not file.exists():
        assert time.monotonic() < until and all(p.poll() is None for p in run.processes), run.said()
        time.sleep(0.05)


@pytest.mark.parametrize("victim", [1, 0])
def test_when_one_is_killed_the_others_say_so_and_end(victim, tmp_path, cache):
    with talking(tmp_path, cache) as run:
        wait_for(tmp_path / "run" / "0.3", run)
        run.processes[victim].kill()
        codes, said = run.codes(timeout=100), run.output(1 - victim)
        if victim == 1:
            assert codes == [watch.LOST, -signal.SIGKILL], run.said()
            assert re.search(r"error: process 0: process 1 on \S+ was not heard of for \d+ s: it died", said)
            assert "same command starts anew" in said and "Traceback" not in said
        else:  # jax itself ends a process that has lost process 0
            assert codes[0] == -signal.SIGKILL and codes[1] in (watch.LOST, -signal.SIGABRT), run.said()
            assert re.search(r"error: process 1.*process 0 .*same command", run.last_line(1)), run.said()


def test_when_process_0_falls_silent_the_others_say_so_and_end(tmp_path, cache):
    """As when its network is gone: nothing is refused, nothing is answered."""
    with talking(tmp_path, cache) as run:
        wait_for(tmp_path / "run" / "0.3", run)
        run.processes[0].send_signal(signal.SIGSTOP)
        assert run.processes[1].wait(100) == watch.LOST, run.said()
        assert run.output(1).startswith("error: process 1: process 0 does not answer: it or its host is gone")
        assert run.output(1).count("\n") == 1


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("raise KeyError('a bug')", 1, "process 1 ended the run: KeyError: 'a bug'"),
        ("raise main.UserError('a bad file')", 2, "process 1 ended the run: UserError: a bad file"),
    ],
)
def test_a_fault_in_one_ends_all_with_its_message(fault, code, said, tmp_path, cache):
    end = f"\n        if step == 3 and hosts.index() == 1: {fault}"
    with talking(tmp_path, cache, end=end) as run:
        assert run.codes(timeout=100) == [code, code], run.said()
        assert said in run.output(0) and run.output(0).count("\n") == 1
        assert ("Traceback" in run.output(1)) is (code == 1)


def test_sigterm_to_any_ends_all_in_order(tmp_path, cache):
    with talking(tmp_path, cache) as run:
        wait_for(tmp_path / "run" / "0.3", run)
        run.processes[1].send_signal(signal.SIGTERM)
        assert run.codes(timeout=100) == [0, 0], run.said()
        assert "stopped before the first checkpoint" in run.output(0)
    ends = [max(int(file.suffix[1:]) for file in (tmp_path / "run").glob(f"{number}.*")) for number in range(2)]
    assert ends[0] == ends[1]


def test_started_otherwise_is_said(tmp_path, cache):
    flags = [f"--coordinator=127.0.0.1:{free_port()}", "--processes=2"]
    lists = [[*flags, "--process=0"], [*flags, "--process=1", "--config.seed=5"]]
    with talking(tmp_path, cache, flags=lists) as run:
        assert run.codes(timeout=100) == [2, 2], run.said()
        assert "process 1 was started otherwise than process 0: seed: 0 -> 5" in run.output(0)


def test_who_waits_in_vain_is_told_so(tmp_path, cache):
    late = TALK.replace("END", "pass").replace("watch.PULSE_S", "hosts.START_TIMEOUT_S = 3\nwatch.PULSE_S", 1)
    flags = [[f"--coordinator=127.0.0.1:{free_port()}", "--processes=2", "--process=1"]]
    with started(1, tmp_path / "run", cache, code=late, flags=flags) as run:
        assert run.codes(timeout=100)[0] != 0
        said = run.last_line(0)
        assert said.startswith("error: process 1 and the other 1 of the run did not come together within 3 s")


def test_under_slurm_nothing_need_be_said(tmp_path, cache):
    shared = {"SLURM_JOB_ID": str(free_port() % 4096), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    each = [shared | {"SLURM_PROCID": str(number), "SLURM_LOCALID": "0"} for number in range(2)]
    end = "\n        if step == 3: return"
    with talking(tmp_path, cache, end=end, environments=each) as run:
        assert run.codes(timeout=100) == [0, 0], run.said()
        assert "2 devices of 2 processes" in run.output(0, "out")


# --- whole runs, slow ---


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, cache) -> Path:
    """Four steps of one process with one device."""
    return finished(1, tmp_path_factory.mktemp("unbroken") / "run", cache, steps=4).workdir


EVALUATED = {"evaluation.heldout_tasks": 3, "evaluation.samples": 2, "evaluation.fidelity_calls": 3}


@pytest.mark.slow
def test_the_same_mesh_in_one_process_or_in_two_or_four(tmp_path, cache, unbroken):
    """And a mesh of one device. With evaluations and warm-up, whose numbers are the same too."""
    settings = {**EVALUATED, "steps": 1, "warm_up": True}
    one = finished(1, tmp_path / "one", cache, **settings).workdir
    same = finished(1, tmp_path / "same", cache, devices=4, **settings, **FOUR).workdir
    four = finished(4, tmp_path / "four", cache, **settings, **FOUR).workdir
    two = finished(2, tmp_path / "two", cache, devices=2, **settings, **FOUR).workdir
    for other in (same, four, two):
        assert_same_run(one, other)
    assert_same_run(same, four, rel=1e-6)
    assert_same_run(two, four, rel=1e-6)


@pytest.mark.slow
def test_killed_on_four_and_resumed_on_two_and_on_one(tmp_path, cache, unbroken):
    """Losses of the unbroken run of one process: saved on 4, killed, resumed on 2, stopped, resumed on 1."""
    workdir = tmp_path / "run"
    with started(4, workdir, cache, steps=4, **FOUR) as run:
        run.wait_for_step(1)
        run.processes[2].kill()
        began = time.monotonic()
        codes = run.codes(timeout=150)
        assert time.monotonic() - began < 60
        assert codes[2] == -signal.SIGKILL and {codes[i] for i in (0, 1, 3)} == {watch.LOST}, run.said()
        assert "process 2 on" in run.output(0) and "the same command continues" in run.output(0)
    with started(2, workdir, cache, steps=4, **TWO) as run:
        run.wait_for_step(2)
        run.processes[0].send_signal(signal.SIGTERM)
        assert run.codes() == [0, 0], run.said()
        assert re.search(r"stopped; the same command continues .* from step \d", run.output(0))
    finished(1, workdir, cache, steps=4)
    assert_same_run(unbroken, workdir)


@pytest.mark.slow
def test_one_becomes_two_and_the_same_number_is_bit_equal(tmp_path, cache, unbroken):
    whole = finished(2, tmp_path / "whole", cache, steps=3, **TWO).workdir
    parts = tmp_path / "parts"
    with started(2, parts, cache, steps=3, **TWO) as run:
        run.wait_for_step(1)
        run.processes[1].send_signal(signal.SIGTERM)
        assert run.codes() == [0, 0], run.said()
        assert not (parts / "summary.json").exists()
    finished(2, parts, cache, steps=3, **TWO)
    assert model_bytes(whole) == model_bytes(parts)
    assert lines(whole) == lines(parts) and drawn(whole) == drawn(parts)
    grown = tmp_path / "grown"
    with started(1, grown, cache, steps=4) as run:
        run.wait_for_step(1)
        run.processes[0].send_signal(signal.SIGTERM)
        assert run.codes() == [0], run.said()
    finished(2, grown, cache, steps=4, **TWO)
    assert_same_run(unbroken, grown)
    assert len(read_json_lines(grown / "metrics.jsonl")) == 4
