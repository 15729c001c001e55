"""Several processes as one run, in parts: flags, messages, the rollout in step, watching each other.

Threads stand for processes here; `test_hosts_run.py` starts real ones.
"""

from __future__ import annotations

import collections
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
import scripted
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from test_judge_local import judged_play, judging, judging_verdicts, local
from test_rollout import ScriptedSampler, bank_script, content, play

from envace_jax import hosts, watch
from envace_jax.answers import AnswerCache
from envace_jax.config import ConfigError
from envace_jax.responders import Real
from envace_jax.sharding import make_mesh
from envace_jax.types import Trajectory

# --- flags ---


def test_flags_say_who_this_is_and_leave_the_rest():
    line = ["main", "--coordinator=10.0.0.2:8476", "--config=a.py", "--processes=4", "--process", "3", "--config.x=1"]
    launch, rest = hosts.read_flags(line)
    assert launch == hosts.Launch("10.0.0.2:8476", 4, 3)
    assert rest == ["main", "--config=a.py", "--config.x=1"]
    assert hosts.read_flags(["main", "--config=a.py"]) == (None, ["main", "--config=a.py"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--processes=2", "--process=0"], "--coordinator missing: .* go together"),
        (["--coordinator=h:1"], "--processes and --process missing"),
        (["--coordinator=h", "--processes=2", "--process=0"], "--coordinator=h: expected HOST:PORT"),
        (["--coordinator=h:99999", "--processes=2", "--process=0"], "--coordinator=h:99999: expected HOST:PORT"),
        (["--coordinator=h:1", "--processes=0", "--process=0"], "--processes=0: expected"),
        (["--coordinator=h:1", "--processes=2", "--process=2"], r"--process=2: expected 0 to 1"),
        (["--coordinator=h:1", "--processes=two", "--process=0"], "processes"),
    ],
)
def test_bad_flags_are_one_clear_line(flags, said):
    with pytest.raises(ConfigError, match=said) as caught:
        hosts.read_flags(["main", *flags])
    assert "\n" not in str(caught.value)


def test_a_lone_process_joins_nobody(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: pytest.fail("it started"))
    hosts.start(None)
    for name, value in {"JOB_ID": "7", "STEP_NODELIST": "here", "NTASKS": "1", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    hosts.start(None)  # one task under SLURM


def test_several_tasks_under_slurm_are_started(monkeypatch):
    started = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: started.append(given))
    for name, value in {"JOB_ID": "7", "STEP_NODELIST": "here", "NTASKS": "2", "PROCID": "1", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    hosts.start(None)
    assert len(started) == 1 and "process_id" not in started[0]


# --- threads that stand for processes ---


class Processes:
    """Runs a function in `count` threads, each of which takes itself for one process of as many."""

    def __init__(self, count: int, patch: pytest.MonkeyPatch):
        self.count, self.local = count, threading.local()
        self.barrier = threading.Barrier(count)
        self.values: dict[int, object] = {}
        self.exchanges = 0
        patch.setattr(jax, "process_count", lambda: getattr(self.local, "index", None) is None or count)
        patch.setattr(jax, "process_index", lambda: getattr(self.local, "index", 0))
        patch.setattr(hosts.multihost_utils, "process_allgather", self.gather)

    def gather(self, array):
        self.values[self.local.index] = array
        self.barrier.wait(60)
        gathered = np.stack([self.values[index] for index in reversed(range(self.count))])  # devices in any order
        self.exchanges += self.barrier.wait(60) == 0
        return gathered

    def run(self, function) -> list:
        def one(index: int):
            self.local.index = index
            try:
                return function(index)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(one, range(self.count)))


@pytest.fixture
def processes(monkeypatch):
    return lambda count: Processes(count, monkeypatch)


