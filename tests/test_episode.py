"""The state machine of one trajectory, played by hand: its token stream, its conversation, and every way it can end."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import scripted
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax.episode import (
    Episode,
    Limits,
    Reason,
    as_trajectory,
    on_act,
    on_fault,
    on_rehearsed,
    on_results,
    on_score,
    on_user,
    start,
)
from envace_jax.types import Need, Role, ToolCall, TurnScore

CHAT = scripted.tiny_chat()
ANN, BOB = ToolCall("balance", {"owner": "ann"}), ToolCall("balance", {"owner": "bob"})
GOOD = TurnScore(1.0, (True,), True)
LIMITS = {"act_context": 50_000, "act_response": 1_000, "rehearse_response": 500}


def begin(turns: int = 1, answered_by: Need = Need.REHEARSE, prompts=None, task=None, **limits) -> Episode:
    return start(
        prompts or scripted.prompts(),
        Limits(**{**LIMITS, **limits}),
        task or scripted.task(turns=turns),
        group_id=3,
        attempt=1,
        answered_by=answered_by,
    )


def act(episode: Episode, text: str, finish_reason: str = "stop") -> Episode:
    (request,) = episode.requests
    return on_act(episode, scripted.segment(request, text, finish_reason))


def rehearse(episode: Episode, *results: str) -> Episode:
    pairs = zip(episode.requests, results, strict=True)
    return on_rehearsed(episode, [scripted.segment(request, scripted.answering(result)) for request, result in pairs])


def ended(episode: Episode) -> str:
    assert episode.needs is Need.NOTHING and episode.requests == () and episode.pending_calls == ()
    return episode.reason


def test_a_whole_conversation_with_parallel_calls_and_two_turns():
    episode = begin(turns=2)
    assert episode.needs is Need.ACT and [(r.role, r.index, r.max_tokens) for r in episode.requests] == [
        (Role.ACT, 0, 1_000)
    ]
    episode = act(episode, scripted.calling(ANN, BOB, before="<think>\nboth\n</think>\n\nLet me see.\n"))
    assert episode.needs is Need.REHEARSE and episode.pending_calls == (ANN, BOB)
    assert [(r.role, r.index, r.max_tokens) for r in episode.requests] == [
        (Role.REHEARSE, 1, 500),
        (Role.REHEARSE, 2, 500),
    ]
    episode = rehearse(episode, '{"balance":5}', '{"balance":7}')
    assert episode.needs is Need.ACT and episode.requests[0].index == 3
    episode = act(episode, "5 and 7")
    assert episode.needs is Need.JUDGE and episode.requests == ()
    assert [message["role"] for message in episode.turn_messages] == ["user", "assistant", "tool", "tool", "assistant"]
    episode = on_score(episode, TurnScore(0.5, (True,), True))
    assert [message["content"] for message in episode.turn_messages] == ["turn 1, please"]
    episode = on_score(act(episode, "welcome"), GOOD)
    assert ended(episode) == Reason.DONE == "done"

    trajectory = as_trajectory(episode)
    assert (trajectory.task_id, trajectory.group_id, trajectory.attempt) == ("bank", 3, 1)
    assert trajectory.reward == (0.5 + 1.0) / 2 and trajectory.status == "ok" and len(trajectory.turn_scores) == 2
    assert [segment.role for segment in trajectory.segments] == [
        Role.ACT,
        Role.REHEARSE,
        Role.REHEARSE,
        Role.ACT,
        Role.ACT,
    ]
    called = [
        {"type": "function", "function": {"name": "balance", "arguments": {"owner": owner}}} for owner in ("ann", "bob")
    ]
    assert list(trajectory.messages) == [
        {"role": "system", "content": "You serve a bank."},
        {"role": "user", "content": "turn 0, please"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "both", "tool_calls": called},
        {"role": "tool", "name": "balance", "content": '{"balance": 5}', "rehearsed": True},
        {"role": "tool", "name": "balance", "content": '{"balance": 7}', "rehearsed": True},
        {"role": "assistant", "content": "5 and 7"},
        {"role": "user", "content": "turn 1, please"},
        {"role": "assistant", "content": "welcome"},
    ]


def test_parallel_calls_do_not_see_each_other():
    episode = begin(prompts=scripted.prompts(style="full"))
    episode = rehearse(act(episode, scripted.calling(ANN)), '{"balance": 41}')
    episode = act(episode, scripted.calling(ANN, BOB, before="Both of them.\n"))
    first, second = (CHAT.decode(request.prompt_tokens) for request in episode.requests)
    for prompt in (first, second):
        conversation, message = prompt.split("# Conversation so far")[1].split("# The assistant's message")
        assert '=> {"balance": 41}' in conversation and "Both of them." not in conversation
        assert "bob" in message and "<|im_end|>" not in message.split("# The call to answer")[0]
    asked = [prompt.split("# The call to answer")[1] for prompt in (first, second)]
    assert '"ann"' in asked[0] and '"bob"' not in asked[0] and '"bob"' in asked[1]


moves = st.lists(
    st.one_of(
        st.tuples(st.just("reply"), st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12)),
        st.tuples(st.just("calls"), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=60, deadline=None)
@given(moves, st.sampled_from([Need.REHEARSE, Need.RESPONSE]), st.booleans())
def test_the_act_stream_is_only_ever_extended(script, answered_by, thinking):
    """Invariant 1: each ACT prompt is the one before, the sampled ids, and the pieces appended since; nothing else."""
    prompts = scripted.prompts(thinking=thinking)
    episode = begin(turns=20, answered_by=answered_by, prompts=prompts)
    prefix = CHAT.assistant_prefix(thinking=thinking)
    expected = episode.requests[0].prompt_tokens.tolist()
    for move, value in script:
        assert episode.requests[0].prompt_tokens.tolist() == expected == episode.act_tokens.tolist()
        earlier = episode.act_pieces
        text = value if move == "reply" else scripted.calling(*[ANN] * value)
        episode = act(episode, text)
        sampled = episode.segments[-1].tokens.tolist()
        assert CHAT.decode(sampled[:-1]) == text  # and yet these are not the ids that encoding the text gives:
        assert move == "reply" or CHAT.encode(text) != sampled[:-1]
        if move == "reply":
            episode = on_score(episode, GOOD)
            added = CHAT.user(f"turn {episode.turn}, please")
        else:
            results = [f'{{"balance": {number}}}' for number in range(value)]
            answer = (
                rehearse if answered_by is Need.REHEARSE else lambda episode, *results: on_results(episode, results)
            )
            episode = answer(episode, *results)
            added = CHAT.tool_results(results)
        expected = expected + sampled + CHAT.encode("\n") + added + prefix
        shared = zip(earlier, episode.act_pieces, strict=False)
        assert all(left is right for left, right in shared)  # not copied
    assert episode.act_tokens.tolist() == expected
    if answered_by is Need.RESPONSE:
        assert {segment.role for segment in episode.segments} == {Role.ACT}
    stream = [segment for segment in episode.segments if segment.role is Role.ACT]
    for before, after in zip(stream, stream[1:], strict=False):
        length = len(before.prompt_tokens)
        assert np.array_equal(after.prompt_tokens[:length], before.prompt_tokens)
        assert np.array_equal(after.prompt_tokens[length : length + len(before.tokens)], before.tokens)


def test_a_message_that_ended_with_the_other_stop_id_is_closed():
    episode = begin(answered_by=Need.RESPONSE)
    before = episode.act_tokens.tolist()
    stopped = scripted.segment(episode.requests[0], scripted.calling(ANN) + "<|endoftext|>", "length").tokens
    segment = scripted.segment(episode.requests[0], scripted.calling(ANN))
    episode = on_act(episode, type(segment)(Role.ACT, segment.prompt_tokens, stopped, segment.logprobs, "stop", 0))
    assert episode.pending_calls == (ANN,)
    assert CHAT.decode(episode.act_tokens[len(before) :]).endswith("<|endoftext|><|im_end|>\n")


@pytest.mark.parametrize(
    "text", ["<tool_call>\n{]\n</tool_call>", "<tool_call>\n{}", '<tool_call>\n{"name": "balance"}\n</tool_call>']
)
def test_malformed_calls_end_it_and_keep_what_was_written(text):
    episode = act(begin(), text)
    assert ended(episode) == "malformed_call" and as_trajectory(episode).reward == 0.0
    assert episode.messages[-1] == {"role": "assistant", "content": text}


def test_too_many_parallel_calls_end_it():
    assert act(begin(parallel_calls=2), scripted.calling(ANN, ANN)).needs is Need.REHEARSE
    assert ended(act(begin(parallel_calls=2), scripted.calling(ANN, ANN, ANN))) == "too_many_calls"


def test_a_response_cut_at_its_limit_ends_it_whatever_it_says():
    assert ended(act(begin(), "all is well", "length")) == "length"
    assert ended(act(begin(), scripted.calling(ANN), "length")) == "length"


def test_a_rehearsal_error_ends_it_and_is_recorded():
    episode = act(begin(), scripted.calling(ANN, BOB))
    written = (scripted.answering("[1]"), "eh")
    segments = [scripted.segment(request, text) for request, text in zip(episode.requests, written, strict=True)]
    episode = on_rehearsed(episode, segments)
    assert ended(episode) == "rehearsal_error" and len(episode.segments) == 3
    assert episode.messages[-2]["content"] == "[1]"
    assert json.loads(episode.messages[-1]["content"])["error_tool_call"]["code"] == "no_result"
    own = rehearse(act(begin(), scripted.calling(ANN)), '{"error_tool_call": {"code": "unknown_tool"}}')
    assert ended(own) == "rehearsal_error"
    refusal = rehearse(act(begin(), scripted.calling(ANN)), '{"error": "no such owner"}')
    assert refusal.needs is Need.ACT  # a domain's refusal is an ordinary result


def test_outside_results_are_recorded_as_real_and_an_error_ends_it():
    episode = act(begin(answered_by=Need.RESPONSE), scripted.calling(ANN, BOB))
    assert episode.needs is Need.RESPONSE and episode.requests == ()
    fine = on_results(episode, ['{"a":1}', "[]"])
    assert fine.needs is Need.ACT and fine.messages[-2:] == (
        {"role": "tool", "name": "balance", "content": '{"a": 1}', "rehearsed": False},
        {"role": "tool", "name": "balance", "content": "[]", "rehearsed": False},
    )
    assert ended(on_results(episode, ['{"a": 1}', '{"error_tool_call": {}}'])) == "tool_error"
    for wrong in (["{}"], ["{}", "oops"], ["{}", "3"], ["{}", "NaN"]):
        with pytest.raises(ValueError, match="results for 2|not JSON|a JSON int"):
            on_results(episode, wrong)


def test_limits_on_messages_turns_and_generations():
    episode = rehearse(act(begin(assistant_turns=1), scripted.calling(ANN)), "[]")
    assert ended(episode) == "assistant_limit"
    assert on_score(act(begin(assistant_turns=1), "hi"), GOOD).reason == "done"
    episode = on_score(act(begin(turns=2, user_turns=1), "hi"), GOOD)
    assert ended(episode) == "user_limit" and as_trajectory(episode).reward == 0.5
    # one ACT and two REHEARSE generations do not fit into two, and the fourth not into three
    assert ended(act(begin(generations=2), scripted.calling(ANN, BOB))) == "generation_limit"
    assert ended(rehearse(act(begin(generations=3), scripted.calling(ANN, BOB)), "[]", "[]")) == "generation_limit"
    assert rehearse(act(begin(generations=4), scripted.calling(ANN, BOB)), "[]", "[]").needs is Need.ACT


def test_limits_on_lengths():
    first = len(begin().act_tokens)
    assert begin(act_context=first + 1_000).needs is Need.ACT
    # the stream has grown past the context by the second ACT prompt
    episode = act(begin(act_context=first + 1_010), scripted.calling(ANN))
    episode = rehearse(episode, "[]")
    assert ended(episode) == "length" and as_trajectory(episode).reward == 0.0


def masked(episode: Episode) -> str:
    trajectory = as_trajectory(episode)
    assert trajectory.status == "failed" and math.isnan(trajectory.reward)
    return trajectory.reason


def test_a_task_that_its_limits_cannot_hold_is_a_fault_from_the_start_and_names_the_setting():
    first = len(begin().act_tokens)
    assert "max_act_prompt is" in masked(begin(prompts=scripted.prompts(max_act_prompt=first - 1)))
    context = first + 999
    assert f"limits.act_context={context} cannot hold the {first} tokens" in masked(begin(act_context=context))
    # user turns that come later count, as far as the task is played
    later = scripted.task(user_turns=("hi", "hi", "hi" * 500), checklist=((), (), ()))
    assert "limits.act_context=2000" in masked(begin(task=later, act_context=2_000))
    assert begin(task=later, act_context=2_000, user_turns=2).needs is Need.ACT
    # no rehearse prompt would fit; where others answer, none is needed
    prompts = scripted.prompts(max_rehearse_prompt=3)
    assert "prompts.max_rehearse_prompt=3 cannot hold the" in masked(begin(prompts=prompts))
    assert begin(prompts=prompts, answered_by=Need.RESPONSE).needs is Need.ACT


@pytest.mark.parametrize("style", ["full", "compact"])
def test_a_rehearse_prompt_that_holds_a_right_call_and_no_more_is_no_fault(style):
    """Where a right call is rehearsed, what the policy adds to it is scored; where it does not fit, all is masked."""
    long = scripted.tool("balance", "owner" * 100)
    long["function"]["description"] = "x" * 500
    task = scripted.task(tools=(long, scripted.tool("deposit", "owner")))

    def limited(limit: int, **more) -> Episode:
        return begin(prompts=scripted.prompts(style=style, max_rehearse_prompt=limit), task=task, **more)

    least = int(re.search(r"the (\d+) tokens", masked(limited(3))).group(1))
    assert f"max_rehearse_prompt={least - 1} cannot hold the {least} tokens" in masked(limited(least - 1))
    right = act(limited(least), scripted.calling(ANN))
    assert right.needs is Need.REHEARSE and len(right.requests[0].prompt_tokens) == least
    wordy = ToolCall("balance", {"owner": "ann", "why": "x" * 100})
    for written in (scripted.calling(wordy), scripted.calling(ToolCall("y" * 9_000, {}))):
        trajectory = as_trajectory(act(limited(least), written))
        assert (trajectory.reason, trajectory.status, trajectory.reward) == ("length", "ok", 0.0)
    thoughts = act(limited(least), "<think>\n" + "x" * 100 + "\n</think>\n\n" + scripted.calling(ANN))
    assert ended(thoughts) == "length" if style == "full" else thoughts.needs is Need.REHEARSE


def test_a_tool_of_more_tokens_than_the_longest_in_characters_is_still_a_fault():
    """At the start the longest call in characters stands for all; here another one takes more tokens."""
    few, many = scripted.tool("few"), scripted.tool("many")
    few["function"]["description"], many["function"]["description"] = "balance transfer" * 40, "zq" * 300
    task, full = scripted.task(tools=(few, many), reference=()), {"style": "full"}
    least = int(
        re.search(
            r"the (\d+) tokens that asking for 'few'",
            masked(begin(prompts=scripted.prompts(**full, max_rehearse_prompt=3), task=task)),
        ).group(1)
    )
    prompts = scripted.prompts(**full, max_rehearse_prompt=least)
    assert act(begin(prompts=prompts, task=task), scripted.calling(ToolCall("few", {}))).needs is Need.REHEARSE
    episode = act(begin(prompts=prompts, task=task), scripted.calling(ToolCall("many", {})))
    assert f"max_rehearse_prompt={least} cannot hold" in masked(episode) and "'many'" in episode.reason


def test_required_items_hold_back_the_next_turn_only():
    held = TurnScore(0.25, (False,), False)
    episode = on_score(act(begin(turns=2), "hi"), held)
    assert ended(episode) == "required_item" and as_trajectory(episode).reward == 0.125
    assert ended(on_score(act(begin(turns=1), "hi"), held)) == "done"


def test_a_turn_that_broke_adds_nothing_and_earlier_turns_keep_their_reward():
    episode = on_score(act(begin(turns=4), "hi"), TurnScore(0.8, (True,), True))
    trajectory = as_trajectory(act(episode, "<tool_call>"))
    assert trajectory.reason == "malformed_call" and trajectory.status == "ok"
    assert trajectory.reward == pytest.approx(0.8 / 4) and len(trajectory.turn_scores) == 1


def test_a_fault_masks_whatever_was_earned():
    episode = on_score(act(begin(turns=2), "hi"), GOOD)
    trajectory = as_trajectory(on_fault(episode, ConnectionError("lost\nthe line")))
    assert math.isnan(trajectory.reward) and trajectory.status == "failed"
    assert trajectory.reason == "fault: ConnectionError: lost the line"


@pytest.mark.parametrize("reward", [math.nan, math.inf, -0.1, 1.1])
def test_impossible_scores_are_refused(reward):
    with pytest.raises(ValueError, match="accepted: 0 to 1"):
        on_score(act(begin(), "hi"), TurnScore(reward, (True,), True))


def test_transitions_out_of_order_are_refused():
    episode = begin()
    for wrong in (
        lambda: on_score(episode, GOOD),
        lambda: on_results(episode, []),
        lambda: on_rehearsed(episode, []),
        lambda: as_trajectory(episode),
        lambda: act(on_fault(episode, ValueError()), "hi"),
    ):
        with pytest.raises(ValueError, match="waits for|not enough values"):
            wrong()
    with pytest.raises(ValueError, match="accepted: REHEARSE, RESPONSE"):
        begin(answered_by=Need.JUDGE)


def test_impossible_limits_are_refused():
    with pytest.raises(ValueError, match="parallel_calls=0"):
        Limits(parallel_calls=0)
    with pytest.raises(ValueError, match="no room for a prompt"):
        Limits(act_context=100, act_response=100)


def test_transitions_leave_the_episode_before_as_it_was():
    episode = act(begin(), scripted.calling(ANN))
    tokens, messages = episode.act_tokens.tolist(), episode.messages
    one, other = rehearse(episode, "[1]"), rehearse(episode, "[2]")
    assert episode.act_tokens.tolist() == tokens and episode.messages == messages
    assert one.messages[-1]["content"] == "[1]" and other.messages[-1]["content"] == "[2]"


# --- a simulated user ---


def simulated(opening: str = "", **changes):
    checklist = ((scripted.CheckItem("did it?", 1.0),),)
    return scripted.task(user_turns=(opening,), checklist=checklist, scenario="You are Ann.", **changes)


def test_a_simulated_user_opens_and_answers_within_one_turn_until_it_has_nothing_to_say():
    episode = begin(task=simulated(), answered_by=Need.RESPONSE)
    assert episode.needs is Need.USER and not episode.requests and not episode.act_pieces
    episode = on_user(episode, "my balance?")
    assert episode.needs is Need.ACT
    opening = episode.act_tokens.tolist()
    assert opening == begin(task=scripted.task(user_turns=("my balance?",))).act_tokens.tolist()
    episode = act(episode, "whose?")
    assert episode.needs is Need.USER and episode.turn == 0
    sampled, earlier = episode.segments[-1].tokens.tolist(), episode.act_pieces
    episode = on_user(episode, "ann's")
    added = CHAT.encode("\n") + CHAT.user("ann's") + CHAT.assistant_prefix(thinking=False)
    assert episode.act_tokens.tolist() == opening + sampled + added
    assert all(left is right for left, right in zip(earlier, episode.act_pieces, strict=False))
    episode = on_results(act(episode, scripted.calling(ANN)), ['{"balance": 5}'])
    before = len(act(episode, "5").act_tokens)
    episode = on_user(act(episode, "5"), None)
    assert episode.needs is Need.JUDGE and episode.turn == 0 and len(episode.act_tokens) == before
    said = [(message["role"], message["content"]) for message in episode.turn_messages]
    assert said == [
        ("user", "my balance?"), ("assistant", "whose?"), ("user", "ann's"), ("assistant", ""),
        ("tool", '{"balance": 5}'), ("assistant", "5"),
    ]  # fmt: skip
    trajectory = as_trajectory(on_score(episode, TurnScore(0.75, (True,), True)))
    assert (trajectory.reason, trajectory.reward) == ("done", 0.75)
    assert {segment.turn for segment in trajectory.segments} == {0}


def test_an_opening_that_the_task_gives_is_not_asked_for():
    episode = begin(task=simulated("hello"))
    assert episode.needs is Need.ACT and act(episode, "hi").needs is Need.USER
    assert act(begin(), "hi").needs is Need.JUDGE  # nobody plays the user of other tasks


def test_a_simulated_users_messages_are_limited_and_an_end_at_the_limit_is_honoured():
    episode = act(on_user(act(begin(task=simulated("one"), user_turns=2), "a"), "two"), "b")
    assert ended(on_user(episode, "three")) == "user_limit" and as_trajectory(on_user(episode, "three")).reward == 0.0
    assert on_user(episode, None).needs is Need.JUDGE
    assert ended(on_user(act(begin(task=simulated("one"), assistant_turns=1), "a"), "two")) == "assistant_limit"


def test_what_a_simulated_user_cannot_say():
    asked, replied = begin(task=simulated()), act(begin(task=simulated("one")), "a")
    for wrong, episode in ((" \n", asked), ("", replied)):
        with pytest.raises(ValueError, match="message is empty"):
            on_user(episode, wrong)
    with pytest.raises(ValueError, match="ended the conversation before it began"):
        on_user(asked, None)
    with pytest.raises(ValueError, match="waits for act, not user"):
        on_user(begin(task=simulated("one")), "two")
    with pytest.raises(ValueError, match="simulated user and 2 user turns"):
        begin(task=scripted.task(2, scenario="You are Ann."))


def test_an_opening_that_does_not_fit_is_a_fault_and_a_later_message_is_not():
    assert "limits.act_context=2000 cannot hold" in masked(
        on_user(begin(task=simulated(), act_context=2_000), "x" * 3_000)
    )
    episode = on_user(act(begin(task=simulated("one"), act_context=2_500), "a"), "x" * 3_000)
    assert ended(episode) == "length" and as_trajectory(episode).status == "ok"


def test_what_was_said_before_the_first_user_turn_stands_before_it():
    call = {"name": "balance", "arguments": {"owner": "ann"}}
    before = (
        {"role": "system", "content": "You serve a bank."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "name": "balance", "content": "[1]"},
        {"role": "tool", "name": "balance", "content": "[2]"},
        {"role": "assistant", "content": "ok"},
    )
    episode = begin(task=scripted.task(messages=before))
    text = CHAT.decode(episode.act_tokens)
    start_, end = "<|im_start|>", "<|im_end|>\n"
    calls = scripted.calling(ANN) + "\n" + scripted.calling(ANN)
    results = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in ("[1]", "[2]"))
    assert text.partition(end)[2] == (
        f"{start_}user\nhi{end}{start_}assistant\n{calls}{end}{start_}user{results}{end}{start_}assistant\nok{end}"
        f"{start_}user\nturn 0, please{end}" + CHAT.decode(CHAT.assistant_prefix(thinking=False))
    )
    assert episode.turn_messages[0]["content"] == "turn 0, please" and episode.messages[:-1] == before


def test_what_another_model_in_this_process_cannot_answer_masks_and_what_it_refuses_does_not():
    prompts, limits = scripted.prompts(), Limits(**LIMITS)
    waiting = act(start(prompts, limits, scripted.task(), 0, 0, prompted=True), scripted.calling(ANN))
    (request,) = waiting.requests
    unreadable = on_rehearsed(waiting, [scripted.segment(request, "no tags")])
    assert unreadable.status == "failed" and unreadable.reason.startswith("fault: NoResult")
    refused = rehearse(waiting, '{"error_tool_call": {"code": "unknown_tool"}}')
    assert (refused.status, refused.reason) == ("ok", Reason.TOOL_ERROR)
