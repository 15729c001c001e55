"""Which tasks a step takes: weights and orders by hand, draws against their probabilities, and groups left out."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest
import scripted
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax import task_sampling, task_store
from envace_jax.data import TaskStream
from envace_jax.task_sampling import Drawn, by_success, candidates, gather, informative_groups, weights
from envace_jax.types import Trajectory

TASKS = [scripted.task(task_id=f"task {number}") for number in range(8)]
NAN = float("nan")


def attempt(task, reward, group=0, status="ok"):
    return Trajectory(task.task_id, group, 0, (), reward, status, "done")


def ids(tasks):
    return [int(task.task_id.split()[1]) for task in tasks]


def test_weights_by_hand():
    """Beta(1, 1): a new task p = 1/2; 3 of 4 solved p = 4/6; none of 8 p = 1/10; all of 8 the same from above."""
    record = {"task 1": [4, 3], "task 2": [8, 0], "task 3": [8, 8]}
    np.testing.assert_allclose(weights(TASKS[:4], record), np.array([1 / 4, 2 / 9, 9 / 100, 9 / 100]) + 0.01)


def test_what_is_noted_by_hand():
    drawn = Drawn()
    one, two = TASKS[:2]
    drawn.note([attempt(one, 1.0), attempt(one, 0.9), attempt(one, NAN, status="failed"), attempt(two, NAN)])
    assert drawn.record == {"task 0": [2.0, 1.0]}
    drawn.note([attempt(one, 1.0), attempt(two, 0.0)])
    assert drawn.record == {"task 0": [0.8 * 2 + 1, 0.8 * 1 + 1], "task 1": [1.0, 0.0]}
    assert json.loads(json.dumps(dataclasses.asdict(drawn))) == dataclasses.asdict(drawn)


def test_draws_are_by_weight_and_without_putting_back():
    """First places against the weights, and second ones against what is then left: within 4 standard errors."""
    record = {"task 1": [40, 40], "task 2": [40, 1], "task 3": [10, 5]}
    tasks, steps = TASKS[:4], 6000
    share = weights(tasks, record) / weights(tasks, record).sum()
    orders = [ids(by_success(tasks, 3, step, record)) for step in range(steps)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    second = [sum(share[a] * share[b] / (1 - share[a]) for a in range(4) if a != b) for b in range(4)]
    for place, expected in ((0, share), (1, second)):
        found = np.bincount([order[place] for order in orders], minlength=4) / steps
        error = np.sqrt(np.array(expected) * (1 - np.array(expected)) / steps)
        assert np.all(np.abs(found - expected) < 4 * error)
    assert share[0] > 5 * share[1]


def test_an_order_follows_from_seed_step_and_estimates_alone():
    record = {"task 1": [4, 3]}
    order = ids(by_success(TASKS, 0, 5, record))
    assert ids(by_success(TASKS, 0, 5, json.loads(json.dumps(record)))) == order
    others = [(1, 5, record), (0, 6, record), (0, 5, {f"task {n}": [40, 40] for n in order[:4]})]
    assert all(ids(by_success(TASKS, *other)) != order for other in others)


def test_candidates_without_options_are_the_streams_batch():
    stream = TaskStream(TASKS, 3, seed=1)
    for step in range(6):
        found = list(candidates(stream, step, Drawn(99, {"task 1": [4, 3]}), by="uniform", refilled=False))
        assert found == stream.batch_at(step)


def test_a_refilled_step_goes_on_where_the_last_one_stopped():
    stream = TaskStream(TASKS, 3, seed=1)
    order = [task for step in range(20) for task in stream.batch_at(step)]
    found = list(candidates(stream, 1, Drawn(5), by="uniform", refilled=True))
    assert found == order[5 : 5 + 3 + 8]
    assert list(itertools.islice(stream.tasks_from(17), 9)) == order[17:26]


def play(rewards, log):
    """Two attempts at a task, rewarded as the table says; a task that is not in it is solved once."""

    def rolled_out(tasks, before):
        log.append((ids(tasks), before))
        return [
            attempt(task, reward, group=before + place)
            for place, task in enumerate(tasks)
            for reward in rewards.get(ids([task])[0], (0.0, 1.0))
        ]

    return rolled_out


def test_groups_rewarded_alike_are_replaced_by_further_tasks():
    """Tasks 0 and 2 teach nothing, 3 and 4 stand in for them, but 4 teaches nothing either: 5 does."""
    log = []
    rewards = {0: (1.0, 1.0), 2: (0.5, 0.5 + 1e-9), 4: (0.0, 0.0)}
    found = gather(TASKS, 3, play(rewards, log), filtered=True, extra_rollouts=2)
    assert log == [([0, 1, 2], 0), ([3, 4], 3), ([5], 5)]
    assert ids(found.tasks) == [0, 1, 2, 3, 4, 5] and found.taken == 6 and len(found.trajectories) == 12
    assert [t.task_id for t in found.trained] == ["task 1"] * 2 + ["task 3"] * 2 + ["task 5"] * 2
    assert {t.group_id for t in found.trained} == {1, 3, 5}
    assert found.metrics(2) == {"groups_trained": 3, "groups_left_out": 3}
    # One rollout less: what has been found is trained on.
    found = gather(TASKS, 3, play(rewards, []), filtered=True, extra_rollouts=1)
    assert {t.group_id for t in found.trained} == {1, 3} and found.taken == 5
    # None at all: only leaving out.
    found = gather(TASKS, 3, play(rewards, []), filtered=True, extra_rollouts=0)
    assert {t.group_id for t in found.trained} == {1} and found.taken == 3
    # Off: everything is trained, and nothing more is attempted.
    found = gather(TASKS, 3, play(rewards, log := []), filtered=False, extra_rollouts=2)
    assert found.trained == found.trajectories and len(log) == 1 and found.taken == 3


def test_a_step_never_comes_back_to_a_task_and_ends_when_there_are_no_more():
    """Task 0 stands twice in the order, as at the end of an epoch; when all were attempted nothing is left to do."""
    nothing = {number: (0.0, 0.0) for number in range(8)}
    found = gather([*TASKS[:3], TASKS[0], *TASKS[3:5]], 2, play(nothing, log := []), filtered=True, extra_rollouts=9)
    assert log == [([0, 1], 0), ([2, 3], 2), ([4], 4)] and found.taken == 6 and found.trained == ()
    stream = TaskStream(TASKS, 3, seed=0)
    upcoming = candidates(stream, 0, Drawn(6), by="uniform", refilled=True)
    found = gather(upcoming, 3, play(nothing, []), filtered=True, extra_rollouts=9)
    assert len({task.task_id for task in found.tasks}) == 8


def test_masked_attempts_make_no_group_informative():
    two = TASKS[:1] * 2
    assert informative_groups([attempt(two[0], 0.0, 4), attempt(two[1], NAN, 4, "failed")]) == set()
    assert informative_groups([attempt(two[0], 0.0, 4), attempt(two[1], NAN, 4)]) == set()
    assert informative_groups(
        [attempt(two[0], NAN, 4, "failed"), attempt(two[0], 0.0, 4), attempt(two[1], 1.0, 4)]
    ) == {4}
    assert informative_groups([attempt(two[0], 0.0, 4), attempt(two[1], 0.5, 4), attempt(two[0], 1.0, 5)]) == {4}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["uniform", "success"]))
def test_steps_after_a_restart_are_those_of_an_unbroken_run(seed, by):
    """What is drawn depends on what was drawn, and that survives JSON."""
    rng, stream = np.random.default_rng(seed), TaskStream(TASKS, 3, seed=seed % 100)
    rewards = {number: tuple(rng.integers(0, 2, 2).astype(float)) for number in range(8)}

    def run(steps, drawn):
        taken = []
        for step in steps:
            upcoming = candidates(stream, step, drawn, by=by, refilled=True)
            found = gather(upcoming, 3, play(rewards, []), filtered=True, extra_rollouts=1)
            drawn.taken += found.taken
            drawn.note(found.trajectories)
            taken.append(ids(found.tasks))
        return taken

    whole = run(range(8), Drawn())
    first = Drawn()
    before = run(range(5), first)
    saved = json.loads(json.dumps({"taken": first.taken, "record": first.record}))
    assert before + run(range(5, 8), Drawn(saved["taken"], saved["record"])) == whole


def test_a_task_that_is_always_solved_comes_less_and_less_often():
    """Eight tasks, one of them solved half the time: after some steps it is drawn far more often than the others."""
    drawn, counts = Drawn(), np.zeros(8)
    for step in range(400):
        (task,) = by_success(TASKS, 0, step, drawn.record)[:1]
        number = ids([task])[0]
        drawn.note([attempt(task, reward) for reward in ((1, 0, 1, 0) if number == 5 else (1, 1, 1, 1))])
        counts[number] += step >= 100
    share = (0.25 + task_sampling.FLOOR) / ((0.25 + task_sampling.FLOOR) + 7 * (21 / 22 / 22 + task_sampling.FLOOR))
    assert counts[5] / 300 == pytest.approx(share, abs=0.1) and share > 0.4


def test_tasks_on_disk_are_drawn_alike_and_only_those_that_are_taken_are_read(monkeypatch):
    writer = task_store.TaskWriter()
    for task in TASKS:
        writer.add(task)
    stored, record = writer.finish(), {TASKS[1].task_id: [8.0, 4.0], TASKS[2].task_id: [8.0, 8.0]}
    assert ids(by_success(stored, 0, 5, record)) == ids(by_success(TASKS, 0, 5, record))
    reads = []
    load = task_store.pickle.loads
    monkeypatch.setattr(task_store.pickle, "loads", lambda data: reads.append(1) or load(data))
    taken = [task for task, _ in zip(by_success(stored, 0, 6, record), range(2), strict=False)]
    assert len(taken) == 2 and len(reads) <= 3
