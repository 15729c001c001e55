"""The rollout loop on a scripted sampler: order, independence of slots and timing, faults, waiting."""

from __future__ import annotations

import math
import random
import threading
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np
import pytest
import scripted
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax.buckets import Buckets
from envace_jax.episode import Limits
from envace_jax.models.config import QwenConfig
from envace_jax.models.qwen import make_policy
from envace_jax.responders import Real, Rehearsed
from envace_jax.rollout import Player, rollout
from envace_jax.sampling import Sample, Sampler, SampleRequest
from envace_jax.types import Need, Role, ToolCall, Trajectory, TurnScore

CHAT = scripted.tiny_chat()
LIMITS = Limits(act_context=50_000, act_response=3_000, rehearse_response=2_000)
ANN, BOB = ToolCall("balance", {"owner": "ann"}), ToolCall("balance", {"owner": "bob"})
DEPOSIT = ToolCall("deposit", {"owner": "ann", "amount": "3"})


class ScriptedSampler:
    """Writes `script(prompt text, key ids)`, byte by byte, `chunk` ids a step; what finished comes in any order."""

    def __init__(self, script, slots: int = 4, chunk: int = 40, shuffle: int | None = None, params: str = "params"):
        self.script, self.slots, self.chunk, self.params = script, slots, chunk, params
        self.random = None if shuffle is None else random.Random(shuffle)
        self.submitted: list[SampleRequest] = []
        self.resets = self.steps = 0
        self.running: list[tuple[SampleRequest, list[int], int]] = []

    def reset(self):
        self.resets += 1
        self.running = []

    def free(self):
        return self.slots - len(self.running)

    def submit(self, requests):
        assert 0 < len(requests) <= self.free()
        self.submitted += requests
        for request in requests:
            text = self.script(CHAT.decode(request.prompt_tokens), request.key_ids)
            tokens = [*scripted.spelled(text), CHAT.end_of_message][: request.max_tokens]
            self.running.append((request, tokens, 0))

    def step(self, params):
        assert params == self.params and self.running
        self.steps += 1
        moved = [(request, tokens, done + self.chunk) for request, tokens, done in self.running]
        self.running = [entry for entry in moved if entry[2] < len(entry[1])]
        finished = [self.sample(request, tokens) for request, tokens, done in moved if done >= len(tokens)]
        if self.random is not None:
            self.random.shuffle(finished)
        return finished

    def sample(self, request, tokens):
        reason = "stop" if tokens[-1] == CHAT.end_of_message else "length"
        return Sample(request.request_id, np.array(tokens, np.int32), np.full(len(tokens), -0.25, np.float32), reason)


def is_rehearsal(prompt: str) -> bool:
    return "Simulate the tools." in prompt


def bank_script(prompt: str, key_ids) -> str:
    """Per user turn: two calls side by side, a deposit, a reply. Rehearsed results are what the bank would answer."""
    if is_rehearsal(prompt):
        asked = prompt.rsplit("CALL\n", 1)[1]
        history = prompt.rsplit("HISTORY\n", 1)[1].rsplit("CALL\n", 1)[0]
        deposits = history.count('"deposit"') + ('"deposit"' in asked)
        if "bob" in asked:
            return scripted.answering('{"balance": 0}')
        return scripted.answering(f'{{"balance": {5 + 3 * deposits}}}') + "x" * 100  # Ann's result comes after Bob's
    turn = prompt.rsplit("<|im_start|>user\nturn ", 1)[1]
    steps = turn.count("<|im_start|>assistant")
    return [scripted.calling(ANN, BOB, before="Looking.\n"), scripted.calling(DEPOSIT), f"done {key_ids[:4]}"][
        steps - 1
    ]


def play(script=bank_script, tasks=None, sampler=None, **changes) -> list[Trajectory]:
    settings_ = {
        "attempts": 2, "responder": Rehearsed(), "reward": scripted.Judge(), "prompts": scripted.prompts(),
        "limits": LIMITS, "seed": 7, "step": 3,
    }  # fmt: skip
    tasks = (
        tasks if tasks is not None else [scripted.task(2, "one"), scripted.task(1, "two"), scripted.task(2, "three")]
    )
    return rollout(sampler or ScriptedSampler(script), "params", tasks, **{**settings_, **changes})