@given(st.lists(st.integers(0, 300_000), min_size=2, max_size=4))
@settings(max_examples=20, deadline=None)
def test_what_each_says_comes_to_all_in_their_order(sizes):
    with pytest.MonkeyPatch.context() as patch:
        words = [os.urandom(size) for size in sizes]
        for heard in Processes(len(sizes), patch).run(lambda index: hosts.exchange((index, words[index]))):
            assert heard == list(enumerate(words))


def test_messages_travel_in_arrays_of_few_sizes(monkeypatch):
    seen = set()

    def gather(array):
        seen.add(array.shape)
        return np.stack([array, array])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts.multihost_utils, "process_allgather", gather)
    for size in range(0, 1_000_000, 7_001):
        assert hosts.exchange(b"x" * size)[0] == b"x" * size
    assert len(seen) <= 4


def test_counts_are_added_by_name(processes):
    counts = [{"tries": 1, "answers": 2}, {"tries": 3}, {}]
    assert processes(3).run(lambda index: hosts.total(counts[index])) == [{"tries": 4, "answers": 2}] * 3


def test_with_one_process_nothing_is_sent(monkeypatch):
    monkeypatch.setattr(hosts.multihost_utils, "process_allgather", lambda _: pytest.fail("sent"))
    value = object()
    assert hosts.exchange(value)[0] is value and hosts.total({"a": 1}) == {"a": 1}
    assert hosts.owns(0) and hosts.owns(5) and hosts.first()


def test_parts_are_put_where_they_belong():
    """The way of several processes gives the array that jax's own gives with one."""
    mesh = make_mesh()
    for array, spec in ((np.arange(12.0).reshape(4, 3), PartitionSpec("data")), (np.int32(3), PartitionSpec())):
        sharding = NamedSharding(mesh, spec)
        one, other = hosts.put(array, sharding), hosts._put_parts(np.asarray(array), sharding)
        assert one.sharding == other.sharding and one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


# --- the rollout in step ---


class SlowBank(scripted.Bank):
    """An environment whose calls take a while each, another while for another caller."""

    def call(self, name, arguments):
        time.sleep(0.002 * len(arguments["owner"]))
        return super().call(name, arguments)


def everything(trajectories: list[Trajectory]):
    return [(content(t), t.task_id, t.attempt, t.group_id, t.reward, t.turn_scores, t.messages) for t in trajectories]


