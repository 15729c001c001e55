"""experiments/test_time_scaling.py: its conditions, its figures worked by hand, and that no cell is computed twice."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import scripted
import test_time_scaling as table
from test_rollout import ScriptedSampler

from envace_jax import evaluate, rehearsal
from envace_jax.envs import tiny
from envace_jax.rehearsal import Memory
from envace_jax.rollout import Player


def cell(sampled, greedy, tokens=0.0):
    return {"sampled": sampled, "greedy": greedy, "prompt_tokens": 2 * tokens, "completion_tokens": tokens}


def test_the_conditions_are_the_tests_of_modes_attempts_placements_and_writers():
    found = table.conditions((1, 2))
    assert list(found)[:5] == ["none", "parallel:1", "parallel:1 transcript", "parallel:2", "parallel:2 transcript"]
    assert list(found)[5:7] == ["sequential:1", "sequential:2"]
    rest = [(chosen.mode, chosen.n, chosen.placement, chosen.memory) for chosen in list(found.values())[3:9]]
    assert rest == [
        ("parallel", 2, "system", "written"), ("parallel", 2, "system", "transcript"),
        ("sequential", 1, "system", "written"), ("sequential", 2, "system", "written"),
        ("parallel", 2, "user", "written"), ("parallel", 2, "user", "transcript"),
    ]  # fmt: skip
    assert list(found)[9:] == ["reference in system", "reference in user", "wrong in system", "wrong in user"]


def test_gains_are_paired_by_task_and_seed():
    none = [cell([0, 0, 1, 1], [1, 1, 1, 1]), cell([0, 1, 1, 1], [1, 1, 1, 1])]
    cells = [cell([1, 0, 1, 1], [1, 1, 1, 0], 40.0), cell([1, 1, 1, None], [1, 1, 1, 0], 60.0)]
    found = table.row(cells, none)
    assert found["completion_tokens"] == 50.0 and found["prompt_tokens"] == 100.0
    assert found["sampled"]["success"] == pytest.approx(6 / 7)  # what is not known counts in nothing
    assert found["sampled"]["gain"] == pytest.approx(2 / 7) and found["greedy"]["gain"] == -0.25
    assert found["greedy"]["by_seed"] == [0.75, 0.75]
    # Gains of -1 at one task of four: drawing four tasks anew gives 0 with 0.75^4 = 32%, -0.75 or less with 5.1%.
    assert found["greedy"]["interval"] == [-0.75, 0.0]
    assert table.row(none, none)["sampled"]["interval"] == [0.0, 0.0]
    text = table.markdown({"base": {"none": table.row(none, none), "parallel:1": found}}).splitlines()
    assert text[2] == "| base | none | 0 | 0.625 |  | 1.000 |  |"
    assert text[3].startswith("| base | parallel:1 | 50 | 0.857 | +0.286 (")


def test_a_memory_of_the_reference_holds_the_calls_of_the_first_turn():
    for task in tiny.tasks("heldout", 20, 0):
        own = [json.loads(line) for line in table.reference_memory(task).text.splitlines()]
        known = [{"name": call.name, "arguments": call.arguments} for call, _ in task.reference]
        assert own == known[: len(own)] and (len(task.user_turns) > 1 or len(own) == len(known))
        wrong = [json.loads(line) for line in table.reference_memory(task, wrong=True).text.splitlines()]
        assert (wrong != own) == bool(own) and bool(wrong) == bool(own)


def test_cells_are_kept_and_computed_anew_only_where_something_changed(tmp_path, monkeypatch):
    measured = []

    def measure(subject, name, chosen, tasks, seed):
        measured.append((name, len(tasks), seed))
        return {"settings": dataclasses.asdict(chosen), "seconds": 1.0, **cell([1.0] * len(tasks), [0.0] * len(tasks))}

    monkeypatch.setattr(table, "measure", measure)
    monkeypatch.setattr(table, "load", lambda folder: None)
    folder = table.hf.resolve(table.model_path("asset:tiny_base"))
    names, tasks = table.conditions((1,)), table.tasks_of(3, 0)
    first = table.cells_of("base", 0, folder, names, tasks, tmp_path)
    assert len(measured) == len(names) and table.cells_of("base", 0, folder, names, tasks, tmp_path) == first
    assert len(measured) == len(names)
    changed = {**names, "none": table.settings("none", temperature=0.5)}
    table.cells_of("base", 0, folder, changed, tasks, tmp_path)
    assert measured[len(names) :] == [("none", 3, 0)]
    table.cells_of("base", 1, folder, {"none": names["none"]}, tasks, tmp_path)
    table.cells_of("base", 1, folder, {"none": names["none"]}, table.tasks_of(4, 0), tmp_path)
    assert measured[len(names) + 1 :] == [("none", 3, 1), ("none", 4, 1)]


def test_a_real_run_with_the_same_memory_is_not_played_twice(monkeypatch):
    played = []

    def success(sampler, params, tasks, *, temperature, **others):
        played.append((temperature, [(task.task_id, task.note) for task in tasks]))
        return evaluate.Success(1.0, 1.0, np.arange(len(tasks), dtype=float), {}, ())

    monkeypatch.setattr(evaluate, "success", success)
    sampler = ScriptedSampler(lambda prompt, key_ids: "done")
    subject = table.Subject(Player(sampler, "params"), scripted.prompts(), None)
    tasks = [scripted.task(task_id=name) for name in "abc"]
    assert subject.solved(tasks, 1.0, 0) == [0.0, 1.0, 2.0]
    noted = [tasks[0], rehearsal.with_memory(tasks[1], "note", table.settings("none")), tasks[2]]
    assert subject.solved(noted, 1.0, 0) == [0.0, 0.0, 2.0] and subject.solved(noted, 1.0, 0) == [0.0, 0.0, 2.0]
    assert played == [(1.0, [("a", ""), ("b", ""), ("c", "")]), (1.0, [("b", "note")])]
    subject.solved(noted, 0.0, 0)
    assert len(played[-1][1]) == 3


def test_the_figure_is_drawn(tmp_path):
    none = [cell([0, 1], [1, 1])]
    names = table.conditions((1, 2))
    by_name = {name: table.row([cell([1, 1], [1, 0], 10.0 * n)], none) for n, name in enumerate(names)}
    table.draw({"base": by_name, "trained": by_name}, (1, 2), tmp_path / "gain.png")
    assert (tmp_path / "gain.png").read_bytes()[:4] == b"\x89PNG"


def test_a_work_folder_stands_for_its_model(tmp_path):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    assert table.model_folder(str(tmp_path / "run")) == tmp_path / "run" / "model"
    assert Memory("").attempts == ()


@pytest.mark.slow
def test_a_real_policy_is_measured_and_calls_nothing_before_its_real_run():
    subject = table.load(table.hf.resolve(table.model_path("asset:tiny_base")))
    tasks = tiny.tasks("heldout", 6, 0)
    cells = {}
    for name in ("none", "parallel:1", "parallel:2"):
        cells[name] = table.measure(subject, name, table.conditions((1, 2))[name], tasks, 0)
    assert {cell["real_calls_before_the_commit"] for cell in cells.values()} == {0}
    assert 0 == cells["none"]["completion_tokens"] < cells["parallel:1"]["completion_tokens"]
    assert cells["parallel:2"]["no_memory"] == 0 and cells["parallel:2"]["cached_tokens"] > 0
    assert all(value in (0.0, 1.0) for cell in cells.values() for name in table.MEASURES for value in cell[name])
    # The same attempts and memories without the others beside them and at once.
    fresh = dataclasses.replace(subject, rehearsed={}, outcomes={})
    alone = fresh.memories(table.settings("parallel", 2), tasks[:1], 0)[0]
    together = subject.rehearsed["parallel"][0]
    assert alone.text == together.text and alone.completion_tokens == together.completion_tokens
    assert [a.messages for a in alone.attempts] == [a.messages for a in together.attempts]


def test_tasks_are_the_first_of_those_with_so_many_turns():
    all_, one = table.tasks_of(5, 0), table.tasks_of(5, 1)
    assert all_ == tiny.tasks("heldout", 5, 0) and len(one) == 5 and {len(task.user_turns) for task in one} == {1}
    assert one == [task for task in tiny.tasks("heldout", 40, 0) if len(task.user_turns) == 1][:5]
