"""A judge in this process: its questions share slots with segments or have a sampler, and are never trained."""

from __future__ import annotations

import json
import re

import jax
import numpy as np
import pytest
import scripted
import simulator
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout import ScriptedSampler, bank_script, content, play
from train_helpers import judged, tiny_config

from envace_jax import config as configuration
from envace_jax import train
from envace_jax.config import RewardConfig
from envace_jax.data import write_tasks
from envace_jax.envs import tiny
from envace_jax.local_model import LocalModel
from envace_jax.metrics import read_json_lines
from envace_jax.rewards import choose, judge
from envace_jax.rewards.judge import JudgedReward
from envace_jax.sharding import make_mesh

CHAT = scripted.tiny_chat()


def is_judged(prompt: str) -> bool:
    return "You judge one turn" in prompt


def verdicts(prompt: str) -> str:
    """One item a turn, which holds in two of three turns; a hash of what the judge is asked decides."""
    steps, items = map(int, re.search(r"Give (\d+) lists of (\d+)", prompt).groups())
    user = prompt.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    return json.dumps({"verdicts": [[simulator.drawn(user) % 3 > 0] * items] * steps})


def judging(script=verdicts):
    """The bank's script for a sampler that also gets a judge's questions."""
    return lambda prompt, key_ids: (script if is_judged(prompt) else bank_script)(prompt, key_ids)


def judging_verdicts(prompt: str, key_ids) -> str:
    return verdicts(prompt)


class OwnSampler(ScriptedSampler):
    """The judge's own: it has other parameters."""

    def step(self, params):
        assert params == "judge"
        return super().step("params")


def local(sampler=None, **changes) -> LocalModel:
    model = LocalModel(seed=5, **({"retries": 2} | changes))
    model.bind(CHAT, max_length=50_000, thinking=False, sampler=sampler, params=None if sampler is None else "judge")
    return model


def judged_play(model: LocalModel, script, cache=None, **changes):
    reward = JudgedReward(model.ask, name="m", options={"max_tokens": 300}, model=model, cache=cache)
    return play(sampler=ScriptedSampler(script, **changes), reward=reward)


class Immediate:
    """The same verdicts from outside, at once."""

    def ask(self, messages, read, **options):
        return scripted.finished(read(verdicts("<|im_start|>user\n" + messages[1]["content"] + "<|im_end|>")))


REFERENCE = [
    (content(t), t.reward) for t in play(reward=JudgedReward(Immediate().ask, name="m"))
]  # what the same judge makes of it from outside


@settings(max_examples=20, deadline=None)
@given(slots=st.integers(1, 9), chunk=st.integers(1, 200), own=st.one_of(st.none(), st.integers(1, 5)))
def test_judged_here_or_outside_is_the_same_whatever_the_slots(slots, chunk, own):
    sampler = None if own is None else OwnSampler(judging_verdicts, slots=own, chunk=70)
    model = local(sampler)
    script = bank_script if own is not None else judging(judging_verdicts)
    trajectories = judged_play(model, script, slots=slots, chunk=chunk)
    assert [(content(t), t.reward) for t in trajectories] == REFERENCE
    assert {reward for _, reward in REFERENCE} > {0.0}  # some turns pass and some do not
    assert not model.busy and model.counts["answers"] == model.counts["tries"] > 0
    for trajectory in trajectories:
        assert not any(is_judged(CHAT.decode(segment.prompt_tokens.tolist())) for segment in trajectory.segments)


def asked_of(model_script, **changes):
    """(prompt, request) of every judge's question of a rollout, and its trajectories."""
    model, asked = local(**changes), []

    def script(prompt, key_ids):
        if not is_judged(prompt):
            return bank_script(prompt, key_ids)
        asked.append((prompt, key_ids))
        return model_script(prompt, key_ids)

    return judged_play(model, script), asked, model


def test_what_is_asked_is_what_an_address_would_be_asked():
    _, asked, _ = asked_of(judging_verdicts)
    prompt = asked[0][0]
    assert prompt.startswith("<|im_start|>system\n" + judge.INSTRUCTIONS)
    assert 'The answer fits this JSON schema: {"type": "object", "properties": {"verdicts"' in prompt
    assert "# Items (1)" in prompt and prompt.endswith("<think>\n\n</think>\n\n")


def test_the_question_and_the_try_decide_the_random_numbers_and_nothing_else():
    _, asked, _ = asked_of(lambda prompt, key_ids: verdicts(prompt) if key_ids[-1] == 1 else "hm")
    keys = {}
    for prompt, key in asked:
        keys.setdefault(prompt, set()).add(tuple(key))
    assert all({key[-1] for key in found} == {0, 1} and len(found) == 2 for found in keys.values())
    assert len({key[2] for found in keys.values() for key in found}) == len(keys) > 3
    assert {key[:2] for found in keys.values() for key in found} == {(5, -3)}
    again = asked_of(lambda prompt, key_ids: verdicts(prompt) if key_ids[-1] == 1 else "hm")[1]
    assert sorted(again) == sorted(asked)


