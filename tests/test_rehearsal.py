"""Private rehearsal on a scripted sampler: what it sees and what it leaks, its budgets, its order, its memory."""

from __future__ import annotations

import collections
import dataclasses
import json
import re

import numpy as np
import pytest
import scripted
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from test_rollout import CHAT, LIMITS, ScriptedSampler, is_rehearsal

from envace_jax import envs, rehearsal, roles
from envace_jax.episode import Limits
from envace_jax.fingerprint import of_tasks
from envace_jax.memory import read
from envace_jax.rehearsal import Memory, Settings, rehearse, with_memory
from envace_jax.responders import Real
from envace_jax.rollout import Player, rollout
from envace_jax.types import CheckItem, Task, ToolCall

FULL = scripted.prompts(style="full")
COMPACT = scripted.prompts()
THREE = Settings(n=3)
NOTES = "first look, then pay"


def script(prompt: str, key_ids) -> str:
    """Rehearses as the bank script does, with results that follow from the key; writes notes when asked to."""
    if prompt.startswith("<|im_start|>system\nYou prepare an assistant"):
        return f"<think>\nhm\n</think>\n\n{NOTES} {prompt.count('# Rehearsed attempt')} {key_ids[-1]}"
    if prompt.startswith("<|im_start|>system\nYou play the tools") or is_rehearsal(prompt):
        return scripted.answering(f'{{"balance": {sum(key_ids) % 1000}}}')
    steps = prompt.rsplit("<|im_start|>user\nturn ", 1)[1].count("<|im_start|>assistant")
    return scripted.calling(ToolCall("balance", {"owner": "ann"})) if steps == 1 else f"done {key_ids}"


def rehearsed(tasks, settings=THREE, *, prompts=FULL, sampler=None, **changes) -> list[Memory]:
    player = Player(sampler or ScriptedSampler(script), "params")
    return rehearse(player, tasks, settings, **{"prompts": prompts, "limits": LIMITS, "seed": 7, **changes})


def asked(sampler: ScriptedSampler) -> list[str]:
    return [CHAT.decode(request.prompt_tokens) for request in sampler.submitted]


def canary_task(task_id: str = "bank") -> Task:
    """Everything that an evaluation knows and a policy must not see holds the word CANARY and a number."""
    item = CheckItem(
        "CANARY-1", 1.0, "CANARY-2", "CANARY-3", ("CANARY-4",), ("CANARY-5",),
        check={"kind": "reply", "words": ["CANARY-6"]},
    )  # fmt: skip
    return scripted.task(
        task_id=task_id,
        user_turns=("turn 0, please", "turn 1, CANARY-7"),
        checklist=((item,), (item,)),
        reference=((ToolCall("CANARY-8", {"owner": "CANARY-9"}), '{"balance": "CANARY-10"}'),),
        environment={"name": "bank", "state": {"CANARY-11": 5}},
        conversation=({"role": "user", "content": "CANARY-12"},),
    )


@pytest.mark.parametrize("prompts", [FULL, COMPACT], ids=["full", "compact"])
@pytest.mark.parametrize("memory", ["written", "transcript"])
@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_nothing_that_only_the_evaluation_knows_is_in_any_prompt(mode, memory, prompts):
    sampler = ScriptedSampler(script)
    (memory_,) = rehearsed([canary_task()], Settings(mode, 3, memory=memory), prompts=prompts, sampler=sampler)
    assert memory_.text and len(memory_.attempts) == 3 and len(sampler.submitted) >= 9
    assert "CANARY" not in "\n".join(asked(sampler))
    assert "CANARY" not in memory_.text + json.dumps([attempt.messages for attempt in memory_.attempts])
    assert {attempt.reason for attempt in memory_.attempts} == {"done"}  # one turn each, and no judge
    assert all(sum(message["role"] == "user" for message in attempt.messages) == 1 for attempt in memory_.attempts)


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_no_environment_is_called_before_the_commit(mode, monkeypatch):
    made = []

    class Counted(scripted.Bank):
        def __init__(self, spec):
            super().__init__(spec)
            made.append(self)

    task = dataclasses.replace(canary_task(), user_turns=("turn 0, please",), checklist=((CheckItem("?", 1.0),),))
    real = Real(Counted)
    before = envs.execution_count()
    sampler = ScriptedSampler(script)
    player, settings = Player(sampler, "params"), Settings(mode, 3)
    (memory,) = rehearse(player, [task], settings, prompts=FULL, limits=LIMITS, seed=7)
    assert (real.calls, len(made), envs.execution_count() - before) == (0, 0, 0)
    judge = scripted.Judge()
    (committed,) = rollout(
        sampler, "params", [with_memory(task, memory.text, settings)], attempts=1, responder=real, reward=judge,
        prompts=FULL, limits=LIMITS, seed=7, step=0,
    )  # fmt: skip
    assert real.calls == 1 and len(made) == 1 and committed.reward == 1.0
    assert NOTES in CHAT.decode(committed.segments[0].prompt_tokens)
    # The conversation that judges, users and tools are told, and the result, hold nothing of it.
    assert NOTES not in json.dumps([judge.asked, committed.messages], default=str)


