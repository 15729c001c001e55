"""One trajectory as a pure state machine: what it waits for, what came, how it ends.

An Episode is frozen; each `on_...` function takes what the episode waited for and gives the next Episode. It does no
IO and knows neither the sampler nor who answers outside calls; `rollout.py` moves it along.

    ACT --calls--> REHEARSE or RESPONSE --results--> ACT (or, for calls that do not fit their schemas, NOTHING)
    ACT --plain reply--> JUDGE --score--> ACT (the next user turn), or NOTHING
    ACT --plain reply--> USER --message--> ACT, or, at the user's end, JUDGE   (tasks with a simulated user)

The ACT stream is a list of pieces that is only ever extended: prompt pieces, sampled ids as they were sampled, what
closes a message, tool results, user turns. Nothing is decoded and encoded again, and earlier pieces are shared between
successive episodes rather than copied.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence

import numpy as np

from envace_jax.chat import ParsedAssistant, parse_assistant
from envace_jax.roles import (
    ERROR_KEY,
    NoResult,
    Prompts,
    PromptTooLong,
    act_prompt,
    call_entries,
    canonical_result,
    check_rehearse_room,
    is_error_result,
    parse_rehearsal,
    read_rehearsal,
    rehearse_prompt,
)
from envace_jax.tool_schemas import refusal
from envace_jax.types import Message, Need, Role, Segment, Status, Task, ToolCall, Trajectory, TurnScore

# What the conversation says of calls beside one that was refused.
UNANSWERED = json.dumps({ERROR_KEY: {"code": "not_asked", "message": "another call was refused", "details": ""}})


class Reason(enum.StrEnum):
    """Why a trajectory ended. Only FAULT is not the policy's doing: it masks the trajectory."""

    DONE = "done"  # the last user turn was judged
    MALFORMED_CALL = "malformed_call"  # an assistant message whose calls cannot be read
    TOO_MANY_CALLS = "too_many_calls"  # more parallel calls than the limit
    REHEARSAL_ERROR = "rehearsal_error"  # a rehearsed result is unreadable or says that the call cannot be executed
    TOOL_ERROR = "tool_error"  # the same from outside: a real tool, or another model that plays it
    REFUSED_CALL = "refused_call"  # a call that its tool's schema does not allow; nobody was asked (`schema_check`)
    REQUIRED_ITEM = "required_item"  # a checklist item that the next user turn requires was not met
    LENGTH = "length"  # what the policy wrote reached a response limit, the context limit, a prompt limit or its budget
    ASSISTANT_LIMIT = "assistant_limit"  # as many assistant messages as allowed
    USER_LIMIT = "user_limit"  # as many user turns as allowed
    GENERATION_LIMIT = "generation_limit"  # as many generations, both roles together, as allowed
    FAULT = "fault"  # something outside the policy failed or cannot fit; written "fault: <type>: <message>"


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of one trajectory; the defaults are the authors' for 8B. Prompt limits are in `roles.Prompts`."""

    assistant_turns: int = 30
    user_turns: int = 30  # a simulated user's messages count too
    parallel_calls: int = 20
    generations: int = 200  # both roles together
    act_context: int = 20_000  # tokens; an ACT prompt plus `act_response` must fit
    act_response: int = 8_000  # tokens
    rehearse_response: int = 8_000  # tokens

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"limit {field.name}={getattr(self, field.name)} must be at least 1")
        if self.act_response >= self.act_context:
            raise ValueError(
                f"limit act_response={self.act_response} leaves no room for a prompt in act_context={self.act_context}"
            )


@dataclasses.dataclass(frozen=True)
class Request:
    """A generation that an episode waits for. `index` will be the position of its segment in the trajectory."""

    role: Role
    index: int
    prompt_tokens: np.ndarray  # i32[P]
    max_tokens: int


