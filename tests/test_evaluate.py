"""What evaluations compare: states, calls and results as JSON values. Whole evaluations are run in test_train.py."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scripted

from envace_jax import evaluate
from envace_jax.sampling import Sample
from envace_jax.types import ToolCall, Trajectory

# Two values that only Python calls equal, and one value written in two ways.
UNLIKE = {"ok": 1, "in": [[0]]}, {"ok": True, "in": [[False]]}
ALIKE = {"n": 1, "in": [[2.0]]}, {"in": [[2]], "n": 1.0}


def test_states_are_compared_as_json_values():
    done = Trajectory("t", 0, 0, (), 1.0, "ok", "done")
    assert not evaluate.is_solved(done, *UNLIKE) and evaluate.is_solved(done, *ALIKE)


@pytest.mark.parametrize(
    ("called", "known", "told", "recorded", "share"),
    [
        ({}, {}, UNLIKE[0], UNLIKE[1], 0.0),
        ({}, {}, ALIKE[0], ALIKE[1], 1.0),
        (ALIKE[0], ALIKE[1], [1], [1.0], 1.0),
        (UNLIKE[0], UNLIKE[1], [1], [1], None),  # the reference does not make this call
    ],
)
def test_agreement_compares_calls_and_results_as_json_values(called, known, told, recorded, share):
    reference = ((ToolCall("f", known), json.dumps(recorded)),)
    task = scripted.task(reference=reference)
    asked = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": called}]}
    messages = (asked, {"role": "tool", "name": "f", "content": json.dumps(told)})
    found = evaluate.agreement([Trajectory(task.task_id, 0, 0, (), 1.0, "ok", "done", messages)], {task.task_id: task})
    assert found == share if share is not None else np.isnan(found)


def test_fidelity_compares_as_json_values():
    """A sampler that rehearses the same result for every call; the recorded ones differ."""
    answer = np.array(scripted.spelled(scripted.answering(json.dumps(UNLIKE[0]))), np.int32)

    class Sampler:
        def reset(self):
            self.waiting = []

        def free(self):
            return 4

        def submit(self, requests):
            self.waiting += requests

        def step(self, params):
            waiting, self.waiting = self.waiting, []
            return [
                Sample(request.request_id, answer, np.zeros(len(answer), np.float32), "stop") for request in waiting
            ]

    recorded = [json.dumps(UNLIKE[0]), json.dumps(UNLIKE[1]), '{"in": [[0.0]], "ok": 1.0}', "Error: no", "[" * 9999]
    call = ToolCall("balance", {"owner": "ann"})
    calls = [evaluate.RehearsedCall(scripted.task(), (), "", call, result) for result in recorded]
    found = evaluate.fidelity(
        Sampler(), None, calls, prompts=scripted.prompts(), max_tokens=99, temperature=0.0, seed=0,
        reference_examples=False,
    )  # fmt: skip
    assert found == 2 / 5
