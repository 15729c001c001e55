"""A policy behind an OpenAI-compatible address plays a benchmark's conversations, by messages instead of tokens.

The calls are executed and the user is played as for a policy in this process. Conversations go on side by side, each in
a thread that waits for the server. Knows no benchmark and no scores.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from envace_jax.benchmarks import Case
from envace_jax.benchmarks.policies import OnEnd, Unexecuted, benign_environment, final_state
from envace_jax.endpoint import Endpoint
from envace_jax.episode import Reason
from envace_jax.responders import Real, Responder
from envace_jax.rewards import Reward
from envace_jax.roles import message_calls
from envace_jax.rollout import Progress
from envace_jax.types import Json, Message, Task, ToolCall, Trajectory, TurnScore
from envace_jax.users import User

WAIT_S = 600.0  # for an environment or a user


class Malformed(ValueError):
    """A message of the server whose calls cannot be read."""


@dataclasses.dataclass(frozen=True)
class Remote:
    """A policy behind an address. `request` are further members of every request: max_tokens, rehearsal, ..."""

    about: Mapping[str, Json]
    endpoint: Endpoint
    temperature: float = 0.6
    top_p: float = 0.95
    user: User | None = None
    request: Mapping[str, Json] = dataclasses.field(default_factory=dict)

    def play(
        self, cases: Sequence[Case], *, seed: int, steps: int, reward: Reward | None, on_end: OnEnd, progress: Progress
    ) -> None:
        """As `policies.Policy.play`. A fault of the server, an environment or the user masks its conversation."""
        responder = Unexecuted() if cases and cases[0].one_message else Real(benign_environment)
        lock, finished = threading.Lock(), 0

        def one(number: int, case: Case) -> None:
            nonlocal finished
            trajectory = self._played(number, case, seed, steps, reward, responder)
            with lock:
                finished += 1
                on_end(case, trajectory, final_state(responder, number, case.task), None)
                progress(finished, len(cases), self.endpoint.counts["completion_tokens"])

        pool = ThreadPoolExecutor(self.endpoint.settings.concurrency, thread_name_prefix="conversation")
        try:
            for future in as_completed([pool.submit(one, number, case) for number, case in enumerate(cases)]):
                future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            responder.close()

    def _played(
        self, number: int, case: Case, seed: int, steps: int, reward: Reward | None, responder: Responder
    ) -> Trajectory:
        talk = _Talk(self, case.task, seed, 1 if case.one_message else steps, reward, responder, number)
        status, reason = "ok", ""
        try:
            reason = talk.run()
        except Malformed:
            reason = str(Reason.MALFORMED_CALL)
        except Exception as error:  # whatever failed outside masks this conversation and no other
            status, reason = "failed", " ".join(f"{Reason.FAULT}: {type(error).__name__}: {error}".split())[:300]
        try:
            responder.end(number, case.task)
        except Exception as error:
            status, reason = "failed", " ".join(f"{Reason.FAULT}: {type(error).__name__}: {error}".split())[:300]
        turns = max(len(case.task.user_turns), 1)
        earned = sum(score.reward for score in talk.scores) / turns
        return Trajectory(
            task_id=case.task.task_id, group_id=number, attempt=0, segments=(),
            reward=earned if status == "ok" else float("nan"), status=status,  # type: ignore[arg-type]
            reason=reason, messages=tuple(talk.messages), turn_scores=tuple(talk.scores),
        )  # fmt: skip


class _Talk:
    """One conversation under way."""

    def __init__(
        self,
        policy: Remote,
        task: Task,
        seed: int,
        steps: int,
        reward: Reward | None,
        responder: Responder,
        number: int,
    ):
        self.messages: list[Message] = list(task.messages)
        self.scores: list[TurnScore] = []
        self._policy, self._task, self._seed, self._left = policy, task, seed, steps
        self._reward, self._responder, self._number = reward, responder, number

    def run(self) -> str:
        """Plays it to its end, and says why it ended."""
        for turn, text in enumerate(self._task.user_turns or (None,)):
            start = len(self.messages)
            if text == "":
                text = self._user()  # a simulated user opens the conversation
                if text is None:
                    raise ValueError("the simulated user ended the conversation before it began")
            if text is not None:
                self.messages.append({"role": "user", "content": text})
            ended = self._turn()
            if ended is not None:
                return str(ended)
            if self._reward is not None:
                score = self._reward.score_turn(self._task, turn, tuple(self.messages[start:])).result(WAIT_S)
                self.scores.append(score)
                if not score.proceed:
                    return str(Reason.REQUIRED_ITEM)
        return str(Reason.DONE)

    def _turn(self) -> Reason | None:
        """Everything up to the next user turn of the task. Why the conversation ended, or None."""
        while True:
            if self._left == 0:
                return Reason.ASSISTANT_LIMIT
            self._left -= 1
            calls, reason = self._ask()
            if reason is not None:
                return reason
            if calls:
                self._execute(calls)
            elif not self._task.scenario:
                return None
            else:
                text = self._user()
                if text is None:
                    return None
                self.messages.append({"role": "user", "content": text})

    def _ask(self) -> tuple[list[ToolCall], Reason | None]:
        """The server's next message, taken into the conversation: its calls, or why it is the last."""
        policy = self._policy
        fields: dict[str, Json] = {
            "temperature": policy.temperature, "top_p": policy.top_p, "seed": self._seed, **policy.request,
        }  # fmt: skip
        if self._task.tools:
            fields["tools"] = [dict(tool) for tool in self._task.tools]
        choice = policy.endpoint.complete(on_the_wire(self.messages), **fields).result()
        message, calls = read_message(choice["message"])
        self.messages.append(message)
        if calls is None:
            raise Malformed
        return calls, Reason.LENGTH if choice.get("finish_reason") == "length" else None

    def _execute(self, calls: Sequence[ToolCall]) -> None:
        asked = [self._responder.respond(self._number, self._task, call, tuple(self.messages)) for call in calls]
        for call, future in zip(calls, asked, strict=True):
            self.messages.append({"role": "tool", "name": call.name, "content": future.result(WAIT_S)})

    def _user(self) -> str | None:
        if self._policy.user is None:
            raise ValueError(f"task {self._task.task_id!r} needs a simulated user, and there is none")
        return self._policy.user.answer(self._task, tuple(self.messages)).result(WAIT_S)


