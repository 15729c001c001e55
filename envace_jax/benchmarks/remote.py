"""A policy behind an OpenAI-compatible address plays a benchmark's conversations, by messages instead of tokens.

The calls are executed and the user is played as for a policy in this process. Conversations go on side by side, each in
a thread that waits for the server. Knows no benchmark and no scores.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from envace_jax.benchmarks import Case
from envace_jax.benchmarks.policies import OnEnd, TrialUser, Unexecuted, benign_environment, final_state
from envace_jax.chat import CALL_CLOSE, CALL_OPEN, parse_assistant
from envace_jax.endpoint import Endpoint, EndpointFault
from envace_jax.episode import Limits, Reason
from envace_jax.responders import Real, Responder
from envace_jax.rewards import Reward, Unscored
from envace_jax.roles import call_entries, canonical_result, is_error_result, message_calls
from envace_jax.rollout import Progress
from envace_jax.types import Json, Message, Task, ToolCall, Trajectory, TurnScore
from envace_jax.users import User

WAIT_S = 600.0  # for an environment or a user
TOO_LONG = ("status 400", "status 413")  # how servers answer a conversation that their context cannot hold


@dataclasses.dataclass(frozen=True)
class Remote:
    """A policy behind an address. `request` are further members of every request: max_tokens, rehearsal, ...

    Of `limits` those of user turns and parallel calls count; lengths are the server's.
    """

    about: Mapping[str, Json]
    endpoint: Endpoint
    temperature: float = 0.6
    top_p: float = 0.95
    user: TrialUser | None = None
    request: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    limits: Limits = Limits()

    def play(
        self, cases: Sequence[Case], *, seed: int, steps: int, reward: Reward | None, on_end: OnEnd, progress: Progress
    ) -> None:
        """As `policies.Policy.play`. A fault of the server, an environment or the user masks its conversation."""
        responder = Unexecuted() if cases and cases[0].one_message else Real(benign_environment)
        user = None if self.user is None else self.user.of_trial(seed)
        judge = Unscored() if reward is None else reward
        lock, finished = threading.Lock(), 0

        def one(number: int, case: Case) -> None:
            nonlocal finished
            talk = _Talk(self, case.task, seed, 1 if case.one_message else steps, judge, responder, number, user)
            trajectory = _played(talk, number, case.task)
            with lock:
                finished += 1
                on_end(case, trajectory, final_state(responder, number, case.task, trajectory), None)
                progress(finished, len(cases), self.endpoint.counts["completion_tokens"])

        pool = ThreadPoolExecutor(self.endpoint.settings.concurrency, thread_name_prefix="conversation")
        try:
            for future in as_completed([pool.submit(one, number, case) for number, case in enumerate(cases)]):
                future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            responder.close()


def _played(talk: _Talk, number: int, task: Task) -> Trajectory:
    """The conversation, played to its end; masked where something outside failed."""
    status, reason = "ok", ""
    try:
        try:
            reason = str(talk.run())
        finally:
            talk.responder.end(number, task)
    except Exception as error:  # whatever failed outside masks this conversation and no other
        status, reason = "failed", " ".join(f"{Reason.FAULT}: {type(error).__name__}: {error}".split())[:300]
    earned = sum(score.reward for score in talk.scores) / max(len(task.user_turns), 1)
    return Trajectory(
        task_id=task.task_id, group_id=number, attempt=0, segments=(),
        reward=min(max(earned, 0.0), 1.0) if status == "ok" else float("nan"), status=status,  # type: ignore[arg-type]
        reason=reason, messages=tuple(talk.messages), turn_scores=tuple(talk.scores),
    )  # fmt: skip


class _Talk:
    """One conversation under way. It ends for the reasons that `episode.py` ends one for, and in that order."""

    def __init__(
        self,
        policy: Remote,
        task: Task,
        seed: int,
        steps: int,
        reward: Reward,
        responder: Responder,
        number: int,
        user: User | None,
    ):
        self.messages: list[Message] = list(task.messages)
        self.scores: list[TurnScore] = []
        self.responder = responder
        self._policy, self._task, self._seed, self._left = policy, task, seed, steps
        self._reward, self._number, self._user = reward, number, user
        self._answered = False

    def run(self) -> Reason:
        """Plays it to its end, and says why it ended."""
        turns = self._task.user_turns or (None,)
        for turn, text in enumerate(turns):
            start = len(self.messages)
            if text is None:  # it goes on from the last user message, or the results after it
                start = max((at for at, said in enumerate(self.messages) if said["role"] == "user"), default=0)
            else:
                self._say(text or self._opening())
            ended = self._turn(start)
            if ended is not None:
                return ended
            score = self._reward.score_turn(self._task, turn, tuple(self.messages[start:])).result(WAIT_S)
            self.scores.append(score)
            if turn + 1 < len(turns) and not score.proceed:
                return Reason.REQUIRED_ITEM
            if turn + 1 < len(turns) and turn + 1 >= self._policy.limits.user_turns:
                return Reason.USER_LIMIT
        return Reason.DONE

    def _turn(self, start: int) -> Reason | None:
        """Everything up to the next user turn of the task. Why the conversation ended, or None."""
        while True:
            if self._left == 0:
                return Reason.ASSISTANT_LIMIT
            self._left -= 1
            calls, reason = self._ask()
            if reason is None and calls:
                reason = self._execute(calls)
            if reason is not None:
                return reason
            if calls:
                continue
            if not self._task.scenario or (text := self._user_says()) is None:
                return None
            said = sum(message["role"] == "user" for message in self.messages[start:])
            if said >= self._policy.limits.user_turns:
                return Reason.USER_LIMIT
            self._say(text)

    def _ask(self) -> tuple[list[ToolCall], Reason | None]:
        """The server's next message, taken into the conversation: its calls, or why it is the last."""
        policy = self._policy
        fields: dict[str, Json] = {
            "temperature": policy.temperature, "top_p": policy.top_p, "seed": self._place_seed(), **policy.request,
        }  # fmt: skip
        if self._task.tools:
            fields["tools"] = [dict(tool) for tool in self._task.tools]
        try:
            choice = policy.endpoint.complete(on_the_wire(self.messages), **fields).result()
        except EndpointFault as fault:
            if self._answered and fault.kind in TOO_LONG:  # it began as it should, and the policy made it too long
                return [], Reason.LENGTH
            raise
        self._answered = True
        message, calls = read_message(choice["message"])
        self.messages.append(message)
        if choice.get("finish_reason") == "length":
            return [], Reason.LENGTH
        if calls is None:
            return [], Reason.MALFORMED_CALL
        return calls, Reason.TOO_MANY_CALLS if len(calls) > policy.limits.parallel_calls else None

    def _place_seed(self) -> int:
        """Of the next request: another one for every task and message, since a server may draw by the seed alone. With
        rehearsal the same for a user turn, for a server keeps its memory by the seed."""
        role = "user" if self._policy.request.get("rehearsal") else "assistant"
        return seed_of(self._seed, self._task.task_id, sum(message["role"] == role for message in self.messages))

    def _execute(self, calls: Sequence[ToolCall]) -> Reason | None:
        asked = [self.responder.respond(self._number, self._task, call, tuple(self.messages)) for call in calls]
        results = [canonical_result(future.result(WAIT_S)) for future in asked]
        for call, result in zip(calls, results, strict=True):
            self.messages.append({"role": "tool", "name": call.name, "content": result, "rehearsed": False})
        return Reason.TOOL_ERROR if any(map(is_error_result, results)) else None

    def _opening(self) -> str:
        """A simulated user opens the conversation."""
        text = self._user_says()
        if text is None:
            raise ValueError("the simulated user ended the conversation before it began")
        return text

    def _user_says(self) -> str | None:
        if self._user is None:
            raise ValueError(f"task {self._task.task_id!r} needs a simulated user, and there is none")
        text = self._user.answer(self._task, tuple(self.messages)).result(WAIT_S)
        if text is not None and not text.strip():
            raise ValueError("the simulated user's message is empty")
        return text

    def _say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})


