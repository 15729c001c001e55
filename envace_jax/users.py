"""The simulated user: another language model that plays a task's scenario and answers the assistant's replies.

After tau2's user simulator: it sees the scenario as its system message and the conversation with the roles exchanged,
without calls and their results, and ends the conversation with a word of ENDS. Knows no tokens, tools or rewards.
"""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from envace_jax.answers import AnswerCache, key_of
from envace_jax.config import UserConfig
from envace_jax.endpoint import open_endpoint, sampling_options
from envace_jax.types import Json, Message, MessageList, Task

ENDS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
GREETING = "Hi! How can I help you today?"  # what the user answers first, where nobody has spoken
SILENCE = "(The agent says nothing.)"  # an empty message is refused by many servers
ANSWERS_FILE = "user_messages.jsonl"  # in the work folder

# Asks a model: (messages, read, **options) -> `read` of the answer's text, as `endpoint.Endpoint.ask` does.
Ask = Callable[..., Future[str]]


class User(Protocol):
    """Who answers the assistant's replies. `counts` are for a run's metrics."""

    counts: collections.Counter[str]

    def answer(self, task: Task, messages: MessageList) -> Future[str | None]:
        """The user's next message in the conversation so far, None at its end. An exception in the future masks the
        trajectory."""
        ...


class SimulatedUser:
    """A user played by a model. With `cache` a file keeps what it said by what it was asked (`answers.py`), for this
    run and later ones; `name` stands for the model there."""

    def __init__(
        self,
        ask: Ask,
        *,
        name: str,
        cache: Path | None = None,
        options: Mapping[str, Json] | None = None,
        counts: collections.Counter[str] | None = None,
    ):
        self.counts = collections.Counter[str]() if counts is None else counts
        self._ask, self._name, self._options = ask, name, dict(options or {})
        self._trial: list[int] = []  # the seed of an evaluation's trial
        self._cache = None if cache is None else AnswerCache(cache, self.counts)

    def answer(self, task: Task, messages: MessageList) -> Future[str | None]:
        question = asked(task, messages)

        def ask() -> Future[str]:
            return self._ask(question, read_message, **self._options)

        said = (
            ask()
            if self._cache is None
            else self._cache.answer(
                key_of([self._name, self._options, question, *self._trial]), ask, lambda text: isinstance(text, str)
            )
        )
        answer: Future[str | None] = Future()
        answer.set_running_or_notify_cancel()  # whoever has waited too long goes on; what comes is kept all the same

        def settle(done: Future[str]) -> None:
            try:
                answer.set_result(None if ended(done.result()) else done.result())
            except BaseException as fault:
                answer.set_exception(fault)

        said.add_done_callback(settle)
        return answer

    def of_trial(self, seed: int) -> SimulatedUser:
        """The same user, who keeps what it says in the trial with that seed apart: else all trials of a task would be
        with one draw of its words."""
        found = copy.copy(self)
        found._trial = [seed]
        return found

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()


def asked(task: Task, messages: MessageList) -> list[Message]:
    """What a model is asked for the user's next message: the scenario, and what was said to and by the user."""
    said = [
        message for message in messages if message["role"] in ("user", "assistant") and not message.get("tool_calls")
    ]
    turned = [
        {"role": "user", "content": message["content"] or SILENCE}
        if message["role"] == "assistant"
        else {"role": "assistant", "content": message["content"]}
        for message in said
    ]
    if not turned or turned[0]["role"] == "assistant":
        turned.insert(0, {"role": "user", "content": GREETING})
    return [{"role": "system", "content": task.scenario}, *turned]


def read_message(text: str) -> str:
    """The message in an answer, without thoughts before it. Raises ValueError where there is none."""
    message = text.rpartition("</think>")[2].strip()
    if not message:
        raise ValueError("an empty message")
    return message


def ended(message: str) -> bool:
    """Whether a user's message ends the conversation."""
    return any(end in message for end in ENDS)


@contextlib.contextmanager
def chosen(settings: UserConfig, workdir: Path) -> Iterator[SimulatedUser | None]:
    """The user that a run's settings ask for, or None; closed in the end."""
    if not settings.urls:
        yield None
        return
    endpoint, options = open_endpoint(settings), sampling_options(settings)
    cache = workdir / ANSWERS_FILE if settings.keep_answers else None
    user = SimulatedUser(endpoint.ask, name=settings.model, cache=cache, options=options, counts=endpoint.counts)
    try:
        yield user
    finally:
        endpoint.close()
        user.close()