def on_the_wire(messages: Sequence[Message]) -> list[dict[str, Json]]:
    """Messages as a server takes them: calls with ids and arguments as text, results with the ids of their calls."""
    found: list[dict[str, Json]] = []
    waiting: list[str] = []
    for place, message in enumerate(messages):
        told: dict[str, Json] = {"role": message["role"], "content": message.get("content") or ""}
        if message["role"] == "assistant" and message.get("tool_calls"):
            calls = message_calls(message)
            waiting = [f"call_{place}_{number}" for number in range(len(calls))]
            told["tool_calls"] = [
                {"id": name, "type": "function",
                 "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}}
                for name, call in zip(waiting, calls, strict=True)
            ]  # fmt: skip
        elif message["role"] == "tool":
            told["tool_call_id"] = waiting.pop(0) if waiting else f"call_{place}"
        found.append(told)
    return found


def read_message(message: Mapping[str, Any]) -> tuple[Message, list[ToolCall] | None]:
    """A server's message in our form, and its calls; None where these cannot be read."""
    made: dict[str, Json] = {"role": "assistant", "content": message.get("content") or ""}
    if message.get("reasoning_content"):
        made["reasoning_content"] = message["reasoning_content"]
    calls = []
    for entry in message.get("tool_calls") or ():
        try:
            function = entry["function"]
            arguments = function["arguments"]
            arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
            calls.append(ToolCall(function["name"] + "", dict(arguments)))
        except (KeyError, TypeError, ValueError, RecursionError):
            return made, None
    if calls:
        made["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}} for call in calls
        ]
    return made, calls
