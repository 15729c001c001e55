"""Private rehearsal on a scripted sampler: what it sees and what it leaks, its budgets, its order, its memory."""

from __future__ import annotations

import collections
import dataclasses
import json

import numpy as np
import pytest
import scripted
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from test_rollout import CHAT, LIMITS, ScriptedSampler, bank_script, is_rehearsal

from envace_jax import envs, rehearsal, roles
from envace_jax.chat import load_tokenizer
from envace_jax.config import ASSETS
from envace_jax.episode import Limits
from envace_jax.fingerprint import of_tasks
from envace_jax.memory import read
from envace_jax.rehearsal import Memory, Settings, rehearse, task_of, with_memory
from envace_jax.responders import Real
from envace_jax.rollout import Player, rollout
from envace_jax.types import CheckItem, Role, Task, ToolCall

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
)
def test_a_budget_of_tokens_is_never_exceeded(budget, n, mode, memory, width):
    calls = [ToolCall("balance", {"owner": name}) for name in ("ann", "bob", "cid")[:width]]

    def wide(prompt, key_ids):
        text = script(prompt, key_ids)
        return scripted.calling(*calls) if "<tool_call>" in text else text

    settings = Settings(mode, n, memory=memory, max_tokens=budget, memory_tokens=100)
    sampler = ScriptedSampler(wide)
    (unbounded,) = rehearsed([scripted.task()], dataclasses.replace(settings, max_tokens=0), sampler=sampler)
    (result,) = rehearsed([scripted.task()], settings, sampler=ScriptedSampler(wide))
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
    ("text", "full", "compact"),
    [
        (QUOTING, QUOTING, CALL),
        (f"<think>\nhm\n</think>\n\n{QUOTING}<|im_end|>", QUOTING, CALL),
        ("pay <tool_call>", "pay <tool_call>", "pay"),
        ("<think>\nnever closed", "", ""),
        ("pay\n<think>\nnever closed", "pay", "pay"),
    ],
)  # fmt: skip
def test_notes_are_read_whole_and_compact_ones_as_calls(text, full, compact):
    assert (read(text, "full"), read(text, "compact")) == (full, compact)


SPOKEN = [
    {"role": "system", "content": "You serve a bank."},
    {"role": "user", "content": [{"type": "text", "text": "turn 0, "}, {"type": "text", "text": "please"}]},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "balance", "arguments": '{"owner": "ann"}'}},
        {"id": "b", "type": "function", "function": {"name": "balance", "arguments": {"owner": "bob"}}},
    ]},
    {"role": "tool", "tool_call_id": "a", "content": '{"balance": 5}'},
    {"role": "tool", "tool_call_id": "b", "content": '{"balance": 1}'},
]  # fmt: skip


def test_a_task_from_the_middle_of_a_turn_is_asked_for_the_next_message():
    tools = scripted.task().tools
    task = task_of(SPOKEN, tools, "here")
    ann, bob = ToolCall("balance", {"owner": "ann"}), ToolCall("balance", {"owner": "bob"})
    body = CHAT.assistant("", calls=[ann, bob])
    stream = [
        *CHAT.system("You serve a bank.", list(tools)), *CHAT.user("turn 0, please"),
        *CHAT.assistant_prefix(), *body, *CHAT.close(body),
        *CHAT.tool_results(['{"balance": 5}', '{"balance": 1}']), *CHAT.assistant_prefix(thinking=False),
    ]  # fmt: skip
    assert roles.act_prompt(FULL, task) == stream
    note = CHAT.user(f"{roles.NOTE_TITLE}\n{NOTES}")
    prefix = len(CHAT.assistant_prefix(thinking=False))
    noted = roles.act_prompt(FULL, with_memory(task, NOTES, Settings(placement="user")))
    assert noted == stream[:-prefix] + note + stream[-prefix:]
    sampler = ScriptedSampler(script)
    (memory,) = rehearsed([task], Settings("sequential", 2), sampler=sampler)
    attempt = memory.attempts[0]
    assert attempt.reason == "done" and len(attempt.messages) == len(SPOKEN) + 1 and len(attempt.segments) == 1
    assert 'result: {"balance": 1}' in asked(sampler)[1]  # real results are shown to who writes the notes


