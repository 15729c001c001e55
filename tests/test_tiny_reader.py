"""experiments/make_tiny_reader.py: its notes are laid out as rehearsal's, err at the stated rate, and are worth it."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random

import make_tiny_base as base
import make_tiny_reader as reader
import pytest

from envace_jax import memory, roles
from envace_jax.chat import load_tokenizer
from envace_jax.config import model_path
from envace_jax.envs import tiny
from envace_jax.models import hf
from envace_jax.types import Role, Task, Trajectory

PROMPTS = roles.Prompts(load_tokenizer(hf.resolve(model_path(reader.SHIPPED))), style="compact", thinking=False)
TASKS = tiny.tasks("pretrain", 200, 0)
WORTH = dataclasses.replace(reader.PHASES[-1], turns=3, later_error=0.0, follow=0.5, later_follow=0.5)


def turn_of(task: Task, number: int = 0) -> list:
    return [m for m in tiny.turn_messages(tiny.conversation(task))[number] if m.get("tool_calls")]


def test_a_right_note_is_what_rehearsal_would_remember_of_the_right_course():
    for task in TASKS[:40]:
        (first, *_) = tiny.turn_messages(tiny.conversation(task))
        said = ({"role": "user", "content": task.user_turns[0]}, *first)
        attempt = Trajectory(task.task_id, 0, 0, (), 1.0, "ok", "done", messages=said)
        note = reader.note_text(reader.noted_steps(task, random.Random(0), 0.0))
        assert note == memory.transcript(task, [attempt], PROMPTS)
        assert bool(note) == bool(turn_of(task))


def test_notes_err_at_the_stated_rate_and_stay_notes():
    rng, wrong, steps = random.Random(1), 0, 0
    for task in TASKS:
        right = turn_of(task)[:1]
        told = reader.noted_steps(task, rng, 0.3)
        steps += len(right)
        wrong += told[:1] != right
        assert len(told) <= len(turn_of(task)) and all(step["tool_calls"] for step in told)
    assert wrong / steps == pytest.approx(0.3, abs=0.1)


def test_later_messages_of_a_note_err_at_a_rate_of_their_own():
    rng, wrong, steps = random.Random(1), 0, 0
    for task in (task for task in TASKS * 5 if len(turn_of(task)) > 1):
        told = reader.noted_steps(task, rng, 0.0, 0.6)
        steps += 1
        wrong += told[1:2] != turn_of(task)[1:2]
        assert told[0] == turn_of(task)[0]
    assert steps > 50 and wrong / steps == pytest.approx(0.6, abs=0.1)


def walks(noted_right: bool, count: int = 300, **changes) -> collections.Counter:
    """How first messages of demonstrations with a right or a wrong note went."""
    rng, found = random.Random(2), collections.Counter()
    phase = dataclasses.replace(WORTH, **changes)
    for task in (task for task in TASKS * 9 if turn_of(task)):
        noted = reader.noted_steps(task, rng, 0.0 if noted_right else 1.0)
        if not noted:  # it says that nothing is to be called
            continue
        (did,) = [m for m in reader.walked_steps(task, noted, rng, phase) if m["role"] == "assistant"][:1]
        calls = did.get("tool_calls")
        right, told = turn_of(task)[0]["tool_calls"], noted[0]["tool_calls"]
        found["right" if calls == right else "as the note" if calls == told else "other"] += 1
        if sum(found.values()) == count:
            break
    return found


def test_a_right_note_spares_mistakes_and_a_wrong_one_makes_some():
    assert walks(True)["right"] == 300
    wrong = walks(False, follow=0.5)
    assert wrong["other"] == 0 and 0.3 < wrong["as the note"] / 300 < 0.65
    assert walks(False, follow=0.0, act_error=0.0)["right"] == 300
    assert walks(False, follow=1.0)["as the note"] == 300


def test_later_messages_are_followed_at_a_rate_of_their_own():
    phase = dataclasses.replace(WORTH, follow=1.0, later_follow=0.0, act_error=0.0)
    rng, seen = random.Random(5), 0
    for task in (task for task in TASKS if len(turn_of(task)) > 1):
        noted = reader.noted_steps(task, rng, 1.0, 1.0)
        if len(noted) < 2 or noted[1] == turn_of(task)[1]:
            continue
        seen += 1
        said = [m for m in reader.walked_steps(task, noted, rng, phase) if m["role"] == "assistant"]
        assert said[0]["tool_calls"] == noted[0]["tool_calls"]
        assert said[1].get("tool_calls") == turn_of(task)[1]["tool_calls"]
    assert seen > 20


def test_without_a_note_the_demonstrator_errs_at_its_own_rate():
    rng, wrong = random.Random(3), 0
    known = [task for task in TASKS if turn_of(task)]
    for task in known:
        walked = reader.walked_steps(task, [], rng, dataclasses.replace(WORTH, act_error=0.3))
        wrong += walked[1] != tiny.conversation(task)[1]
        assert [m["content"] for m in walked if m["role"] == "user"] == list(task.user_turns)
    assert wrong / len(known) == pytest.approx(0.3, abs=0.1)
    right = reader.walked_steps(known[0], [], rng, dataclasses.replace(WORTH, act_error=0.0))
    assert right == [m for m in tiny.conversation(known[0]) if m["role"] != "tool"]
    (several, *_) = [task for task in known if len(task.user_turns) > 1]
    one = reader.walked_steps(several, [], rng, dataclasses.replace(WORTH, act_error=0.0, turns=1))
    assert [m["content"] for m in one if m["role"] == "user"] == list(several.user_turns[:1])
    assert len(one) == len([m for m in tiny.turn_messages(tiny.conversation(several))[0] if m["role"] != "tool"]) + 1


def test_notes_stand_in_both_places_of_act_prompts_alone():
    rng, places = random.Random(4), collections.Counter()
    phase = dataclasses.replace(WORTH, note_share=0.7, note_error=0.0, rehearsed_share=1.0)
    for task in TASKS[:120]:
        note = reader.note_text(turn_of(task))
        for segment in reader.demonstration(PROMPTS, task, rng, phase).segments:
            prompt = PROMPTS.chat.decode(segment.prompt_tokens.tolist())
            assert len(segment.prompt_tokens) + len(segment.tokens) <= reader.ROW_LENGTH
            if segment.role == Role.REHEARSE or not note:
                assert not note or f"\n\n{note}" not in prompt
                continue
            places["user" if f"{task.user_turns[0]}\n\n{note}<|im_end|>" in prompt else
                   "system" if prompt.startswith(f"<|im_start|>system\n{note}\n\n") else "none"] += 1  # fmt: skip
    share = {place: count / places.total() for place, count in places.items()}
    assert share == {place: pytest.approx(value, abs=0.12) for place, value in
                     {"user": 0.35, "system": 0.35, "none": 0.3}.items()}  # fmt: skip


def test_no_batch_is_empty():
    """Rows come padded to a number for which a program is compiled; among few rows all could be empty."""
    found = itertools.islice(base.batches(PROMPTS, TASKS, 2, WORTH, reader.demonstration, 2, reader.ROW_LENGTH), 120)
    for batch in found:
        assert batch["tokens"].shape == (2, reader.ROW_LENGTH) and batch["loss_mask"].any()
