"""The tiny world as a benchmark: gold solves every case, other scripts none, and the command plays it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from envace_jax import benchmarks
from envace_jax.benchmarks import Options, command, tiny
from envace_jax.config import UserError
from envace_jax.envs import tiny as world
from envace_jax.evaluate import reference_state
from envace_jax.types import Trajectory


def run(out, *flags):
    code = command.run(["evaluate", "--benchmark=tiny", f"--out={out}", *flags])
    return code, json.loads((out / "results.json").read_text())


def test_the_cases_are_those_of_trainings_own_evaluation():
    suite = tiny.read(Options())
    heldout = [case.task for case in suite.cases if case.category == "heldout"]
    assert heldout == world.tasks("heldout", 256, 0) and len(suite.cases) == 320 and not suite.missing
    small = tiny.read(Options(subset="small", categories=("unseen",)))
    assert [case.task for case in small.cases] == world.tasks("unseen", 16, 0)
    assert small.missing == {"heldout": "not asked for"}
    with pytest.raises(UserError, match="there is no 'x'; there are: heldout, unseen"):
        tiny.read(Options(categories=("x",)))
    assert "tiny" in benchmarks.names() and benchmarks.is_suite(tiny)


@pytest.mark.parametrize(("policy", "score"), [("gold", 100.0), ("noop", 0.0), ("garbage", 0.0)])
def test_gold_solves_every_case_and_other_scripts_none(tmp_path, policy, score):
    code, found = run(tmp_path, f"--policy={policy}", "--subset=first:24")
    assert code == 0
    categories = found["results"]["categories"]
    assert {name: (own["score"], own["cases"]) for name, own in categories.items()} == {
        "heldout": (score, 24), "unseen": (score, 24),
    }  # fmt: skip


def test_a_wrong_state_or_an_unmet_item_solves_nothing():
    case = tiny.read(Options(subset="first:1")).cases[0]
    goal = reference_state(case.task)

    def score(state, reward):
        played = Trajectory(case.task.task_id, 0, 0, (), reward, "ok", "done")
        return tiny.outcome(case, played, state).result()

    assert score(goal, 1.0).score == 1.0 and score(goal, 0.9).score == 0.0
    assert score({**goal, "zed": 1}, 1.0).score == 0.0 and np.isclose(score(goal, 0.9).detail["reward"], 0.9)