def test_the_memory_stands_in_the_committed_prompt_where_it_was_placed():
    task = scripted.task(2)
    bare = roles.act_prompt(FULL, task)
    system = roles.act_prompt(FULL, with_memory(task, NOTES, Settings(placement="system")))
    said = f"You serve a bank.\n\n{roles.NOTE_TITLE}\n{NOTES}"
    assert system == [
        *CHAT.system(said, list(task.tools)), *CHAT.user("turn 0, please"), *CHAT.assistant_prefix(thinking=False)
    ]  # fmt: skip
    user = roles.act_prompt(FULL, with_memory(task, NOTES, Settings(placement="user")))
    text = f"turn 0, please\n\n{roles.NOTE_TITLE}\n{NOTES}"
    assert user == [
        *CHAT.system("You serve a bank.", list(task.tools)), *CHAT.user(text), *CHAT.assistant_prefix(thinking=False)
    ]  # fmt: skip
    assert roles.act_prompt(FULL, with_memory(task, "", Settings())) == bare
    nothing_said = dataclasses.replace(task, messages=(), tools=())
    assert roles.act_prompt(COMPACT, with_memory(nothing_said, NOTES, Settings()))[:3] == CHAT.system(NOTES, [])[:3]
    assert of_tasks([task]) == of_tasks([with_memory(task, NOTES, Settings())])  # a run's fingerprint stays as it was


def test_a_memory_that_the_context_cannot_hold_is_left_out_and_masks_nothing():
    task = scripted.task()
    bare = roles.act_prompt(FULL, task)
    noted = with_memory(task, NOTES * 20, Settings())
    for context, holds in ((len(roles.act_prompt(FULL, noted)) + 50, True), (len(bare) + 50, False)):
        sampler = ScriptedSampler(lambda prompt, key_ids: "done")
        (played,) = rollout(
            sampler, "params", [noted], attempts=1, responder=Real(scripted.Bank), reward=scripted.Judge(),
            prompts=scripted.prompts(style="full", max_act_prompt=len(bare)),
            limits=Limits(act_context=context, act_response=50), seed=0, step=0,
        )  # fmt: skip
        assert played.status == "ok" and played.reason == "done"
        assert (NOTES in asked(sampler)[0]) == holds


@pytest.mark.parametrize("memory", ["written", "transcript"])
@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_a_task_alone_is_rehearsed_as_among_others(mode, memory):
    def keyed(prompt, key_ids):
        return f"{script(prompt, key_ids)} {key_ids}" if "You prepare" in prompt else script(prompt, key_ids)

    tasks = [scripted.task(task_id=f"task {number}") for number in range(5)]
    settings = Settings(mode, 3, memory=memory)
    together = rehearsed(tasks, settings, sampler=ScriptedSampler(keyed, slots=7, shuffle=3))
    for task, memory_ in zip(tasks, together, strict=True):
        (alone,) = rehearsed([task], settings, sampler=ScriptedSampler(keyed, slots=1))
        assert alone.text == memory_.text and alone.completion_tokens == memory_.completion_tokens
        assert [a.messages for a in alone.attempts] == [a.messages for a in memory_.attempts]
    assert len({attempt.messages[-1]["content"] for m in together for attempt in m.attempts}) == 15  # each its own
    (other,) = rehearsed(tasks[:1], settings, seed=8)
    assert other.attempts[0].messages != together[0].attempts[0].messages


