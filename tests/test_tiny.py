"""The tiny world: sound tasks, splits that share nothing, a fixed generator, and mistakes that stay plausible."""

from __future__ import annotations

import collections
import dataclasses
import json
import random
import statistics
import time

import pytest

from envace_jax.envs import load_domain, make_environment, tiny
from envace_jax.envs.imperfect import imperfect_result, imperfect_step
from envace_jax.rewards.checklist import ChecklistReward

COUNT = 400


@pytest.fixture(scope="module")
def splits():
    return {split: tiny.tasks(split, COUNT, seed=0) for split in tiny.SPLITS}


def calls_of(task):
    return len(task.reference)


def messages_with_calls(task):
    return [message for message in task.conversation if message.get("tool_calls")]


def test_every_task_is_sound(splits):
    for tasks in splits.values():
        tiny.validate(tasks)


def test_tasks_have_the_promised_size(splits):
    for tasks in splits.values():
        assert len({task.task_id for task in tasks}) == COUNT
        assert {calls_of(task) for task in tasks} == {2, 3, 4, 5}
        assert {len(task.user_turns) for task in tasks} == {1, 2, 3}
        assert 2.8 < statistics.mean(map(calls_of, tasks)) < 3.6
        assert 1.7 < statistics.mean(len(task.user_turns) for task in tasks) < 2.2


def test_tasks_hold_every_sort_of_turn(splits):
    """Parallel calls, turns without calls, domain errors, and calls that only some results call for."""
    for tasks in (splits["train"], splits["heldout"], splits["unseen"]):
        parallel = sum(any(len(m["tool_calls"]) > 1 for m in messages_with_calls(task)) for task in tasks)
        quiet = sum(any(item.check["kind"] == "no_call" for turn in task.checklist for item in turn) for task in tasks)
        errors = sum(any('"error"' in text for _, text in task.reference) for task in tasks)
        assert parallel > 0.2 * COUNT and quiet > 0.04 * COUNT and errors > 0.05 * COUNT


def test_the_result_decides_what_comes_next():
    """The same request ends in a transfer or in none, as the balance has it."""
    outcomes = collections.defaultdict(set)
    for task in tiny.tasks("train", 1500, seed=1):
        if task.environment["name"] != "accounts":
            continue
        for text, part in zip(task.user_turns, tiny.turn_messages(task.conversation), strict=True):
            if text.startswith("if ") and "at least" in text:
                called = [call["name"] for message in part for call in message.get("tool_calls", ())]
                outcomes["transfer" in called].add(part[-1]["content"].split()[0])
    assert outcomes == {True: {"done,"}, False: {"not"}}


def test_later_results_reflect_earlier_writes(splits):
    """In some tasks the same call gives different results at different times."""
    changed = 0
    for task in splits["train"]:
        results = collections.defaultdict(set)
        for call, text in task.reference:
            results[json.dumps([call.name, call.arguments])].add(text)
        changed += any(len(texts) > 1 for texts in results.values())
    assert changed >= 3


def test_train_and_pretrain_share_nothing_with_the_evaluation_splits():
    for taught, held in (("train", "heldout"), ("pretrain", "heldout"), ("pretrain", "unseen"), ("train", "unseen")):
        one = {task.user_turns for seed in range(2) for task in tiny.tasks(taught, 500, seed)}
        two = {task.user_turns for seed in range(2) for task in tiny.tasks(held, 150, seed)}
        assert len(one) > 900 and len(two) > 250
        assert not one & two
        assert not any(map(tiny.is_evaluation, one)) and all(map(tiny.is_evaluation, two))


def test_the_side_of_a_request_depends_on_its_texts_alone():
    share = sum(tiny.is_evaluation([f"request {number}"]) for number in range(4000)) / 4000
    assert 0.13 < share < 0.17
    assert tiny.is_evaluation(("a", "b")) == tiny.is_evaluation(["a", "b"])


def test_each_split_has_its_domains(splits):
    domains = {split: {task.environment["name"] for task in tasks} for split, tasks in splits.items()}
    assert domains["train"] == domains["heldout"] == {"accounts", "calendar", "shop"}
    assert domains["unseen"] == {"library"}
    assert domains["pretrain"] == {"accounts", "calendar", "library", "shop"}