def content(trajectory: Trajectory):
    """All of a trajectory that must not depend on timing, in comparable form."""
    segments = [
        (
            s.role,
            s.prompt_tokens.tolist(),
            s.tokens.tolist(),
            s.logprobs.tolist(),
            s.finish_reason,
            s.policy_version,
            s.turn,
        )
        for s in trajectory.segments
    ]
    return trajectory.task_id, trajectory.group_id, trajectory.attempt, trajectory.reason, trajectory.messages, segments


def test_order_groups_keys_and_segments():
    sampler, judge = ScriptedSampler(bank_script), scripted.Judge(0.5)
    trajectories = play(sampler=sampler, reward=judge, group_offset=10, policy_version=4)
    assert [(t.task_id, t.group_id, t.attempt) for t in trajectories] == [
        ("one", 10, 0), ("one", 10, 1), ("two", 11, 0), ("two", 11, 1), ("three", 12, 0), ("three", 12, 1),
    ]  # fmt: skip
    assert [t.reward for t in trajectories] == [0.5] * 6 and {t.reason for t in trajectories} == {"done"}
    act, rehearse = Role.ACT, Role.REHEARSE
    turn = [act, rehearse, rehearse, act, rehearse, act]
    assert [s.role for s in trajectories[0].segments] == turn * 2
    assert [s.turn for s in trajectories[0].segments] == [0] * 6 + [1] * 6
    assert {s.policy_version for t in trajectories for s in t.segments} == {4}
    assert {(s.tokens.dtype, s.prompt_tokens.dtype, s.logprobs.dtype) for t in trajectories for s in t.segments} == {
        (np.dtype(np.int32), np.dtype(np.int32), np.dtype(np.float32))
    }
    results = [m["content"] for m in trajectories[0].messages if m["role"] == "tool"]
    assert results == [f'{{"balance": {b}}}' for b in (5, 0, 8, 8, 0, 11)]
    hashes = {name: zlib.crc32(name.encode()) & 0x7FFFFFFF for name in ("one", "two", "three")}
    expected = {(7, 3, hashes[t.task_id], t.attempt, index) for t in trajectories for index in range(len(t.segments))}
    assert {request.key_ids for request in sampler.submitted} == expected
    assert len(sampler.submitted) == len(expected) == len({r.request_id for r in sampler.submitted})
    assert sampler.resets == 1
    assert {(r.temperature, r.top_p) for r in sampler.submitted} == {(1.0, 1.0)}
    assert {r.max_tokens for r in sampler.submitted} == {3_000, 2_000}
    assert len(judge.asked) == 10 and all(messages[0]["role"] == "user" for _, _, messages in judge.asked)


def test_temperature_and_top_p_reach_both_roles():
    sampler = ScriptedSampler(bank_script)
    play(sampler=sampler, temperature=0.0, top_p=0.95)
    assert {(r.temperature, r.top_p) for r in sampler.submitted} == {(0.0, 0.95)}


def random_script(prompt: str, key_ids) -> str:
    """Behaviour drawn from the key ids alone, as a sampler's is: calls, parallel calls, replies, errors, long texts."""
    draw = random.Random(str(key_ids))
    if is_rehearsal(prompt):
        result = draw.choice(['{"balance": 1}', "[]", '{"error": "no"}', "junk"])
        return scripted.answering(result) + "x" * draw.randrange(80)
    padding = "y" * draw.randrange(120)
    calls = [ANN] * draw.randrange(1, 4)
    return draw.choice([padding, padding, scripted.calling(*calls, before=padding), "<tool_call>"])


TASKS = [scripted.task(3, f"task {number}") for number in range(4)]
REFERENCE = [content(t) for t in play(random_script, TASKS, attempts=3)]