def test_parallel_attempts_know_nothing_of_each_other_and_are_noted_once_together():
    sampler = ScriptedSampler(script)
    (memory,) = rehearsed([scripted.task()], Settings("parallel", 4), sampler=sampler)
    prompts = asked(sampler)
    assert memory.text == f"{NOTES} 4 4"  # from one prompt with all four attempts
    assert sum("You prepare an assistant" in prompt for prompt in prompts) == 1
    assert not any(roles.NOTE_TITLE in prompt for prompt in prompts)
    assert [attempt.attempt for attempt in memory.attempts] == [0, 1, 2, 3]


def test_sequential_attempts_read_the_memory_of_those_before_which_is_revised_after_each():
    sampler = ScriptedSampler(script)
    (memory,) = rehearsed([scripted.task()], Settings("sequential", 3), sampler=sampler)
    first = [CHAT.decode(attempt.segments[0].prompt_tokens) for attempt in memory.attempts]
    assert roles.NOTE_TITLE not in first[0]
    assert f"{NOTES} 1 1" in first[1] and f"{NOTES} 2 2" in first[2] and memory.text == f"{NOTES} 3 3"
    noting = [prompt for prompt in asked(sampler) if "You prepare an assistant" in prompt]
    assert [prompt.count("# Rehearsed attempt") for prompt in noting] == [1, 2, 3]
    assert "# Notes so far" not in noting[0] and f"be revised\n{NOTES} 2 2" in noting[2]
    assert [attempt.attempt for attempt in memory.attempts] == [0, 1, 2]
    assert len({attempt.messages[-1]["content"] for attempt in memory.attempts}) == 3  # numbers of their own


def counted(memory: Memory) -> int:
    return sum(len(segment.tokens) for attempt in memory.attempts for segment in attempt.segments)


def test_tokens_are_counted_exactly():
    sampler = ScriptedSampler(script)
    (memory,) = rehearsed([scripted.task()], Settings("sequential", 3), sampler=sampler)
    assert memory.prompt_tokens == sum(len(request.prompt_tokens) for request in sampler.submitted)
    notes = sum(
        len(scripted.spelled(script(prompt, request.key_ids))) + 1
        for prompt, request in zip(asked(sampler), sampler.submitted, strict=True)
        if "You prepare" in prompt
    )
    assert memory.completion_tokens == counted(memory) + notes and memory.cached_tokens == 0


@hypothesis_settings(max_examples=30, deadline=None)
@given(
    budget=st.integers(1, 1500),
    n=st.integers(1, 5),
    mode=st.sampled_from(["parallel", "sequential"]),
    memory=st.sampled_from(["written", "transcript"]),
    width=st.integers(1, 3),
    prompts=st.sampled_from([FULL, COMPACT]),
)
def test_a_budget_of_tokens_is_never_exceeded(budget, n, mode, memory, width, prompts):
    calls = [ToolCall("balance", {"owner": name}) for name in ("ann", "bob", "cid")[:width]]

    def wide(prompt, key_ids):
        text = script(prompt, key_ids)
        return scripted.calling(*calls) if "<tool_call>" in text else text

    settings = Settings(mode, n, memory=memory, max_tokens=budget, memory_tokens=100)
    sampler = ScriptedSampler(wide)
    free = dataclasses.replace(settings, max_tokens=0)
    (unbounded,) = rehearsed([scripted.task()], free, sampler=sampler, prompts=prompts)
    (result,) = rehearsed([scripted.task()], settings, sampler=ScriptedSampler(wide), prompts=prompts)
    assert result.completion_tokens <= budget
    assert len(result.attempts) <= n
    assert counted(result) <= budget - settings.reserve
    assert {attempt.status for attempt in result.attempts} <= {"ok"}
    if budget >= n * unbounded.completion_tokens + 101:
        assert result.text == unbounded.text and result.completion_tokens == unbounded.completion_tokens