@dataclasses.dataclass(frozen=True)
class Episode:
    """A trajectory under way. `requests` is non-empty exactly while `needs` is ACT or REHEARSE."""

    prompts: Prompts
    limits: Limits
    task: Task
    group_id: int
    attempt: int
    answered_by: Need  # REHEARSE or RESPONSE: who answers tool calls
    prompted: bool = False  # whether another model is asked by REHEARSE prompts, outside or in this process
    schema_check: bool = False  # whether a call that does not fit its tool's schema ends the episode unasked
    most_tokens: int = 0  # that may be sampled, both roles together; 0: no bound
    needs: Need = Need.NOTHING
    requests: tuple[Request, ...] = ()
    act_pieces: tuple[np.ndarray, ...] = ()  # i32 each; their concatenation is the ACT stream
    pending_calls: tuple[ToolCall, ...] = ()
    messages: tuple[Message, ...] = ()  # the conversation so far
    turn: int = 0  # the user turn under way
    turn_start: int = 0  # where in `messages` it begins (at its user message)
    assistant_turns: int = 0  # assistant messages so far
    segments: tuple[Segment, ...] = ()
    turn_scores: tuple[TurnScore, ...] = ()
    status: Status = "ok"
    reason: str = ""

    @property
    def act_tokens(self) -> np.ndarray:
        """The ACT stream, i32[T]."""
        return np.concatenate(self.act_pieces) if self.act_pieces else np.zeros(0, np.int32)

    @property
    def act_text(self) -> str:
        """The last assistant message as it was generated. Raises IndexError before the first."""
        return _text(self, [segment for segment in self.segments if segment.role is Role.ACT][-1])

    @property
    def turn_messages(self) -> tuple[Message, ...]:
        """The messages of the user turn under way, its user message first."""
        return self.messages[self.turn_start :]


def start(
    prompts: Prompts,
    limits: Limits,
    task: Task,
    group_id: int,
    attempt: int,
    *,
    answered_by: Need = Need.REHEARSE,
    prompted: bool = False,
    schema_check: bool = False,
    most_tokens: int = 0,
) -> Episode:
    """The episode before its first assistant message; already over, and masked, where its limits cannot hold the task.

    That is decided here for the whole task rather than at the prompt that does not fit: attempts that come so far would
    be masked, and those that fail earlier scored. Where a simulated user opens the conversation, it is decided then.
    Only a note that the limits cannot hold is left out.
    """
    if answered_by not in (Need.REHEARSE, Need.RESPONSE):
        raise ValueError(f"answered_by={answered_by} cannot answer tool calls; accepted: REHEARSE, RESPONSE")
    if task.scenario and len(task.user_turns) != 1:
        raise ValueError(f"task {task.task_id!r} has a simulated user and {len(task.user_turns)} user turns, not 1")
    episode = Episode(
        prompts,
        limits,
        task,
        group_id,
        attempt,
        answered_by,
        prompted,
        schema_check,
        most_tokens,
        messages=tuple(task.messages),
        turn_start=len(task.messages),
    )
    if task.scenario and not task.user_turns[0]:
        return dataclasses.replace(episode, needs=Need.USER)
    return _open(episode, task.user_turns[0] if task.user_turns else None)


def on_act(episode: Episode, segment: Segment) -> Episode:
    """The policy's assistant message arrived."""
    _expect(episode, Need.ACT)
    chat = episode.prompts.chat
    act_text = _text(episode, segment)
    parsed = parse_assistant(act_text)
    before = episode.messages
    episode = dataclasses.replace(
        _extend(episode, segment.tokens, chat.close(segment.tokens.tolist())),
        requests=(),
        messages=(*before, _assistant_message(parsed, act_text)),
        segments=(*episode.segments, segment),
        assistant_turns=episode.assistant_turns + 1,
    )
    if segment.finish_reason == "length":
        return _end(episode, Reason.LENGTH)
    if parsed.error is not None:
        return _end(episode, Reason.MALFORMED_CALL)
    if len(parsed.calls) > episode.limits.parallel_calls:
        return _end(episode, Reason.TOO_MANY_CALLS)
    if not parsed.calls:
        return dataclasses.replace(episode, needs=Need.USER if episode.task.scenario else Need.JUDGE)
    episode = dataclasses.replace(episode, pending_calls=tuple(parsed.calls))
    refusals = [refusal(episode.task.tools, call) for call in parsed.calls] if episode.schema_check else []
    if any(refusals):  # the episode is over, so nobody is asked for the other calls' results either
        return _take_results(episode, [text or UNANSWERED for text in refusals], Reason.REFUSED_CALL, rehearsed=False)
    if episode.answered_by is Need.RESPONSE:
        return dataclasses.replace(episode, needs=Need.RESPONSE)
    return _ask_rehearse(episode, before, act_text)