def test_a_task_from_a_users_message_is_a_rehearsal_of_that_turn():
    conversation = [*SPOKEN, {"role": "assistant", "content": "5 and 1"}, {"role": "user", "content": "turn 1, more"}]
    (memory,) = rehearsed([task_of(conversation, scripted.task().tools, "here")])
    attempt = memory.attempts[0]
    assert [message["role"] for message in attempt.messages[len(conversation) :]] == ["assistant", "tool", "assistant"]
    assert attempt.segments[1].role is Role.REHEARSE
    told = CHAT.decode(attempt.segments[1].prompt_tokens)
    assert 'user: turn 0, please\n{"name": "balance", "arguments": {"owner": "ann"}} => {"balance": 5}' in told
    assert "reply: 5 and 1\nuser: turn 1, more" in told


def test_thoughts_are_kept_in_the_turn_under_way_as_in_qwens_template():
    thinking = [
        {**message, "reasoning_content": "both"} if message["role"] == "assistant" else message for message in SPOKEN
    ]
    later = [*thinking, {"role": "assistant", "content": "5 and 1"}, {"role": "user", "content": "turn 1"}]
    for messages, kept in ((thinking, True), (later, False)):
        for note in ("", NOTES):
            task = with_memory(task_of(messages, (), "here"), note, Settings(placement="user"))
            text = CHAT.decode(roles.act_prompt(FULL, task))
            assert ("<think>\nboth\n</think>" in text) == kept and (NOTES in text) == bool(note)


@pytest.mark.parametrize("thoughts", [{}, {"reasoning_content": "both"}], ids=["plain", "thoughts"])
@pytest.mark.parametrize("end", [5, 7])
def test_a_conversation_is_written_as_the_chat_template_writes_it(end, thoughts):
    transformers = pytest.importorskip("transformers")
    folder = ASSETS / "tiny_base"
    later = [{"role": "assistant", "content": "5 and 1"}, {"role": "user", "content": "turn 1"}]
    messages = [{**message} for message in [*SPOKEN, *later][:end]]
    messages[1]["content"] = "turn 0, please"
    arguments = [{"owner": "ann"}, {"owner": "bob"}]
    calls = [{"type": "function", "function": {"name": "balance", "arguments": a}} for a in arguments]
    messages[2] = {"role": "assistant", "content": "", "tool_calls": calls, **thoughts}
    tools = list(scripted.task().tools)
    ids = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, enable_thinking=True, return_dict=False
    )
    prompts = roles.Prompts(load_tokenizer(folder), thinking=True)
    assert roles.act_prompt(prompts, task_of(messages, tools, "here")) == list(ids)


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "must end with"),
        (SPOKEN[:1], "must end with"),
        (SPOKEN[:3], "must end with"),
        ([{"role": "robot", "content": "hi"}], r"messages\[0\].role is 'robot'"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content is neither"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content is neither"),
        ([{"role": "assistant", "tool_calls": [{}]}, *SPOKEN[1:2]], r"messages\[0\].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{"}}]}, *SPOKEN[1:2]],
         r"messages\[0\].tool_calls"),
    ],
)  # fmt: skip
def test_conversations_that_no_assistant_goes_on_with_are_refused(messages, error):
    with pytest.raises(ValueError, match=error):
        task_of(messages, (), "here")


def test_a_user_who_has_not_spoken_leaves_nothing_to_rehearse():
    with pytest.raises(ValueError, match="has not spoken"):
        rehearsed([scripted.task(user_turns=("",), scenario="You are Ann.")])


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


def test_a_judged_run_goes_on_from_results_in_one_turn():
    bank = {"name": "bank", "state": {}}
    task = task_of(SPOKEN, scripted.task().tools, "here")
    task = dataclasses.replace(task, environment=bank, checklist=((CheckItem("?", 1.0),),))
    judge = scripted.Judge(0.5)
    (played,) = rollout(
        ScriptedSampler(bank_script), "params", [task], attempts=1, responder=Real(scripted.Bank), reward=judge,
        prompts=COMPACT, limits=LIMITS, seed=0, step=0,
    )  # fmt: skip
    assert played.reason == "done" and played.reward == 0.5
    ((_, turn, messages),) = judge.asked
    assert turn == 0 and messages[0]["role"] == "user"  # the whole turn, from its user message on


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