def test_attempts_stop_when_the_budget_is_spent():
    (free,) = rehearsed([scripted.task()], Settings("sequential", 5, memory="transcript"))
    one = counted(free) // 5
    tight = Settings("sequential", 5, memory="transcript", max_tokens=2 * one + one // 2)
    (memory,) = rehearsed([scripted.task()], tight)
    assert len(memory.attempts) == 3  # two whole ones, and one that was cut
    assert [attempt.reason for attempt in memory.attempts] == ["done", "done", "length"]
    assert counted(memory) == tight.max_tokens  # to the token
    (share,) = rehearsed([scripted.task()], Settings("parallel", 4, memory="transcript", max_tokens=403))
    assert [sum(len(s.tokens) for s in attempt.segments) for attempt in share.attempts] == [100] * 4


def test_a_cache_gives_the_memory_of_the_same_task_settings_and_seed():
    cache, sampler = rehearsal.Cache(most=2), ScriptedSampler(script)
    first, second = scripted.task(), scripted.task(task_id="other")
    (memory,) = rehearsed([first], sampler=sampler, cache=cache)
    asked_once = len(sampler.submitted)
    again = rehearsed([second, first], sampler=sampler, cache=cache)
    assert again[1] is memory and len(sampler.submitted) == 2 * asked_once  # only the other task was rehearsed
    for changed in ({"seed": 8}, {"settings": Settings(n=2)}):
        rehearsed([first], sampler=sampler, cache=cache, **changed)
    assert len(sampler.submitted) > 3 * asked_once
    before = len(sampler.submitted)
    rehearsed([second], sampler=sampler, cache=cache)  # it was the least recently used of three
    assert len(sampler.submitted) == before + asked_once
    # What only the evaluation knows makes no other memory.
    known = dataclasses.replace(second, reference=(), checklist=((CheckItem("new", 1.0),),))
    rehearsed([known], sampler=sampler, cache=cache)
    assert len(sampler.submitted) == before + asked_once


def test_a_cache_holds_no_more_tokens_than_it_may():
    cache = rehearsal.Cache(most=9, most_tokens=10)
    for name, tokens in (("a", 4), ("b", 4), ("a", 5), ("c", 1)):
        cache.put(name, Memory(name, completion_tokens=tokens))
    assert len(cache) == 3 and cache.get("a").completion_tokens == 5
    cache.put("d", Memory("d", completion_tokens=2))  # b is the one that was not used for longest
    assert cache.get("b") is None and len(cache) == 3
    cache.put("e", Memory("e", completion_tokens=11))
    assert len(cache) == 0


def test_a_task_that_stands_twice_is_rehearsed_once_and_alike():
    one, other = scripted.task(), scripted.task(task_id="other")
    (alone,) = rehearsed([one])
    sampler = ScriptedSampler(script)
    first, beside, second = rehearsed([one, other, dataclasses.replace(one, reference=())], sampler=sampler)
    assert first is second and first.text == alone.text and beside is not first
    assert [a.messages for a in first.attempts] == [a.messages for a in alone.attempts]
    per_task = len(sampler.submitted) // 2
    cache = rehearsal.Cache()
    rehearsed([one, one], sampler=sampler, cache=cache)
    assert len(sampler.submitted) == 3 * per_task
    assert rehearsed([one], sampler=sampler, cache=cache)[0].text == alone.text
    assert len(sampler.submitted) == 3 * per_task
    with pytest.raises(ValueError, match="different tasks to rehearse have one id, 'bank'"):
        rehearsed([one, scripted.task(user_turns=("turn 0, now",))], sampler=sampler)


def test_a_memory_is_asked_for_without_thoughts():
    """A policy that thinks would often be cut within them, and nothing would be left."""
    sampler = ScriptedSampler(script)
    for prompts in (scripted.prompts(style="full", thinking=True), scripted.prompts(thinking=True)):
        rehearsed([scripted.task()], prompts=prompts, sampler=sampler)
        noting = [r for r in sampler.submitted if r.key_ids[1] == rehearsal.MEMORY_STREAM][-1]
        without, thinking = CHAT.assistant_prefix(thinking=False), CHAT.assistant_prefix()
        assert noting.prompt_tokens[-len(without) :] == without
        attempt = [r for r in sampler.submitted if r.key_ids[1] == rehearsal.ATTEMPT_STREAM][-1]
        assert attempt.prompt_tokens[-len(thinking) :] == thinking


CALL = '{"name": "balance", "arguments": {"owner": "ann"}}'
QUOTING = f"Look first:\n{scripted.calling(ToolCall('balance', {'owner': 'ann'}))}\nthen pay."


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        (QUOTING, QUOTING),
        (f"<think>\nhm\n</think>\n\n{QUOTING}<|im_end|>", QUOTING),
        ("pay <tool_call>", "pay <tool_call>"),
        ("<think>\nnever closed", ""),
        ("pay\n<think>\nnever closed", "pay"),
    ],
)  # fmt: skip
def test_notes_are_read_whole(text, notes):
    assert read(text) == notes