@settings(max_examples=25, deadline=None)
@given(slots=st.integers(1, 13), chunk=st.integers(1, 200), shuffle=st.integers(0, 99), delayed=st.booleans())
def test_slots_chunks_and_arrival_order_change_nothing(slots, chunk, shuffle, delayed):
    """Invariant 4, the host's half: keys and results do not depend on batch composition or timing."""
    sampler = ScriptedSampler(random_script, slots=slots, chunk=chunk, shuffle=shuffle)
    with ThreadPoolExecutor(4) as pool:
        reward = SlowJudge(pool, random.Random(shuffle)) if delayed else scripted.Judge()
        assert [content(t) for t in play(sampler=sampler, tasks=TASKS, attempts=3, reward=reward)] == REFERENCE
    assert len({reason for _, _, _, reason, *_ in REFERENCE}) >= 3  # the script does take different ends


@settings(max_examples=25, deadline=None)
@given(
    slots=st.tuples(st.integers(1, 13), st.integers(1, 13)), chunks=st.tuples(st.integers(1, 200), st.integers(1, 90))
)
def test_two_players_who_write_alike_play_as_one_does(slots, chunks):
    """Keys know no player, and each sampler gets its role's requests with its own parameters, and has work when called.

    (A scripted sampler refuses other parameters than its own, and a step with nothing to do.)
    """
    sampler, other = (
        ScriptedSampler(random_script, slots[i], chunks[i], params=("params", "others")[i]) for i in (0, 1)
    )
    played = play(sampler=sampler, tasks=TASKS, attempts=3, rehearser=Player(other, "others"))
    assert [content(t) for t in played] == REFERENCE
    assert {is_rehearsal(CHAT.decode(request.prompt_tokens)) for request in sampler.submitted} == {False}
    assert {is_rehearsal(CHAT.decode(request.prompt_tokens)) for request in other.submitted} == {True}
    assert sampler.resets == other.resets == 1


def test_what_is_rehearsed_is_what_the_rehearsing_player_writes():
    def other_bank(prompt: str, key_ids) -> str:
        assert is_rehearsal(prompt)
        return scripted.answering('{"balance": 77}')

    rehearser = Player(ScriptedSampler(other_bank, params="others"), "others")
    (trajectory,) = play(tasks=[scripted.task(1)], attempts=1, rehearser=rehearser)
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ['{"balance": 77}'] * 3
    rehearsed = [CHAT.decode(s.tokens[:-1].tolist()) for s in trajectory.segments if s.role is Role.REHEARSE]
    assert rehearsed == [scripted.answering('{"balance": 77}')] * 3
    assert CHAT.decode(trajectory.segments[0].tokens.tolist()).startswith("Looking.")


def test_a_task_draws_the_same_wherever_it_stands():
    alone = [content(t) for task in reversed(TASKS) for t in play(random_script, [task], attempts=2)]
    together = [content(t) for t in play(random_script, list(reversed(TASKS)), attempts=2)]
    assert [(c[0], c[2:]) for c in alone] == [(c[0], c[2:]) for c in together]


def test_a_task_that_stands_twice_draws_anew():
    """A batch may span two epochs; equal draws in two groups would be the same evidence counted twice."""
    twice = play(random_script, [TASKS[0], TASKS[1], TASKS[0]], attempts=2)
    more = play(random_script, [TASKS[0]], attempts=4)
    assert [(t.group_id, t.attempt) for t in twice] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (2, 3)]
    assert [content(t)[2:] for t in (*twice[:2], *twice[4:])] == [content(t)[2:] for t in more]
    assert len({str(content(t)[5]) for t in more}) == 4


class SlowJudge(scripted.Judge):
    def __init__(self, pool, draw):
        super().__init__()
        self.pool, self.draw = pool, draw

    def score_turn(self, task, turn, messages):
        return self.pool.submit(lambda delay: time.sleep(delay) or self.score, self.draw.random() * 0.003)


def test_rehearsed_and_real_give_the_same_act_stream_when_results_agree():
    real = Real(scripted.Bank)
    executed, imagined = play(responder=real), play()
    for left, right in zip(executed, imagined, strict=True):
        acts = [segment for segment in right.segments if segment.role is Role.ACT]
        assert [s.prompt_tokens.tolist() for s in left.segments] == [s.prompt_tokens.tolist() for s in acts]
        assert {s.role for s in left.segments} == {Role.ACT}
        assert [(m["role"], m["content"]) for m in left.messages] == [(m["role"], m["content"]) for m in right.messages]
        assert {m["rehearsed"] for m in left.messages if m["role"] == "tool"} == {False}
    assert real.calls == 3 * 10  # three calls per turn, five turns, two attempts
    assert [real.final_state(number) for number in range(6)] == [{"ann": 11}] * 2 + [{"ann": 8}] * 2 + [{"ann": 11}] * 2