@given(count=st.integers(2, 5), slots=st.integers(1, 9), chunk=st.integers(1, 200), tasks=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_processes_in_step_play_what_one_plays(count, slots, chunk, tasks):
    """Real environments and a judge, each asked by the owner alone; processes without work stay to the end."""
    batch = [scripted.task(1 + number % 2, f"task {number}") for number in range(tasks)]
    alone = Real(SlowBank), scripted.Judge()
    want = everything(play(tasks=batch, responder=alone[0], reward=alone[1]))
    asked: list[tuple] = []

    def one(index):
        real, judge = Real(SlowBank), scripted.Judge()
        sampler = ScriptedSampler(bank_script, slots=slots, chunk=chunk)
        got = everything(play(tasks=batch, sampler=sampler, responder=real, reward=judge))
        asked.append((index, real.calls, {task for task, _, _ in judge.asked}, len(judge.asked)))
        return got, [request.request_id for request in sampler.submitted]

    with pytest.MonkeyPatch.context() as patch:
        results = Processes(count, patch).run(one)
    assert all(got == want for got, _ in results)
    assert all(submitted == results[0][1] for _, submitted in results)  # the same device calls everywhere
    assert sum(calls for _, calls, _, _ in asked) == alone[0].calls
    assert sum(times for *_, times in asked) == len(alone[1].asked)
    for index, calls, tasks_asked, _ in asked:
        assert tasks_asked == {task.task_id for place, task in enumerate(batch) if place % count == index}
        assert calls > 0 or not tasks_asked


def test_budgets_numbers_of_attempts_and_ends_are_those_of_one_process(processes):
    batch = [scripted.task(1 + number % 2, f"task {number}") for number in range(3)]
    told: dict[int | None, list] = {None: [], 0: [], 1: []}

    def one(index):
        return everything(
            play(
                tasks=batch, sampler=ScriptedSampler(bank_script, slots=5, chunk=70), first_attempt=4,
                token_budgets=[0, 150, 900], on_end=lambda number, trajectory: told[index].append((number, trajectory)),
            )
        )  # fmt: skip

    want = one(None)
    assert all(got == want for got in processes(2).run(one))
    assert [attempt for _, _, attempt, *_ in want] == [4, 5] * 3
    sizes = [sum(len(segment[2]) for segment in content_[5]) for content_, *_ in want]
    assert sizes[2] <= 150 and sizes[3] <= 150 < sizes[0] and {content_[3] for content_, *_ in want[2:4]} == {"length"}
    # Each tells of its own alone, once, and as all get them in the end.
    assert sorted(number for number, _ in told[0]) == [0, 1, 4, 5] and sorted(n for n, _ in told[1]) == [2, 3]
    for number, trajectory in told[0] + told[1]:
        assert everything([trajectory])[0] == want[number]


@pytest.mark.parametrize("own", [None, 2])
def test_a_judge_in_the_processes_answers_whoever_asks(own, processes):
    """Its questions go into everybody's slots; its counts are those of one process when added."""

    def model():
        sampler = None if own is None else OwnJudge(judging_verdicts, slots=own, chunk=70)
        return local(sampler)

    script = bank_script if own is not None else judging(judging_verdicts)
    first = model()
    want = [(content(t), t.reward) for t in judged_play(first, script)]
    models = [model() for _ in range(3)]
    got = processes(3).run(lambda index: [(content(t), t.reward) for t in judged_play(models[index], script)])
    assert all(trajectories == want for trajectories in got)
    added = collections.Counter()
    for one in models:
        assert not one.busy
        added.update(one.counts)
    assert added == first.counts and added["tries"] > 0
    assert sum(one.counts["tries"] > 0 for one in models) > 1


class OwnJudge(ScriptedSampler):
    def step(self, params):
        assert params == "judge"
        return super().step("params")


def test_an_error_in_one_process_is_raised_there(processes):
    """The others wait in their collective; `watch.py` ends them."""

    class Broken(Real):
        def end(self, trajectory_index, task):
            if task.task_id == "two":
                raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, threading.BrokenBarrierError)):
        processes(2).run(lambda _: play(responder=Broken(scripted.Bank)))


# --- files of answers ---


def test_each_process_adds_to_a_file_of_its_own_and_reads_all(tmp_path, processes):
    path = tmp_path / "verdicts.jsonl"

    def keep(index):
        with_answers = AnswerCache(path)
        with_answers.answer(f"key {index}", lambda: scripted.finished(index), lambda _: True).result()
        with_answers.close()

    processes(3).run(keep)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "verdicts.1.jsonl",
        "verdicts.2.jsonl",
        "verdicts.jsonl",
    ]
    for process in (0, 2):
        counts: collections.Counter[str] = collections.Counter()

        def read(index, counts=counts, process=process):
            if index == process:
                cache = AnswerCache(path, counts)
                return [cache.answer(f"key {i}", pytest.fail, lambda _: True).result() for i in range(3)]

        assert processes(3).run(read)[process] == [0, 1, 2] and counts["cache_hits"] == 3


# --- watching each other ---


class Table:
    """A table of keys that may fall silent."""

    def __init__(self):
        self.entries: dict[str, str] = {}
        self.down = False

    def key_value_set(self, key, value, allow_overwrite=False):
        if self.down:
            raise RuntimeError("UNAVAILABLE: no answer\nand more")
        if key in self.entries and not allow_overwrite:
            raise RuntimeError("ALREADY_EXISTS")
        self.entries[key] = value

    def key_value_dir_get(self, key):
        if self.down:
            raise RuntimeError("UNAVAILABLE: no answer\nand more")
        return [(name, value) for name, value in self.entries.items() if name.startswith(key)]


class Left(BaseException):
    pass