PAY = ToolCall("pay", {"payer": "ann", "payee": "bob", "amount": 1})


def paying(prompt: str, key_ids) -> str:
    """Looks, then pays an amount that sampling decides; at a last attempt, the greedy one, as it has read."""
    answer = script(prompt, key_ids)
    if "done" not in answer or prompt.count("<tool_response>") > 1:
        return answer
    amount = key_ids[3] % 3
    if key_ids[1] == rehearsal.MEMORY_STREAM:
        amount = 100 + int(re.search(r'"amount": (\d)', prompt)[1])
    return scripted.calling(dataclasses.replace(PAY, arguments={**PAY.arguments, "amount": amount}))


@pytest.mark.parametrize("placement", ["system", "user"])
def test_a_compact_memory_is_the_whole_turn_played_once_more_with_the_attempts_in_view(placement):
    sampler = ScriptedSampler(paying)
    settings = Settings(n=4, memory_tokens=400, placement=placement)
    (memory,) = rehearsed([scripted.task()], settings, prompts=COMPACT, sampler=sampler)
    look, pay = memory.text.splitlines()
    assert look == CALL and json.loads(pay)["arguments"]["amount"] == 100  # what most attempts paid, and changed
    last = [request for request in sampler.submitted if request.key_ids[1] == rehearsal.MEMORY_STREAM]
    assert {request.temperature for request in last} == {0.0} and {request.key_ids[3] for request in last} == {4}
    first = CHAT.decode(last[0].prompt_tokens)
    assert (f"turn 0, please\n\n{CALL}" in first) == (placement == "user")
    assert len(memory.attempts) == 4  # the last one is none of them, and is counted
    assert memory.prompt_tokens == sum(len(request.prompt_tokens) for request in sampler.submitted)
    assert memory.completion_tokens > counted(memory)


def test_a_compact_memory_that_is_cut_leaves_the_most_frequent_course():
    settings = Settings(n=4, memory_tokens=60)
    (memory,) = rehearsed([scripted.task()], settings, prompts=COMPACT, sampler=ScriptedSampler(paying))
    assert json.loads(memory.text.splitlines()[1])["arguments"]["amount"] == 0
    assert memory.completion_tokens <= counted(memory) + 60


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("parallel:4", ("parallel", 4)),
        ("sequential:2", ("sequential", 2)),
        ("none", ("none", 4)),
        ("parallel", ("parallel", 4)),
    ],
)  # fmt: skip
def test_settings_are_read_from_a_command_line(text, settings):
    found = rehearsal.parse(text)
    assert (found.mode, found.n) == settings


@pytest.mark.parametrize("text", ["", "both", "parallel:", "parallel:0", "parallel:-1", "parallel:x", "parallel:4:2"])
def test_settings_that_mean_nothing_are_refused(text):
    with pytest.raises(ValueError, match="MODE"):
        rehearsal.parse(text)


@pytest.mark.parametrize(
    "wrong",
    [{"mode": "x"}, {"n": 0}, {"placement": "x"}, {"memory": "x"}, {"max_tokens": -1}, {"top_p": 0.0},
     {"temperature": float("nan")}, {"memory_tokens": 0}],
)  # fmt: skip
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="rehearsal"):
        Settings(**wrong)


def test_mode_none_samples_nothing():
    sampler = ScriptedSampler(script)
    assert rehearsed([scripted.task()], Settings("none"), sampler=sampler) == [Memory("")] and not sampler.submitted