def breaking_script(call: ToolCall):
    """The task "two" makes a call of its own kind; the others play as usual."""
    hash_ = zlib.crc32(b"two") & 0x7FFFFFFF
    return lambda prompt, key_ids: scripted.calling(call) if key_ids[2] == hash_ else bank_script(prompt, key_ids)


class Mute:
    """A responder that refuses in the one way that it should not: by raising instead of giving a future."""

    needs = Need.RESPONSE
    prompted = False

    def respond(self, trajectory_index, task, call, messages, act_text):
        raise OSError("no route")

    def end(self, trajectory_index, task):
        pass


class FaultyJudge(scripted.Judge):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def score_turn(self, task, turn, messages):
        return self.fault() if task.task_id == "two" else super().score_turn(task, turn, messages)


def raising(error):
    def fault():
        raise error

    return fault


def failed_future():
    future: Future = Future()
    future.set_exception(RuntimeError("verdict\nmalformed"))
    return future


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"script": breaking_script(ToolCall("broken", {})), "responder": "real"},
         "fault: ConnectionError: the bank is on fire"),
        ({"script": breaking_script(ToolCall("vague", {})), "responder": "real"},
         "fault: ValueError: a JSON str; a tool result is an object or an array"),
        ({"reward": FaultyJudge(failed_future)}, "fault: RuntimeError: verdict malformed"),
        ({"reward": FaultyJudge(raising(OSError("no judge")))}, "fault: OSError: no judge"),
        ({"reward": FaultyJudge(Future), "future_timeout_s": 0.05}, "fault: TimeoutError: no answer within 0.05 s"),
        ({"reward": FaultyJudge(lambda: scripted.finished(TurnScore(math.nan, (), True)))},
         "fault: ValueError: the reward of turn 0 is nan; accepted: 0 to 1"),
    ],
)  # fmt: skip
def test_an_outside_fault_masks_its_trajectory_and_no_other(changes, reason):
    changes = dict(changes)
    if changes.get("responder") == "real":
        changes["responder"] = Real(scripted.Bank)
    trajectories = play(**changes)
    for trajectory in trajectories:
        if trajectory.task_id == "two":
            assert trajectory.status == "failed" and math.isnan(trajectory.reward) and trajectory.reason == reason
            assert trajectory.segments  # what was generated stays, for the log
        else:
            assert (trajectory.status, trajectory.reward, trajectory.reason) == ("ok", 1.0, "done")


def test_a_responder_that_raises_at_once_is_a_fault_too():
    trajectories = play(responder=Mute())
    assert {(t.status, t.reason) for t in trajectories} == {("failed", "fault: OSError: no route")}


def test_an_environment_that_cannot_be_closed_is_a_fault():
    class Leaky(scripted.Bank):
        def state(self):
            raise OSError("gone")

    trajectories = play(responder=Real(Leaky), tasks=[scripted.task()])
    assert [(t.status, t.reason) for t in trajectories] == [("failed", "fault: OSError: gone")] * 2


def test_policy_errors_are_scored_and_not_masked():
    (first, second) = play(lambda prompt, key_ids: "<tool_call>", tasks=[scripted.task()])
    assert first.status == second.status == "ok" and first.reward == second.reward == 0.0
    assert first.reason == "malformed_call"


@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_nobody_waits_for_a_slow_trajectory(delay):
    """The first judge answers only once all other trajectories are over: a loop that waited for it would time out.

    With a delay the others wait for their judges too, so that at times nothing is left to decode.
    """
    others = threading.Event()
    first: Future = Future()

    class LastJudge(scripted.Judge):
        def score_turn(self, task, turn, messages):
            return first if task.task_id == "one" and turn == 0 else later(self.score, delay)

    def progress(finished, total, tokens):
        if finished == total - 1 and not others.is_set():
            others.set()
            first.set_result(TurnScore(1.0, (True,), True))

    trajectories = play(attempts=1, reward=LastJudge(), progress=progress, future_timeout_s=4)
    assert others.is_set() and [t.reward for t in trajectories] == [1.0] * 3