def on_rehearsed(episode: Episode, segments: Sequence[Segment]) -> Episode:
    """The answers to the pending calls that REHEARSE gave arrived, in call order.

    Where another model plays it (`prompted`), an answer that cannot be read is its fault, not the policy's.
    """
    _expect(episode, Need.REHEARSE)
    texts = [_text(episode, segment) for segment in segments]
    episode = dataclasses.replace(episode, segments=(*episode.segments, *segments))
    asked = episode.requests[0].max_tokens
    if asked < episode.limits.rehearse_response and any(segment.finish_reason == "length" for segment in segments):
        return _end(episode, Reason.LENGTH)  # its budget cut the answer, which says nothing of the call
    if episode.prompted:
        try:
            results = [read_rehearsal(text) for text in texts]
        except NoResult as fault:
            return on_fault(episode, fault)
        failure = Reason.TOOL_ERROR if any(map(is_error_result, results)) else None
    else:
        parsed = [parse_rehearsal(text) for text in texts]
        results = [result for result, _ in parsed]
        failure = None if all(ok for _, ok in parsed) else Reason.REHEARSAL_ERROR
    return _take_results(episode, results, failure, rehearsed=True)


def on_results(episode: Episode, results: Sequence[str]) -> Episode:
    """Outside answers to the pending calls arrived, in call order: JSON texts of an object or an array.

    Raises ValueError for any other text: that is the responder's fault, not the policy's.
    """
    _expect(episode, Need.RESPONSE)
    results = [canonical_result(result) for result in results]
    failure = Reason.TOOL_ERROR if any(map(is_error_result, results)) else None
    return _take_results(episode, results, failure, rehearsed=False)


def on_user(episode: Episode, text: str | None) -> Episode:
    """The simulated user's next message arrived; None: it has nothing more to say, and the turn is to be judged.

    Raises ValueError for an empty message, and where the user ends a conversation before it began: its fault.
    """
    _expect(episode, Need.USER)
    if text is None:
        if not episode.act_pieces:
            raise ValueError("the simulated user ended the conversation before it began")
        return dataclasses.replace(episode, needs=Need.JUDGE)
    if not text.strip():
        raise ValueError("the simulated user's message is empty")
    if not episode.act_pieces:
        return _open(episode, text)
    if sum(message["role"] == "user" for message in episode.turn_messages) >= episode.limits.user_turns:
        return _end(episode, Reason.USER_LIMIT)
    return _ask_act(_say(episode, text, episode.prompts.chat.user(text), _assistant_prefix(episode)))


def on_score(episode: Episode, score: TurnScore) -> Episode:
    """The user turn that ended was judged: begin the next one, or end.

    Raises ValueError for a reward outside [0, 1] or not finite: that is the judge's fault.
    """
    _expect(episode, Need.JUDGE)
    if not -1e-6 <= score.reward <= 1 + 1e-6:  # a sum of weights may miss 1 by rounding; nan fails the comparison
        raise ValueError(f"the reward of turn {episode.turn} is {score.reward}; accepted: 0 to 1")
    turn = episode.turn + 1
    episode = dataclasses.replace(episode, turn_scores=(*episode.turn_scores, score))
    if turn >= len(episode.task.user_turns):
        return _end(episode, Reason.DONE)
    if not score.proceed:
        return _end(episode, Reason.REQUIRED_ITEM)
    if turn >= episode.limits.user_turns:
        return _end(episode, Reason.USER_LIMIT)
    text = episode.task.user_turns[turn]
    episode = dataclasses.replace(episode, turn=turn, turn_start=len(episode.messages))
    return _ask_act(_say(episode, text, episode.prompts.chat.user(text), _assistant_prefix(episode)))