def test_the_generator_is_seeded_and_prefixes_agree(splits):
    assert tiny.tasks("train", 50, seed=0) == splits["train"][:50]
    assert tiny.tasks("train", 50, seed=1) != splits["train"][:50]


def test_the_first_tasks_are_fixed(splits):
    """A base model is trained on these: they must not move with the Python version or a harmless edit."""
    assert {split: [task.task_id for task in tasks[:2]] for split, tasks in splits.items()} == FIRST_TASKS


FIRST_TASKS = {
    "train": ["calendar-61fb77322242e00f", "accounts-37cc5bee502da842"],
    "heldout": ["accounts-d56a692c88f5907e", "accounts-c950e59001b26261"],
    "unseen": ["library-23655bd515ce8625", "library-28938e185a4b3165"],
    "pretrain": ["calendar-5f5953dc594e1c1b", "library-0424e39317f8db49"],
}


def test_an_unknown_split_is_an_error():
    with pytest.raises(ValueError, match="no split is called 'test'; there are: train, heldout, unseen, pretrain"):
        tiny.tasks("test", 1, 0)


def test_generation_is_fast():
    start = time.process_time()
    tiny.tasks("pretrain", 1000, seed=9)
    assert time.process_time() - start < 3  # 50,000 within minutes even on a slow core; about 0.6 ms a task


def test_checklists_weigh_calls_results_and_reply(splits):
    for task in splits["train"]:
        for items in task.checklist:
            weights = collections.Counter()
            for item in items:
                weights[item.check["kind"]] += item.weight
            assert sum(weights.values()) == pytest.approx(1, abs=1e-9)
            usual, quiet = {"call": 0.4, "result": 0.2, "reply": 0.4}, {"no_call": 0.5, "reply": 0.5}
            assert weights == pytest.approx(quiet if "no_call" in weights else usual)
            required = any(item.required_for_next_turn for item in items)
            assert required == (len(task.user_turns) > 1)


def test_reply_values_come_from_results_or_the_request(splits):
    """Every number that a reply is checked for stands in the request, a call or a result before it."""
    for task in splits["pretrain"]:
        earlier = ""
        for text, items, part in zip(
            task.user_turns, task.checklist, tiny.turn_messages(task.conversation), strict=True
        ):
            earlier += text + " ".join(message["content"] for message in part if message["role"] == "tool")
            earlier += json.dumps([message.get("tool_calls") for message in part])
            (words,) = (item.check["words"] for item in items if item.check["kind"] == "reply")
            assert all(word in earlier for word in words if word.isdigit())


def gold_score(task):
    parts = tiny.turn_messages(task.conversation)
    return [ChecklistReward().score_turn(task, turn, part).result().reward for turn, part in enumerate(parts)]


def damaged(task, **changes):
    return dataclasses.replace(task, **changes)


def test_validate_names_the_task_that_is_not_sound(splits):
    task = next(task for task in splits["train"] if task.environment["name"] == "accounts" and calls_of(task) > 2)
    call, _ = task.reference[0]
    messages = list(task.conversation)
    silent = [{**m, "content": "hm."} if m["role"] == "assistant" and m["content"] else m for m in messages]
    told = [{**m, "content": '{"balance": 1}'} if m["role"] == "tool" else m for m in messages]
    quiet = {"check": {"kind": "no_call"}, "dependence": ()}
    free = tuple(tuple(dataclasses.replace(item, **quiet) for item in turn) for turn in task.checklist)
    cases = [
        (damaged(task, reference=((call, '{"balance": 1}'), *task.reference[1:])), "not what executing them gives"),
        (damaged(task, reference=task.reference[1:]), "not what executing them gives"),
        (damaged(task, environment={"name": "accounts", "state": {}}), "not what executing them gives"),
        (damaged(task, conversation=tuple(told)), "not what executing them gives"),
        (damaged(task, conversation=tuple(silent)), "the gold solution scores 0.6"),
        (damaged(task, checklist=free), "the gold solution scores 0"),
        (damaged(task, user_turns=("hi",) * 4), "differ in length"),
        (damaged(task, environment=None), "has no executable environment"),
        (damaged(task, conversation=()), "has no reference conversation"),
    ]
    for broken, reason in cases:
        with pytest.raises(ValueError, match=reason) as error:
            tiny.validate([task, broken])
        assert task.task_id in str(error.value)