def seed_of(seed: int, task_id: str, place: int) -> int:
    """A seed for a request, 0 to 2^31 - 1, which every server takes; in every process the same."""
    digest = hashlib.sha256(json.dumps([seed, task_id, place]).encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


def on_the_wire(messages: Sequence[Message]) -> list[dict[str, Json]]:
    """Messages as a server takes them: calls with ids and arguments as text, results with the ids of their calls, and
    thoughts, which the server's own template keeps or leaves out."""
    found: list[dict[str, Json]] = []
    waiting: list[str] = []
    for place, message in enumerate(messages):
        told: dict[str, Json] = {"role": message["role"], "content": message.get("content") or ""}
        if message.get("reasoning_content"):
            told["reasoning_content"] = message["reasoning_content"]
        if message["role"] == "assistant" and message.get("tool_calls"):
            entries = call_entries(message_calls(message), as_text=True)
            waiting = [f"call_{place}_{number}" for number in range(len(entries))]
            told["tool_calls"] = [{"id": name} | entry for name, entry in zip(waiting, entries, strict=True)]
        elif message["role"] == "tool":
            told["tool_call_id"] = waiting.pop(0) if waiting else f"call_{place}"
        found.append(told)
    return found


def read_message(message: Mapping[str, Any]) -> tuple[Message, list[ToolCall] | None]:
    """A server's message in our form, and its calls; None where these cannot be read.

    Servers leave calls that they cannot read in the content as they were written, and some leave all there.
    """
    made: dict[str, Json] = {"role": "assistant", "content": message.get("content") or ""}
    if message.get("reasoning_content"):
        made["reasoning_content"] = message["reasoning_content"]
    calls: list[ToolCall] = []
    for entry in message.get("tool_calls") or ():
        try:
            function = entry["function"]
            arguments = function["arguments"]
            arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
            calls.append(ToolCall(function["name"] + "", dict(arguments)))
        except (KeyError, TypeError, ValueError, RecursionError):
            return made, None
    if not calls and any(tag in made["content"] for tag in (CALL_OPEN, CALL_CLOSE)):
        parsed = parse_assistant(made["content"])
        if parsed.error is not None:
            return made, None
        if parsed.calls:
            made["content"], calls = parsed.content, list(parsed.calls)
    if calls:
        made["tool_calls"] = call_entries(calls)
    return made, calls