def on_fault(episode: Episode, error: BaseException) -> Episode:
    """Something outside the policy failed: the trajectory is masked, whatever it had earned."""
    message = " ".join(f"{Reason.FAULT}: {type(error).__name__}: {error}".split())
    return dataclasses.replace(_end(episode, message[:300]), status="failed")


def on_too_long(episode: Episode) -> Episode:
    """No REHEARSE prompt for the pending calls fits: a fault if none could have fitted, else the policy wrote too much.

    The same whether the policy was to answer or, by the same prompt, another model.
    """
    try:
        for call in episode.pending_calls:  # `start` looked at one call for all tools
            check_rehearse_room(episode.prompts, episode.task, call.name)
    except PromptTooLong as error:
        return on_fault(episode, error)
    return _end(episode, Reason.LENGTH)


def as_trajectory(episode: Episode) -> Trajectory:
    """The finished episode."""
    _expect(episode, Need.NOTHING)
    return Trajectory(
        task_id=episode.task.task_id,
        group_id=episode.group_id,
        attempt=episode.attempt,
        segments=episode.segments,
        reward=float("nan") if episode.status == "failed" else earned(episode.task, episode.turn_scores),
        status=episode.status,
        reason=episode.reason,
        messages=episode.messages,
        turn_scores=episode.turn_scores,
    )


def earned(task: Task, scores: Sequence[TurnScore]) -> float:
    """The reward of a trajectory: the mean over the task's user turns; turns not judged count 0."""
    return min(max(sum(score.reward for score in scores) / max(len(task.user_turns), 1), 0.0), 1.0)


def check_room(prompts: Prompts, limits: Limits, task: Task, answered_by: Need, prompt_length: int) -> None:
    """Raises PromptTooLong, naming the setting, where the task alone exceeds a limit, whatever the policy writes.

    `prompt_length` is that of the first ACT prompt, in tokens; `answered_by` is REHEARSE where calls are answered by
    REHEARSE prompts, whoever gets them. Results are not counted: how many calls are made, and of what, is the policy's
    doing.
    """
    prefix = len(prompts.chat.assistant_prefix(thinking=prompts.thinking))
    later = task.user_turns[1 : limits.user_turns]
    given = prompt_length + sum(len(prompts.chat.user(text)) + prefix for text in later)
    if given + limits.act_response > limits.act_context:
        raise PromptTooLong(
            f"limits.act_context={limits.act_context} cannot hold the {given} tokens of system text, tools and user "
            f"turns of task {task.task_id!r} and limits.act_response={limits.act_response}; raise it, or lower that"
        )
    if answered_by is Need.REHEARSE:
        check_rehearse_room(prompts, task)


def _open(episode: Episode, text: str | None) -> Episode:
    """The first user message, with which the ACT stream begins; None: the task's messages end with it, or with results
    that follow it."""
    try:
        prompt = act_prompt(episode.prompts, episode.task, text)
        asked_by = Need.REHEARSE if episode.prompted else episode.answered_by
        check_room(episode.prompts, episode.limits, episode.task, asked_by, len(prompt))
    except PromptTooLong as error:  # the data's or the settings' doing, or the user's: not the policy's
        if episode.task.note:  # which only helps
            return _open(dataclasses.replace(episode, task=dataclasses.replace(episode.task, note="")), text)
        return on_fault(episode, error)
    if text is not None:
        return _ask_act(_say(episode, text, prompt))
    users = [place for place, message in enumerate(episode.messages) if message["role"] == "user"]
    return _ask_act(_extend(dataclasses.replace(episode, turn_start=users[-1] if users else 0), prompt))


def _say(episode: Episode, text: str, *pieces: Sequence[int]) -> Episode:
    """Adds a user message, which `pieces` are in the ACT stream."""
    messages = (*episode.messages, {"role": "user", "content": text})
    return dataclasses.replace(_extend(episode, *pieces), messages=messages)


