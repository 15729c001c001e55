"""Rehearsal from any point of a conversation: the tasks made of one, and what is written of what was said."""

from __future__ import annotations

import dataclasses

import pytest
import scripted
from test_rehearsal import COMPACT, FULL, NOTES, asked, rehearsed, script
from test_rollout import CHAT, LIMITS, ScriptedSampler, bank_script

from envace_jax import roles
from envace_jax.chat import load_tokenizer
from envace_jax.config import ASSETS
from envace_jax.rehearsal import Settings, task_of, with_memory
from envace_jax.responders import Real
from envace_jax.rollout import rollout
from envace_jax.types import CheckItem, Role, ToolCall

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