class Words:
    def leave(self, code):
        raise Left(code)

    def close(self):
        pass


@pytest.fixture
def watches(monkeypatch):
    monkeypatch.setattr(watch, "LAST_S", 0.2)
    table = Table()
    return table, [watch.Watch(table, process, 3, lambda: "go on so", Words()) for process in range(3)]


def pulse(each: watch.Watch) -> None:
    each.talk()
    each.look()


def test_who_has_begun_to_watch_is_known_by_name(watches, monkeypatch):
    """Threads take their time: one that dies before its first pulse must still be missed, by its host's name."""
    table, (_, one, _) = watches
    monkeypatch.setattr(one, "_threads", [])
    one.start()
    assert table.entries[f"{watch.ALIVE}1"].endswith(f" {socket.gethostname()}")


def test_who_is_not_heard_of_ends_all_and_is_named(watches, capsys):
    table, (zero, one, two) = watches
    for _ in range(3):
        for each in (zero, one, two):
            pulse(each)
    for _ in range(watch.SILENT_PULSES - 1):
        pulse(zero)
        pulse(two)
    assert capsys.readouterr().err == ""
    with pytest.raises(Left, match=str(watch.LOST)):
        pulse(two)
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1 and "process 1 on " in said and "was not heard of for 30 s" in said and "go on so" in said
    )
    assert said.startswith("error: process 2: ")
    with pytest.raises(Left, match=str(watch.LOST)):  # is told, and says the same
        pulse(zero)
    assert "process 1 on " in capsys.readouterr().err
    assert f"{watch.GONE}2" in table.entries


def test_an_error_is_told_to_all_with_its_code(watches, capsys):
    _, (zero, one, two) = watches
    pulse(one)
    with pytest.raises(Left, match="2"):
        one.end_run(2, "ValueError: bad")
    assert capsys.readouterr().err == ""  # it has said so itself
    for other in (two, zero):
        with pytest.raises(Left, match="2"):
            pulse(other)
        assert "process 1 ended the run: ValueError: bad" in capsys.readouterr().err


def test_no_answer_from_process_0_ends_the_others(watches, capsys):
    table, (_, one, _) = watches
    table.down = True
    for _ in range(watch.UNANSWERED_PULSES - 1):
        pulse(one)
    table.down = False
    pulse(one)  # it answers again: nothing is wrong
    table.down = True
    for _ in range(watch.UNANSWERED_PULSES - 1):
        pulse(one)
    with pytest.raises(Left, match=str(watch.LOST)):
        pulse(one)
    said = capsys.readouterr().err
    assert (
        said.startswith("error: process 1: ")
        and said.count("\n") == 1
        and "process 0 does not answer" in said
        and "UNAVAILABLE: no answer" in said
    )


def test_a_failed_collective_may_be_anothers_fault_and_a_bug_is_not():
    gloo = ValueError("UNKNOWN: Gloo AllGather failed: Connection reset by peer")
    wrapped = RuntimeError("while saving")
    wrapped.__cause__ = gloo
    assert watch.may_be_anothers(gloo) and watch.may_be_anothers(wrapped)
    assert watch.may_be_anothers(jax.errors.JaxRuntimeError("INTERNAL: x"))
    assert not watch.may_be_anothers(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"))
    assert not watch.may_be_anothers(ValueError("a shape")) and not watch.may_be_anothers(KeyError("x"))


# --- last words ---


def test_last_words_are_said_only_where_nobody_else_spoke(tmp_path: Path):
    code = """
        import os, sys
        from envace_jax.watch import LastWords
        words = LastWords("gone without a word")
        {end}
    """
    for end, said in (("os.abort()", True), ("words.leave(0)", False), ("words.close()", False)):
        out, err = _run(code.format(end=end))
        assert ("gone without a word" in err) is said, (end, out, err)


def _run(code: str) -> tuple[str, str]:
    import subprocess
    import sys
    import textwrap

    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=200
    )
    return done.stdout, done.stderr
