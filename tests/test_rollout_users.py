"""Conversations with a simulated user through the rollout loop, on a scripted sampler."""

from __future__ import annotations

import dataclasses
import math
from concurrent.futures import Future

import pytest
import scripted
from test_rollout import CHAT, DEPOSIT, TASKS, ScriptedSampler, content, later, play

from envace_jax.responders import Real


class ScriptedUser:
    """Says what `says` gives for the number of messages it has said; an exception of it is raised in the future."""

    counts: dict[str, int] = {}

    def __init__(self, says, delay=0.0):
        self.says, self.delay, self.asked = says, delay, []

    def answer(self, task, messages):
        self.asked.append((task.task_id, tuple(messages)))
        said = sum(message["role"] == "user" for message in messages)
        try:
            return later(self.says(task.task_id, said), self.delay)
        except RuntimeError as fault:
            future: Future = Future()
            future.set_exception(fault)
            return future


def simulated_task(name: str):
    return dataclasses.replace(scripted.task(1, name), user_turns=("",), scenario=f"You are {name}.")


def talk(prompt: str, key_ids) -> str:
    """Replies twice, with a deposit in between; results are not rehearsed here."""
    return ["whose?", scripted.calling(DEPOSIT), "done"][min(key_ids[4], 2)]


def says(name: str, said: int) -> str | None:
    return [f"turn {name}", "ann's", None][said]


@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_a_simulated_user_is_asked_after_every_reply_and_what_it_says_reaches_the_policy(delay):
    user, sampler = ScriptedUser(says, delay), ScriptedSampler(talk)
    tasks = [simulated_task("one"), scripted.task(1, "two"), simulated_task("three")]
    judge, real = scripted.Judge(0.5), Real(scripted.Bank)
    trajectories = play(sampler=sampler, tasks=tasks, reward=judge, responder=real, user=user)
    assert [(t.status, t.reason, t.reward) for t in trajectories] == [("ok", "done", 0.5)] * 6
    for trajectory in (*trajectories[:2], *trajectories[4:]):
        said = [(m["role"], m["content"]) for m in trajectory.messages[1:]]
        assert said == [
            ("user", f"turn {trajectory.task_id}"), ("assistant", "whose?"), ("user", "ann's"), ("assistant", ""),
            ("tool", '{"balance": 8}'), ("assistant", "done"),
        ]  # fmt: skip
        prompts = [CHAT.decode(segment.prompt_tokens) for segment in trajectory.segments]
        assert [("turn " in text, "ann's" in text) for text in prompts] == [(True, False), (True, True), (True, True)]
    # the judge sees whole conversations, once each; the task without a user is judged after its first reply
    assert sorted((name, len(messages)) for name, _, messages in judge.asked) == [
        ("one", 6), ("one", 6), ("three", 6), ("three", 6), ("two", 2), ("two", 2),
    ]  # fmt: skip
    assert sorted(name for name, _ in user.asked) == ["one"] * 6 + ["three"] * 6
    assert all(messages[-1]["role"] in ("system", "assistant") for _, messages in user.asked)


def test_tasks_without_a_simulated_user_go_as_they_would_without_one():
    alone = [content(trajectory) for trajectory in play(tasks=TASKS)]
    beside = play(tasks=[*TASKS, simulated_task("four")], user=ScriptedUser(lambda name, said: ["turn x", None][said]))
    assert [content(trajectory) for trajectory in beside[: len(alone)]] == alone


def broken_user(name: str, said: int) -> str | None:
    if said and name == "one":
        raise RuntimeError("no line")
    return says(name, said)


@pytest.mark.parametrize(
    ("user", "reason"),
    [
        (ScriptedUser(broken_user), "fault: RuntimeError: no line"),
        (ScriptedUser(lambda name, said: says(name, said) if said < 1 or name != "one" else " "),
         "fault: ValueError: the simulated user's message is empty"),
        (ScriptedUser(lambda name, said: None if name == "one" else says(name, said)),
         "fault: ValueError: the simulated user ended the conversation before it began"),
    ],
)  # fmt: skip
def test_a_fault_of_the_simulated_user_masks_its_trajectory_and_no_other(user, reason):
    tasks = [simulated_task("one"), simulated_task("two")]
    trajectories = play(talk, tasks=tasks, responder=Real(scripted.Bank), user=user)
    assert [(t.status, t.reason) for t in trajectories] == [("failed", reason)] * 2 + [("ok", "done")] * 2
    assert all(math.isnan(t.reward) for t in trajectories[:2]) and [t.reward for t in trajectories[2:]] == [1.0, 1.0]


def test_a_simulated_user_that_is_slow_or_missing_is_a_fault():
    class Silent(ScriptedUser):
        def answer(self, task, messages):
            return Future()

    for user, reason in ((Silent(says), "fault: TimeoutError: no answer within 0.05 s"), (None, "there is none")):
        trajectories = play(talk, tasks=[simulated_task("one")], user=user, future_timeout_s=0.05)
        assert all(t.status == "failed" and reason in t.reason and not t.segments for t in trajectories)