def test_an_unreadable_verdict_is_asked_for_again_and_then_masks():
    def bad(prompt, key_ids):
        return "all true" if simulator.drawn(prompt) % 2 else verdicts(prompt)

    trajectories, asked, model = asked_of(bad)
    failed = [t for t in trajectories if t.status == "failed"]
    assert 0 < len(failed) < len(trajectories) and all("RewardUnavailable" in t.reason for t in failed)
    assert model.counts["given_up"] == len(failed) and model.counts["fault_answer"] == 3 * len(failed)
    assert model.counts["tries"] == len(asked) == model.counts["answers"] + 3 * len(failed)
    assert model.counts["completion_tokens"] > 0 and model.counts["prompt_tokens"] > 0
    for trajectory, (_, reward) in zip(trajectories, REFERENCE, strict=True):
        assert trajectory.status == "failed" or trajectory.reward == reward


def test_an_answer_that_was_cut_and_a_question_without_room_are_faults():
    _, _, model = asked_of(lambda prompt, key_ids: "<think>" + "hm " * 400 + "</think>" + verdicts(prompt), retries=0)
    assert model.counts["fault_answer"] == model.counts["given_up"] > 0 and model.counts["answers"] == 0
    short = LocalModel()
    short.bind(CHAT, max_length=200, thinking=False)
    trajectories = judged_play(short, bank_script)
    assert {t.status for t in trajectories} == {"failed"} and short.counts["tries"] == 0
    assert re.search(r"a question of \d+ tokens; sampler.max_length=200", trajectories[0].reason)


def test_verdicts_of_a_checkpoint_are_kept_and_those_of_the_policy_are_not(tmp_path):
    model = local()
    first = judged_play(model, judging(judging_verdicts), cache=tmp_path / "v.jsonl")
    again = judged_play(local(), bank_script, cache=tmp_path / "v.jsonl")  # a script that can judge nothing
    assert [(content(t), t.reward) for t in again] == [(content(t), t.reward) for t in first]
    for checkpoint in ("policy", "asset:tiny_base"):
        settings_ = RewardConfig(kind="judge", checkpoint=checkpoint, keep_verdicts=True)
        with choose.chosen(settings_, tmp_path / checkpoint) as reward:
            assert isinstance(reward.model, LocalModel) and (reward._cache is None) == (checkpoint == "policy")
    with pytest.raises((FileNotFoundError, configuration.ConfigError)):
        with choose.chosen(RewardConfig(kind="judge", checkpoint=str(tmp_path / "none")), tmp_path):
            pass


@pytest.mark.slow
def test_the_policy_and_its_own_checkpoint_judge_alike(tmp_path, monkeypatch):
    """Two runs on the shipped base at learning rate 0, where both are one model: the same verdicts, metrics and tokens.

    The base cannot write verdicts, so whatever it writes is read as some.
    """
    monkeypatch.setattr(
        judge, "read_verdicts", lambda text, steps, items: ((simulator.drawn(text) % 3 > 0,) * items,) * steps
    )
    write_tasks(tmp_path / "judged.jsonl", [judged(task) for task in tiny.tasks("train", 4, 0)])
    none = {"evaluation.heldout_tasks": 0, "evaluation.unseen_tasks": 0, "evaluation.fidelity_calls": 0, "steps": 2}
    room = {"sampler.max_length": 2560, "sampler.cache_lengths": (2560,), "sampler.prefill_lengths": (512,)}
    data = {"data.source": str(tmp_path / "judged.jsonl"), "data.count": 0, "optimizer.learning_rate": 0.0}
    asked = {"reward.kind": "judge", "reward.max_tokens": 8, "warm_up": False, "sampler.cache_rows": 4}
    asked |= {"data.tasks_per_step": 1, "data.attempts": 2, "sampler.slots": 4, "sampler.prefill_rows": (1,)}
    found = {}
    for checkpoint in ("policy", "asset:tiny_base"):
        config = tiny_config(**none, **room, **data, **asked, **{"reward.checkpoint": checkpoint})
        folder = tmp_path / checkpoint.replace(":", "_")
        train.run(config, make_mesh(), folder)
        lines = read_json_lines(folder / "metrics.jsonl")
        names = ("reward", "masked", "tokens", "loss", "judge_fault_answer")
        trajectories = read_json_lines(folder / "trajectories.jsonl")
        found[checkpoint] = (
            [[line.get(name) for name in names] for line in lines],
            [(t["reward"], t["turns"], [s["tokens"] for s in t["segments"]]) for t in trajectories],
        )
        assert lines[-1]["judge_tries"] > 0 and lines[-1]["judge_prompt_tokens"] > 100
    assert jax.tree.all(jax.tree.map(np.array_equal, *found.values()))
    assert not (tmp_path / "policy" / choose.VERDICTS_FILE).exists()
