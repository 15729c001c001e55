"""Worker processes: order, limits of time and memory, and that one episode's misfortune is not another's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envace_jax.envs.worker import EnvironmentFault, WorkerPool, WorkerStartError

SCRIPT = Path(__file__).with_name("worker_script.py")
MIB = 1 << 20
WAIT = 60  # seconds before a test gives up


@pytest.fixture
def pool():
    made = WorkerPool(SCRIPT, sys.executable, workers=2, memory_bytes=512 * MIB, timeout_s=20)
    yield made
    made.close()


def add(episode, number):
    return episode.call("add", {"number": number, "quiet": True})


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(condition) -> bool:
    deadline = time.monotonic() + WAIT
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_calls_of_an_episode_are_executed_in_order_and_noise_stays_out_of_the_answers(pool):
    episode = pool.open({"start": 100})
    futures = [add(episode, number) for number in range(50)]
    assert [future.result(WAIT)["total"] for future in futures] == [100 + sum(range(n + 1)) for n in range(50)]
    assert episode.state().result(WAIT) == {"total": 100 + sum(range(50)), "order": list(range(50))}


def test_episodes_know_nothing_of_each_other_and_are_spread_over_the_children(pool):
    episodes = [pool.open({"start": 10 * number}) for number in range(4)]
    pids = [episode.call("add", {"number": 1}).result(WAIT)["pid"] for episode in episodes]
    assert len(set(pids)) == 2 and sorted(pids.count(pid) for pid in set(pids)) == [2, 2]
    assert [episode.state().result(WAIT)["total"] for episode in episodes] == [1, 11, 21, 31]


def test_a_slow_call_holds_up_no_episode_of_another_child(pool):
    slow, quick = pool.open({"start": 0}), pool.open({"start": 0})
    add(quick, 1).result(WAIT)  # both children run
    sleeping = slow.call("sleep", {"seconds": 3})
    assert add(quick, 1).result(WAIT)["total"] == 2
    assert not sleeping.done()
    assert sleeping.result(WAIT) == {"slept": 3}


def test_a_call_past_its_time_is_a_fault_of_its_episode_alone(tmp_path):
    pool = WorkerPool(SCRIPT, sys.executable, workers=1, timeout_s=5)
    try:
        guilty, innocent = pool.open({"start": 0}), pool.open({"start": 5})
        before = innocent.call("add", {"number": 1, "quiet": True}).result(WAIT)
        pid = pool.ask(1).result(WAIT)["pid"]
        note = tmp_path / "note"
        sleeping, behind = guilty.call("sleep", {"seconds": 1000, "note": str(note)}), add(guilty, 1)
        after = add(innocent, 2)
        with pytest.raises(EnvironmentFault, match=r"worker_script.py: call: no answer within 5 s"):
            sleeping.result(WAIT)
        with pytest.raises(EnvironmentFault, match="no answer within 5 s"):
            behind.result(WAIT)
        assert (before["total"], after.result(WAIT)["total"]) == (6, 8)
        assert innocent.state().result(WAIT) == {"total": 8, "order": [1, 2]}
        with pytest.raises(EnvironmentFault, match="no answer within 5 s"):
            guilty.state().result(WAIT)
        assert note.read_text() == "asleep\n"  # not tried again: that would only take as long again
        assert not is_alive(pid) and pool.ask(1).result(WAIT)["pid"] != pid
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("allocate", {"bytes": 1024 * MIB}, "out of memory"),
        ("die", {}, r"exit status -9\); stderr ends: .*last words"),
    ],
)
def test_a_death_is_a_fault_of_its_episode_alone(name, arguments, reason):
    pool = WorkerPool(SCRIPT, sys.executable, workers=1, memory_bytes=512 * MIB, timeout_s=20)
    try:
        guilty, innocent = pool.open({"start": 0}), pool.open({"start": 5})
        add(innocent, 1)
        dying = guilty.call(name, arguments)
        after = add(innocent, 2)
        with pytest.raises(EnvironmentFault, match=reason):
            dying.result(WAIT)
        assert after.result(WAIT)["total"] == 8
        assert innocent.state().result(WAIT)["order"] == [1, 2]
    finally:
        pool.close()


def test_what_fits_the_memory_limit_is_no_fault_of_whoever_comes_after_others_filled_it():
    pool = WorkerPool(SCRIPT, sys.executable, workers=1, memory_bytes=512 * MIB, timeout_s=20)
    try:
        hoarder, innocent = pool.open({"start": 0}), pool.open({"start": 5})
        add(innocent, 1)
        assert hoarder.call("hoard", {"bytes": 300 * MIB}).result(WAIT) == {"kept": 1}
        assert innocent.call("allocate", {"bytes": 300 * MIB}).result(WAIT) == {"bytes": 300 * MIB}
        assert add(innocent, 1).result(WAIT)["total"] == 7
    finally:
        pool.close()


def test_an_exception_of_the_script_is_a_fault_and_the_child_goes_on(pool):
    episode, other = pool.open({"start": 0}), pool.open({"start": 0})
    pids = {pool.ask(1).result(WAIT)["pid"]}
    with pytest.raises(EnvironmentFault, match=r"call: KeyError: 'unheard of'"):
        episode.call("unheard of", {}).result(WAIT)
    with pytest.raises(EnvironmentFault, match="ValueError: Out of range float"):
        other.call("nan", {}).result(WAIT)
    assert pool.ask(21).result(WAIT)["double"] == 42 and pool.ask(1).result(WAIT)["pid"] in pids
    with pytest.raises(EnvironmentFault, match="KeyError: 'start'"):
        pool.open({}).state().result(WAIT)


def test_an_episode_that_cannot_be_made_again_as_it_was_is_a_fault():
    pool = WorkerPool(SCRIPT, sys.executable, workers=1, timeout_s=20)
    try:
        episode, other = pool.open({"start": 0}), pool.open({"start": 0})
        episode.call("once", {}).result(WAIT)
        with pytest.raises(EnvironmentFault):
            other.call("die", {}).result(WAIT)
        with pytest.raises(EnvironmentFault, match="once gave another result when its episode was made again"):
            add(episode, 1).result(WAIT)
    finally:
        pool.close()


def test_answers_of_any_size_and_any_text_come_through(pool):
    value = {"text": "é\ud800\n\u2028" + "x" * 3_000_000, "number": 10**400, "nested": [[[]]] * 3}
    assert pool.open({"start": 0}).call("echo", value).result(WAIT) == value


def test_closing_an_episode_lets_its_child_forget_it():
    pool = WorkerPool(SCRIPT, sys.executable, workers=1, timeout_s=20)
    try:
        episode = pool.open({"start": 3})
        last = add(episode, 4)
        episode.close()
        episode.close()
        assert last.result(WAIT)["total"] == 7 and pool.ask("closed").result(WAIT) == [7]
        with pytest.raises(ValueError, match="closed"):
            add(episode, 1)
    finally:
        pool.close()


def test_children_get_no_keys_and_neither_our_paths(pool, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    other = WorkerPool(SCRIPT, sys.executable, workers=1, variables={"EXTRA": "1"})
    other.close()
    assert {"EXTRA", "PYTHONHASHSEED"} <= set(other.info["variables"])
    assert not {"OPENAI_API_KEY", "PYTHONPATH"} & set(other.info["variables"])
    assert not [path for path in other.info["path"] if path.endswith(("envs", "tests"))]


def test_a_pool_that_cannot_start_says_why():
    with pytest.raises(WorkerStartError, match=r"^worker_script.py: start: the package is missing: pip install it$"):
        WorkerPool(SCRIPT, sys.executable, variables={"BROKEN": "1"})
    with pytest.raises(WorkerStartError, match="/no/python cannot be started: No such file"):
        WorkerPool(SCRIPT, "/no/python")
    with pytest.raises(ValueError, match="impossible limits"):
        WorkerPool(SCRIPT, sys.executable, workers=0)


def test_closing_the_pool_ends_children_and_fails_what_was_asked():
    pool = WorkerPool(SCRIPT, sys.executable, workers=1)
    episode = pool.open({"start": 0})
    sleeping, behind = episode.call("sleep", {"seconds": 1000}), add(pool.open({"start": 0}), 1)
    assert wait_until(lambda: sleeping.running())
    pool.close()
    for future in (sleeping, behind, episode.state()):
        with pytest.raises(EnvironmentFault):
            future.result(WAIT)
    assert not is_alive(pool.info["pid"])


def test_children_die_with_the_process_that_started_them(tmp_path):
    note = tmp_path / "note"
    program = (
        "import sys, pathlib; from envace_jax.envs.worker import WorkerPool\n"
        "pool = WorkerPool(pathlib.Path(sys.argv[1]), sys.executable, workers=1)\n"
        "pool.open({'start': 0}).call('sleep', {'seconds': 1000, 'note': sys.argv[2]})\n"
        "print(pool.info['pid'], flush=True); sys.stdin.read()\n"
    )
    root = str(Path(__file__).parent.parent)
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(SCRIPT), str(note)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    child = int(parent.stdout.readline())
    assert wait_until(note.exists) and is_alive(child)  # in the middle of a call, not where it would see its input end
    parent.kill()
    parent.communicate()
    assert wait_until(lambda: not is_alive(child))
