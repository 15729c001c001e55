"""The simulated user: what it is asked, what its answers mean, and that what it said once is not asked again."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import scripted
from endpoint_server import FaultyServer

from envace_jax import users
from envace_jax.config import UserConfig
from envace_jax.endpoint import EndpointFault
from envace_jax.users import GREETING, SILENCE, SimulatedUser, asked, ended, read_message

WAIT = 120  # seconds before a test gives up
TASK = scripted.task(scenario="You are Ann and want your balance.")
CALL = {"type": "function", "function": {"name": "balance", "arguments": {"owner": "ann"}}}
CONVERSATION = (
    {"role": "system", "content": "You serve a bank."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "let me see", "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "name": "balance", "content": '{"balance": 5}', "rehearsed": False},
    {"role": "assistant", "content": "You have 5.", "reasoning_content": "secret"},
)


def test_the_user_sees_its_scenario_and_what_was_said_with_the_roles_exchanged():
    assert asked(TASK, CONVERSATION) == [
        {"role": "system", "content": "You are Ann and want your balance."},
        {"role": "user", "content": GREETING},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "You have 5."},
    ]


def test_a_greeting_of_the_task_takes_the_place_of_ours_and_silence_is_said():
    greeted = ({"role": "assistant", "content": "Bank here."}, *CONVERSATION[1:2], {"role": "assistant", "content": ""})
    assert [message["content"] for message in asked(TASK, greeted)[1:]] == ["Bank here.", "hello", SILENCE]
    assert asked(TASK, CONVERSATION[:1])[1:] == [{"role": "user", "content": GREETING}]


@pytest.mark.parametrize(
    ("text", "message"),
    [("  yes\n", "yes"), ("<think>\nshould I?\n</think>\n\nno", "no"), ("a </think> b </think> c", "c")],
)
def test_thoughts_are_no_part_of_a_message(text, message):
    assert read_message(text) == message


@pytest.mark.parametrize("text", ["", " \n", "<think>only</think>"])
def test_an_empty_message_is_refused(text):
    with pytest.raises(ValueError, match="empty"):
        read_message(text)


def test_what_ends_a_conversation():
    ends = ("###STOP###", "Thanks, bye! ###TRANSFER###", "###OUT-OF-SCOPE### I do not know")
    assert all(map(ended, ends))
    assert not any(map(ended, ("stop", "### STOP ###", "please transfer me")))


class Model:
    """Gives its answers in order and keeps the questions."""

    def __init__(self, *answers):
        self.answers, self.questions = list(answers), []

    def __call__(self, messages, read, **options):
        self.questions.append((messages, options))
        future: Future = Future()
        answer = self.answers.pop(0)
        future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(read(answer))
        return future


def test_the_end_is_none_and_options_are_passed_on(tmp_path):
    model = Model("hm?", "fine ###STOP###")
    user = SimulatedUser(model, name="m", options={"temperature": 0.5})
    assert user.answer(TASK, CONVERSATION).result() == "hm?"
    assert user.answer(TASK, CONVERSATION).result() is None
    assert [options for _, options in model.questions] == [{"temperature": 0.5}] * 2


def test_what_was_said_is_kept_for_this_run_and_the_next(tmp_path):
    model = Model("one", "two ###STOP###")
    user = SimulatedUser(model, name="m", cache=tmp_path / "kept.jsonl")
    first = [user.answer(TASK, CONVERSATION).result() for _ in range(2)]
    assert first == ["one", "one"] and len(model.questions) == 1
    assert user.answer(TASK, CONVERSATION[:2]).result() is None
    user.close()
    again = SimulatedUser(Model(), name="m", cache=tmp_path / "kept.jsonl")
    assert [again.answer(TASK, part).result() for part in (CONVERSATION, CONVERSATION[:2])] == ["one", None]
    other = SimulatedUser(Model("three"), name="another", cache=tmp_path / "kept.jsonl")
    assert other.answer(TASK, CONVERSATION).result() == "three"


def test_trials_of_an_evaluation_share_nothing_that_was_said(tmp_path):
    model = Model("one", "two", "for training")
    user = SimulatedUser(model, name="m", cache=tmp_path / "kept.jsonl")
    trials = [user.of_trial(seed) for seed in (5, 6, 5)]
    assert [trial.answer(TASK, CONVERSATION).result() for trial in trials] == ["one", "two", "one"]
    assert user.answer(TASK, CONVERSATION).result() == "for training"
    user.close()
    again = SimulatedUser(Model(), name="m", cache=tmp_path / "kept.jsonl")
    assert [again.of_trial(seed).answer(TASK, CONVERSATION).result() for seed in (5, 6)] == ["one", "two"]


def test_a_fault_is_raised_and_not_kept(tmp_path):
    user = SimulatedUser(Model(OSError("no line"), "back"), name="m", cache=tmp_path / "kept.jsonl")
    with pytest.raises(OSError, match="no line"):
        user.answer(TASK, CONVERSATION).result()
    assert user.answer(TASK, CONVERSATION).result() == "back"


def test_the_settings_choose_a_user_behind_an_endpoint(tmp_path):
    with users.chosen(UserConfig(), tmp_path) as none:
        assert none is None
    server = FaultyServer(lambda body: "hi", lambda number, body: "text  " if number == 0 else None)
    with server.running() as url:
        settings = UserConfig(urls=(url,), model="player", temperature=0.25, retries=1)
        with users.chosen(settings, tmp_path) as user:
            assert user is not None
            assert user.answer(TASK, CONVERSATION).result(WAIT) == "hi"  # the empty one is tried again
            assert user.answer(TASK, CONVERSATION).result(WAIT) == "hi"
            assert [user.counts[name] for name in ("tries", "fault_answer", "cache_hits")] == [2, 1, 1]
    assert server.bodies[0]["messages"] == asked(TASK, CONVERSATION)
    assert (server.bodies[0]["model"], server.bodies[0]["temperature"]) == ("player", 0.25)
    assert (tmp_path / users.ANSWERS_FILE).exists()
    with FaultyServer(str, lambda *_: "status 401").running() as url:
        with users.chosen(UserConfig(urls=(url,), model="player"), tmp_path / "other") as user:
            with pytest.raises(EndpointFault):
                user.answer(TASK, CONVERSATION).result(WAIT)