def test_a_transcript_counts_the_courses_that_attempts_took():
    def varied(prompt, key_ids):
        if key_ids[3] == 2 and "<|im_start|>assistant" in prompt and "You play" not in prompt:
            return "I will not."
        return script(prompt, key_ids)

    (memory,) = rehearsed([scripted.task()], Settings(n=4, memory="transcript"), sampler=ScriptedSampler(varied))
    rare, often = memory.text.split("\n\n")
    assert rare == "1 of 4 attempts went like this; every result is imagined:\nreply: I will not.\n(ended with a reply)"
    assert often.startswith("3 of 4 attempts") and 'call: {"name": "balance", "arguments": {"owner": "ann"}}' in often
    assert memory.completion_tokens == counted(memory)
    (compact,) = rehearsed([scripted.task()], Settings(n=4, memory="transcript"), prompts=COMPACT)
    assert compact.text == '{"name": "balance", "arguments": {"owner": "ann"}}'


def test_notes_are_written_of_long_attempts_shortened_to_fit():
    def long(prompt, key_ids):
        answer = script(prompt, key_ids)
        return scripted.answering(json.dumps({"balance": "9" * 1500})) if roles.RESULT_OPEN in answer else answer

    sampler = ScriptedSampler(long)
    limits = dataclasses.replace(LIMITS, act_context=8_000)
    (memory,) = rehearsed([scripted.task()], Settings(n=6), sampler=sampler, limits=limits)
    (noting,) = [request for request in sampler.submitted if "You prepare" in CHAT.decode(request.prompt_tokens)]
    assert len(noting.prompt_tokens) + noting.max_tokens <= 8_000 and memory.text.startswith(f"{NOTES} 6")
    assert "9 [...]" in CHAT.decode(noting.prompt_tokens)


def test_attempts_of_which_nothing_came_leave_no_memory():
    short = scripted.prompts(style="full", max_rehearse_prompt=10)
    (memory,) = rehearsed([scripted.task()], prompts=short)  # no rehearsal prompt fits: nothing can be rehearsed
    assert memory.text == "" and memory.completion_tokens == 0
    assert collections.Counter(attempt.status for attempt in memory.attempts) == {"failed": 3}


def test_segments_are_told_as_they_come():
    told: list[tuple] = []
    memories = rehearsed(
        [scripted.task(), scripted.task(task_id="other")], Settings("sequential", 2),
        on_segment=lambda *news: told.append(news),
    )  # fmt: skip
    for memory, name in zip(memories, ("bank", "other"), strict=True):
        for number, attempt in enumerate(memory.attempts):
            own = [segment for task_id, index, segment in told if (task_id, index) == (name, number)]
            assert [segment.tokens.tolist() for segment in own] == [s.tokens.tolist() for s in attempt.segments]
    assert {type(news[2].tokens) for news in told} == {np.ndarray}


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_a_rehearsal_goes_on_from_one_with_fewer_attempts(mode):
    tasks = [scripted.task(), scripted.task(task_id="other")]
    whole = rehearsed(tasks, Settings(mode, 4))
    sampler = ScriptedSampler(script)
    begun = rehearsed(tasks, Settings(mode, 1), sampler=sampler)
    after = rehearsed(tasks, Settings(mode, 3), sampler=sampler, after=begun)
    again = rehearsed(tasks, Settings(mode, 4), sampler=sampler, after=after)
    for one, other in zip(whole, again, strict=True):
        assert one.text == other.text and [a.messages for a in one.attempts] == [a.messages for a in other.attempts]
        counts = [(m.prompt_tokens, m.completion_tokens, m.cached_tokens) for m in (one, other)]
        assert counts[0] == counts[1]
    attempts = {key[2:4] for request in sampler.submitted if (key := request.key_ids)[1] == rehearsal.ATTEMPT_STREAM}
    assert len(attempts) == 8 and len([r for r in sampler.submitted if r.key_ids[1] == rehearsal.ATTEMPT_STREAM]) == 24
    with pytest.raises(ValueError, match="cannot go on from 4 attempts"):
        rehearsed(tasks, Settings(mode, 2), after=again)
    with pytest.raises(ValueError, match="different numbers"):
        rehearsed(tasks, Settings(mode, 4), after=[begun[0], after[1]])
    with pytest.raises(ValueError, match="max_tokens=50"):
        rehearsed(tasks, Settings(mode, 4, max_tokens=50), after=begun)