def _take_results(episode: Episode, results: Sequence[str], failure: Reason | None, *, rehearsed: bool) -> Episode:
    if len(results) != len(episode.pending_calls):
        raise ValueError(f"{len(results)} results for {len(episode.pending_calls)} pending calls")
    told = tuple(
        {"role": "tool", "name": call.name, "content": result, "rehearsed": rehearsed}
        for call, result in zip(episode.pending_calls, results, strict=True)
    )
    episode = dataclasses.replace(episode, requests=(), pending_calls=(), messages=(*episode.messages, *told))
    if failure is not None:
        return _end(episode, failure)
    return _ask_act(_extend(episode, episode.prompts.chat.tool_results(list(results)), _assistant_prefix(episode)))


def _ask_act(episode: Episode) -> Episode:
    limits, prompt = episode.limits, episode.act_tokens
    if episode.assistant_turns >= limits.assistant_turns:
        return _end(episode, Reason.ASSISTANT_LIMIT)
    if len(episode.segments) >= limits.generations:
        return _end(episode, Reason.GENERATION_LIMIT)
    if len(prompt) + limits.act_response > limits.act_context:
        return _end(episode, Reason.LENGTH)
    if not (room := _room(episode, limits.act_response)):
        return _end(episode, Reason.LENGTH)
    request = Request(Role.ACT, len(episode.segments), prompt, room)
    return dataclasses.replace(episode, needs=Need.ACT, requests=(request,))


def _ask_rehearse(episode: Episode, before: Sequence[Message], act_text: str) -> Episode:
    """Asks for all pending calls side by side: each sees the conversation before the message that made them."""
    first, room = len(episode.segments), _room(episode, episode.limits.rehearse_response, len(episode.pending_calls))
    if not room:
        return _end(episode, Reason.LENGTH)
    if first + len(episode.pending_calls) > episode.limits.generations:
        return _end(episode, Reason.GENERATION_LIMIT)
    try:
        prompts = [
            rehearse_prompt(episode.prompts, episode.task, before, act_text, call) for call in episode.pending_calls
        ]
    except PromptTooLong:
        return on_too_long(episode)
    requests = tuple(
        Request(Role.REHEARSE, first + position, np.asarray(prompt, np.int32), room)
        for position, prompt in enumerate(prompts)
    )
    return dataclasses.replace(episode, needs=Need.REHEARSE, requests=requests)


def _room(episode: Episode, limit: int, several: int = 1) -> int:
    """Tokens that each of `several` generations may have, at most `limit`; 0 where the budget is spent."""
    if not episode.most_tokens:
        return limit
    left = episode.most_tokens - sum(len(segment.tokens) for segment in episode.segments)
    return min(limit, left // several)


def _end(episode: Episode, reason: str) -> Episode:
    return dataclasses.replace(episode, needs=Need.NOTHING, requests=(), pending_calls=(), reason=str(reason))


def _extend(episode: Episode, *pieces: Sequence[int] | np.ndarray) -> Episode:
    """The only way that the ACT stream grows."""
    added = tuple(np.asarray(piece, np.int32) for piece in pieces)
    return dataclasses.replace(episode, act_pieces=(*episode.act_pieces, *added))


def _assistant_prefix(episode: Episode) -> list[int]:
    return episode.prompts.chat.assistant_prefix(thinking=episode.prompts.thinking)


def _text(episode: Episode, segment: Segment) -> str:
    """What a segment says, without the id that stopped it."""
    chat, tokens = episode.prompts.chat, segment.tokens.tolist()
    return chat.decode(tokens[:-1] if tokens and tokens[-1] in chat.stop_ids else tokens)


def _assistant_message(parsed: ParsedAssistant, text: str) -> Message:
    if parsed.error is not None:  # keep what was written: there is no reading of it
        return {"role": "assistant", "content": text}
    message: dict[str, object] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = call_entries(parsed.calls)
    return message


def _expect(episode: Episode, need: Need) -> None:
    if episode.needs is not need:
        raise ValueError(
            f"task {episode.task.task_id!r} attempt {episode.attempt} waits for {episode.needs.value}, not {need.value}"
        )