def test_validate_catches_a_checklist_that_pays_for_doing_nothing(splits):
    task = next(
        task for task in splits["train"]
        if any(item.check["kind"] == "no_call" for turn in task.checklist for item in turn)
    )  # fmt: skip
    generous = tuple(tuple(dataclasses.replace(item, dependence=()) for item in turn) for turn in task.checklist)
    with pytest.raises(ValueError, match=f"{task.task_id}: doing nothing scores 0.5"):
        tiny.validate([damaged(task, checklist=generous)])


def test_the_final_state_is_that_of_the_gold_calls(splits):
    moved = 0
    for task in splits["heldout"][:100]:
        environment = make_environment(task.environment)
        for message in messages_with_calls(task):
            for call in message["tool_calls"]:
                environment.call(call["name"], call["arguments"])
        assert tiny.final_state(task) == environment.state()
        moved += environment.state() != task.environment["state"]
    assert 50 < moved < 100


def test_imperfect_steps_differ_and_stay_well_formed(splits):
    """Every mistake is a valid call of the task's tools, or a short reply; at rate 0 nothing changes."""
    rng = random.Random(0)
    kinds = collections.Counter()
    for task in splits["pretrain"]:
        values = load_domain(task.environment["name"]).VALUES
        schemas = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in task.tools}
        for message in task.conversation:
            if message["role"] != "assistant":
                continue
            assert imperfect_step(message, task, rng, rate=0.0) == message
            wrong = imperfect_step(message, task, rng, rate=1.0)
            assert wrong != message and wrong["role"] == "assistant"
            old, new = message.get("tool_calls", []), wrong.get("tool_calls", [])
            for call in new:
                assert list(call["arguments"]) and set(call["arguments"]) == set(schemas[call["name"]])
                assert all(value in values[name] for name, value in call["arguments"].items())
            if not new:
                assert 0 < len(wrong["content"]) < 100
            kinds["reply" if not old else "skip" if not new else "drop" if len(new) < len(old) else
                  "tool" if [c["name"] for c in new] != [c["name"] for c in old] else "argument"] += 1  # fmt: skip
    assert set(kinds) == {"reply", "skip", "drop", "tool", "argument"}
    assert min(kinds.values()) > 20


def test_imperfect_results_differ_and_stay_json_of_the_domain(splits):
    rng = random.Random(0)
    kinds = collections.Counter()
    for task in splits["pretrain"]:
        domain = load_domain(task.environment["name"])
        for _, text in task.reference:
            assert imperfect_result(text, rng, rate=0.0) == text
            old, new = json.loads(text), json.loads(imperfect_result(text, rng, rate=1.0))
            assert new != old
            if "error" in new:
                assert new["error"] in domain.ERRORS
            else:
                assert set(new) <= set(domain.FIELDS)
            spurious = "error" in new and "error" not in old
            kinds["error" if spurious else "field" if set(new) != set(old) else "value"] += 1
    assert min(kinds[kind] for kind in ("error", "field", "value")) > 100


def test_the_rate_of_mistakes_is_the_one_asked_for(splits):
    rng = random.Random(1)
    texts = [text for task in splits["train"] for _, text in task.reference]
    share = sum(imperfect_result(text, rng, rate=0.2) != text for text in texts) / len(texts)
    assert 0.16 < share < 0.24
    steps = [(task, m) for task in splits["train"] for m in task.conversation if m["role"] == "assistant"]
    share = sum(imperfect_step(message, task, rng, rate=0.2) != message for task, message in steps) / len(steps)
    assert 0.16 < share < 0.24


def test_mistakes_lower_the_score(splits):
    """What the checklist is for: a conversation with one wrong final reply no longer scores 1."""
    rng = random.Random(2)
    lower = total = 0
    for task in splits["train"]:
        messages = list(task.conversation)
        at = rng.choice([place for place, m in enumerate(messages) if m["role"] == "assistant" and m["content"]])
        messages[at] = imperfect_step(messages[at], task, rng, rate=1.0)
        lower += min(gold_score(damaged(task, conversation=tuple(messages)))) < 1
        total += 1
    assert lower > 0.9 * total
