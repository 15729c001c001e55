"""The fidelity reward: results compared by hand, prompts that do not hold what is asked for, groups of their own."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scripted
from train_helpers import tiny_config

from envace_jax import config as configuration
from envace_jax import envs, fidelity, inputs, learning, train
from envace_jax.chat import render_call
from envace_jax.envs import tiny
from envace_jax.evaluate import calls_of
from envace_jax.fidelity import can_be_held_out, hold_out, matches, rehearse, similarity
from envace_jax.rewards.checklist import ChecklistReward
from envace_jax.sampling import Sample
from envace_jax.sharding import make_mesh
from envace_jax.types import Role, ToolCall

PROMPTS = scripted.prompts()


@functools.cache
def tasks():
    return tuple(tiny.tasks("train", 30, 0))


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [
        ({"a": 1, "b": [2, 3]}, {"b": [2.0, 3], "a": 1.0}, 1.0),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, 1 / 2),
        ({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2}, 2 / 3),  # more than was recorded is not right either
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 5}, "d": None}, 1 / 3),
        ([1, 2, 3], [1, 3, 2], 1 / 3),
        ({"a": 1}, {"a": True}, 0.0),
        ({"a": []}, {"a": {}}, 0.0),
        ({"0": 1}, [1], 0.0),
        ({"a": [], "b": 1}, {"a": [], "b": 2}, 1 / 2),
    ],
)
def test_similarity_by_hand(one, other, share):
    assert similarity(one, other) == similarity(other, one) == pytest.approx(share)
    for threshold in (0.25, 0.5, 0.6, 1.0):
        assert matches(json.dumps(one), json.dumps(other), threshold) is (share >= threshold)


def test_what_is_no_json_matches_itself_alone():
    assert matches("Error: no", "Error: no", 0.1) and not matches("Error: no", "Error: yes", 0.1)
    assert not matches('{"a": 1}', "Error: no", 0.1)
    deep = "[" * 5000 + "]" * 5000
    assert not matches(deep, '{"a": 1}', 0.5)


def test_what_can_be_held_out():
    calls = [ToolCall("balance", {"owner": name}) for name in "abcd"]
    results = ['{"balance": 5}', "Error: closed", '{"error_tool_call": {"code": "unknown_tool"}}', "{}"]
    said = [{"role": "user", "content": "go"}]
    for call, result in zip(calls, results, strict=True):
        said.append({"role": "assistant", "content": "", "tool_calls": [dataclasses.asdict(call)]})
        said.append({"role": "tool", "name": call.name, "content": result})
    task = scripted.task(reference=tuple(zip(calls, results, strict=True)), conversation=tuple(said))
    assert can_be_held_out(task) == [0]
    assert can_be_held_out(dataclasses.replace(task, conversation=())) == []  # nothing says where it was called
    assert can_be_held_out(dataclasses.replace(task, reference=task.reference[::-1])) == []
    assert all(can_be_held_out(task) == list(range(len(task.reference))) for task in tasks() if task.reference)


def test_a_prompt_holds_the_other_examples_and_not_the_one_asked_for():
    others = 0
    for step in range(30):
        for held in hold_out(tasks(), PROMPTS, count=3, seed=0, step=step):
            task = next(task for task in tasks() if task.task_id == held.task_id)
            text = PROMPTS.chat.decode(held.prompt_tokens.tolist())
            examples = text[text.find("EXAMPLES") : text.find("CALL\n")] if "EXAMPLES" in text else ""
            asked, result = task.reference[held.place]
            assert result == held.result and render_call(asked) in text[text.find("CALL\n") :]
            for call, known in task.reference:
                shown = f"{render_call(call)} => {known}" in examples
                assert shown is (call != asked)
            others += len(task.reference) > 1
    assert others > 20


def test_the_same_call_twice_is_left_out_twice():
    call, other = ToolCall("balance", {"owner": "ann"}), ToolCall("balance", {"owner": "bob"})
    reference = ((call, '{"balance": 5}'), (other, '{"balance": 7}'), (call, '{"balance": 5}'))
    said = [{"role": "user", "content": "go"}]
    for known, result in reference:
        said.append({"role": "assistant", "content": "", "tool_calls": [dataclasses.asdict(known)]})
        said.append({"role": "tool", "name": known.name, "content": result})
    task = scripted.task(reference=reference, conversation=tuple(said))
    item = calls_of(task, task.conversation, PROMPTS)[0]
    assert fidelity.other_examples(item) == (reference[1],)
    assert item.messages == tuple(said[:1]) and item.result == '{"balance": 5}'


def test_no_examples_are_shown_where_the_run_shows_none():
    prompts = scripted.prompts(reference_examples=False)
    for held in hold_out(tasks(), prompts, count=10, seed=0, step=0):
        assert "EXAMPLES" not in prompts.chat.decode(held.prompt_tokens.tolist())


def test_calls_are_drawn_by_seed_and_step_from_different_tasks():
    def drawn(seed, step):
        return [(held.task_id, held.place) for held in hold_out(tasks(), PROMPTS, count=8, seed=seed, step=step)]

    assert drawn(0, 4) == drawn(0, 4)
    assert drawn(0, 4) != drawn(0, 5) and drawn(0, 4) != drawn(1, 4)
    assert len({task_id for task_id, _ in drawn(0, 4)}) == 8
    places = {place for step in range(20) for _, place in drawn(0, step)}
    assert places >= {0, 1, 2}
    everything = {pair for step in range(100) for pair in drawn(0, step)}
    assert len(everything) > 0.95 * sum(len(task.reference) for task in tasks())


def test_a_call_whose_prompt_does_not_fit_is_left_out():
    assert hold_out(tasks(), scripted.prompts(max_rehearse_prompt=10), count=8, seed=0, step=0) == ()


class Sampler:
    """Gives each request the text that a function of its number says."""

    def __init__(self, answer):
        self.answer, self.requests, self.waiting = answer, [], []

    def reset(self):
        self.waiting = []

    def free(self):
        return 3 - len(self.waiting)

    def submit(self, requests):
        self.waiting += requests
        self.requests += requests

    def step(self, params):
        request = self.waiting.pop()  # the newest first: results come in any order
        tokens = np.array(scripted.spelled(self.answer(request.request_id)), np.int32)
        return [Sample(request.request_id, tokens, np.full(len(tokens), -0.5, np.float32), "stop")]


def test_rehearsals_are_rewarded_in_groups_of_their_own():
    held = hold_out(tasks(), PROMPTS, count=3, seed=0, step=7)
    right = [scripted.answering(item.result) for item in held]
    wrong = scripted.answering('{"nothing": "alike"}')
    answers = [right[0], wrong, right[1], "no tags at all", right[1], held[2].result]  # two attempts at each
    sampler = Sampler(answers.__getitem__)
    found = rehearse(
        sampler, None, held, prompts=PROMPTS, attempts=2, threshold=1.0, max_tokens=50, temperature=0.7, top_p=0.9,
        seed=11, step=7, first_group=-22,
    )  # fmt: skip
    assert [t.reward for t in found] == [1, 0, 1, 0, float(held[1].result == held[2].result), 0]
    assert [t.group_id for t in found] == [-22, -22, -23, -23, -24, -24] and [t.attempt for t in found] == [0, 1] * 3
    for number, trajectory in enumerate(found):
        (segment,) = trajectory.segments
        assert segment.role is Role.REHEARSE and trajectory.status == "ok" and trajectory.reason == "fidelity"
        assert segment.tokens.tolist() == scripted.spelled(answers[number]) and segment.policy_version == 7
        np.testing.assert_array_equal(segment.prompt_tokens, held[number // 2].prompt_tokens)
    keys = {request.key_ids for request in sampler.requests}
    assert len(keys) == 6 and {key[:2] for key in keys} == {(11, 7)}
    assert not {key[2] for key in keys} & {zlib.crc32(t.task_id.encode()) & 0x7FFFFFFF for t in tasks()}
    assert {(r.max_tokens, r.temperature, r.top_p) for r in sampler.requests} == {(50, 0.7, 0.9)}
    stats = fidelity.metrics(found)
    tokens = sum(len(scripted.spelled(text)) for text in answers)
    assert stats == {"fidelity_reward": 2 / 6, "fidelity_calls": 3, "fidelity_samples": 6, "fidelity_tokens": tokens}
    assert np.isnan(fidelity.metrics([])["fidelity_reward"])


def test_a_step_trains_them_beside_the_tasks_and_mixes_no_baseline(monkeypatch):
    """The tasks' trajectories and advantages are those of a step without them; no environment is asked."""
    batches, make_batch = [], learning.make_batch

    def watched(trajectories, advantages, **options):
        batches.append((list(trajectories), [values.copy() for values in advantages]))
        return make_batch(trajectories, advantages, **options)

    monkeypatch.setattr(learning, "make_batch", watched)
    count = itertools.count()
    monkeypatch.setattr(
        fidelity, "matches", lambda *_: next(count) % 3 == 0
    )  # the policy might be all right or all wrong
    metrics, before = [], envs.execution_count()
    changes = {"fidelity.calls_per_step": 3, "fidelity.weight": 0.5, "batch.row_buckets": (40,)}
    setup, state = train.build(tiny_config(**changes), make_mesh())
    for calls in (0, 3):
        chosen = dataclasses.replace(setup.config.fidelity, calls_per_step=calls)
        config = dataclasses.replace(setup.config, fidelity=chosen)
        state_now = jax.tree.map(jnp.copy, state)  # the step takes it over
        _, found, trajectories = train.iterate(dataclasses.replace(setup, config=config), state_now, 2)
        metrics.append(found)
        assert len(trajectories) == 8
    assert envs.execution_count() == before
    (alone, values_alone), (both, values_both) = batches
    assert len(alone) == 8 and len(both) == 8 + 3 * 4
    for one, other in zip(alone, both, strict=False):
        assert [s.tokens.tolist() for s in one.segments] == [s.tokens.tolist() for s in other.segments]
    for one, other in zip(values_alone, values_both, strict=False):
        np.testing.assert_array_equal(one, other)
    rehearsed, values = both[8:], np.concatenate(values_both[8:])
    rewards = np.array([t.reward for t in rehearsed]).reshape(3, 4)
    np.testing.assert_allclose(values.reshape(3, 4), 0.5 * (rewards - rewards.mean(axis=1, keepdims=True)), atol=1e-7)
    assert np.abs(values).max() > 0.1 and len({t.group_id for t in both}) == 2 + 3
    one, other = metrics
    tokens = sum(len(t.segments[0].tokens) for t in rehearsed)
    assert other["fidelity_tokens"] == tokens > 0 and other["fidelity_reward"] == pytest.approx(rewards.mean())
    assert other["tokens_rehearse"] == one["tokens_rehearse"] + tokens
    assert other["sampled_tokens"] == other["tokens"] == one["tokens"] + tokens
    for name in ("reward", "segments", "advantage_abs_act", "segments_rehearse", "groups_rehearse", "tokens_act"):
        assert other[name] == one[name], name
    assert not any(name.startswith("fidelity") for name in one)


def test_tasks_without_calls_to_hold_out_are_refused_before_a_model_is_loaded(monkeypatch):
    config = tiny_config(**{"fidelity.calls_per_step": 4, "model.path": "no such model"})

    def without(split, count, seed, known=tiny.tasks):
        return [
            dataclasses.replace(task, conversation=()) if split == "train" else task
            for task in known(split, count, seed)
        ]

    monkeypatch.setattr(inputs.tiny, "tasks", without)
    with pytest.raises(configuration.ConfigError, match=r"fidelity.calls_per_step: 4 needs .*; 0 of the 40 tasks"):
        inputs.read_inputs(config, ChecklistReward())