def later(value, delay: float) -> Future:
    """A future that has its value after `delay` seconds."""
    future: Future = Future()
    if delay:
        threading.Timer(delay, future.set_result, (value,)).start()
    else:
        future.set_result(value)
    return future


class HalfSlow(Mute):
    """Answers Ann's calls at once and all others late."""

    def respond(self, trajectory_index, task, call, messages, act_text):
        return later('{"balance": 1}', 0.0 if call == ANN else 0.3)


def test_the_loop_sleeps_while_only_the_outside_works():
    rounds = []
    (trajectory,) = play(
        tasks=[scripted.task()], attempts=1, responder=HalfSlow(), sampler=ScriptedSampler(bank_script, chunk=10_000),
        progress=lambda *now: rounds.append(now),
    )  # fmt: skip
    # two steps that wait outside (one answer of the first is there at once), and one judged at once
    assert trajectory.reason == "done" and len(rounds) <= 8


def test_progress_counts_trajectories_and_tokens():
    seen = []
    trajectories = play(progress=lambda *now: seen.append(now))
    tokens = sum(len(segment.tokens) for t in trajectories for segment in t.segments)
    assert seen[-1] == (6, 6, tokens) and seen == sorted(seen) and len(seen) > 5


def test_trajectories_under_way_go_first():
    sampler = ScriptedSampler(bank_script, slots=1)
    play(sampler=sampler, tasks=[scripted.task(1, "a"), scripted.task(1, "b")], attempts=1)
    names = [request.key_ids[2] == zlib.crc32(b"a") & 0x7FFFFFFF for request in sampler.submitted]
    assert names == [True] * 6 + [False] * 6


def test_no_tasks_no_trajectories_and_bad_arguments():
    assert play(tasks=[]) == []
    with pytest.raises(ValueError, match="attempts=0"):
        play(attempts=0)
    long_prompt = play(tasks=[scripted.task()], prompts=scripted.prompts(max_act_prompt=5))
    assert [(t.status, t.segments) for t in long_prompt] == [("failed", ())] * 2
    assert all(math.isnan(t.reward) for t in long_prompt)  # a limit that does not fit the data is no failure to act


def test_on_the_real_sampler_a_task_alone_and_beside_others_samples_the_same():
    """Invariant 4 end to end: a network of random weights, whose words are noise, in three turns with kept caches."""
    config = QwenConfig(vocab_size=336, width=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn=48, init_std=0.2)
    policy = make_policy(config)
    sampler = Sampler(
        policy,
        slots=3,
        max_length=1024,
        buckets=Buckets(prefill_lengths=(128,), prefill_rows=(1,), cache_lengths=(1024,)),
        vocab_limit=CHAT.vocab_size,
        stop_ids=(*CHAT.stop_ids, 20, 30),  # four of 330: messages of some 80 tokens
    )
    params = policy.init(jax.random.key(0))

    def sampled(*names: str) -> list[Trajectory]:
        return rollout(
            sampler, params, [scripted.task(3, name, tools=()) for name in names], attempts=2, responder=Rehearsed(),
            reward=scripted.Judge(), prompts=scripted.prompts(), limits=Limits(act_context=1_000, act_response=200),
            seed=1, step=0,
        )  # fmt: skip

    beside, alone = sampled("one", "two"), [*sampled("one"), *sampled("two")]
    assert sampler.stats.reused_tokens > 0
    segments = [segment for trajectory in beside for segment in trajectory.segments]
    assert len(segments) >= 5 and len({segment.tokens.tobytes() for segment in segments}) == len(segments)
    for left, right in zip(beside, alone, strict=True):
        assert (left.task_id, left.attempt, left.reason) == (right.task_id, right.attempt, right.reason)
        for a, b in zip(left.segments, right.segments, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist() and a.prompt_tokens.tolist() == b.prompt_tokens.tolist()
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
