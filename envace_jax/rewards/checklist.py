"""The checklist reward: weighted items per user turn, each with a program check.

After the authors' checklist scoring: an item holds if any step of the turn passes it, and items about calls or results
fail in a step whose tool result is an error. Knows nothing of tokens, policies or who answered the calls. Items without
a check need a judge, which is another reward behind the same interface.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from envace_jax.json_values import json_equal
from envace_jax.rewards import RewardUnavailable
from envace_jax.types import CheckItem, Json, Message, MessageList, Task, TurnScore

__all__ = ["ChecklistReward", "RewardUnavailable", "says"]

Step = list[tuple[str, Json, Json]]  # (tool name, arguments, result) of one assistant message's calls
_MISSING = object()


class ChecklistReward:
    """Scores a turn by the program checks of its items.

    `score_turn` returns a finished future: a TurnScore, or RewardUnavailable where an item has no check or one of an
    unknown kind. The turn's reward is the sum of the weights of the items that hold, in [0, 1]; the next turn may begin
    when every item with `required_for_next_turn` holds. An item whose `dependence` does not hold does not hold either.
    """

    def can_score(self, task: Task) -> bool:
        """Whether every item of the task has a program check."""
        return all(item.check is not None for turn in task.checklist for item in turn)

    def score_turn(self, task: Task, turn: int, turn_messages: MessageList) -> Future[TurnScore]:
        future: Future[TurnScore] = Future()
        items = task.checklist[turn]
        steps, reply = read_turn(turn_messages)
        try:
            passed = [passes(item, steps, reply) for item in items]
        except RewardUnavailable as fault:
            future.set_exception(RewardUnavailable(f"task {task.task_id}, turn {turn}: {fault}"))
            return future
        future.set_result(turn_score(items, passed))
        return future


def turn_score(items: Sequence[CheckItem], passed: Sequence[bool]) -> TurnScore:
    """The score of a turn whose items hold, each by itself, as `passed` says."""
    verdicts = _with_dependence(items, passed)
    held = sum(item.weight for item, verdict in zip(items, verdicts, strict=True) if verdict)
    reward = 1.0 if all(verdicts) else min(1.0, held)
    proceed = all(verdict for item, verdict in zip(items, verdicts, strict=True) if item.required_for_next_turn)
    return TurnScore(reward=reward, verdicts=verdicts, proceed=proceed)


def read_turn(turn_messages: MessageList) -> tuple[list[Step], str]:
    """The steps of a turn (assistant messages with calls, each call with its result) and its final reply.

    The reply is the text of the last message if that is an assistant message without calls, else empty; before it come
    replies that the user answered within the turn. A call without a result, and a result that is not JSON, count as
    errors.
    """
    replies: list[str] = []
    steps: list[Step] = []
    answered = 0
    reply = ""
    for message in turn_messages:
        if message["role"] == "assistant":
            calls = [_name_and_arguments(call) for call in message.get("tool_calls") or ()]
            reply = "" if calls else message.get("content") or ""
            if calls:
                steps.append([(name, arguments, _MISSING) for name, arguments in calls])
                answered = 0
        elif message["role"] == "user":
            replies.append(reply)
            reply = ""
        elif message["role"] == "tool":
            reply = ""
            if steps and answered < len(steps[-1]):
                name, arguments, _ = steps[-1][answered]
                steps[-1][answered] = (name, arguments, _result(message))
                answered += 1
    return steps, "\n".join(filter(None, [*replies, reply]))


def says(reply: str, words: Sequence[str]) -> bool:
    """Whether every word or number stands in the reply as a whole word, upper or lower case.

    A number does not count as part of a longer one: 120 is not in "1120", "1,120", "120.5" or "-120". Thousands may be
    set off by commas: 1120 is in "1,120".
    """
    return all(_stands_in(word, reply) for word in words)


def passes(item: CheckItem, steps: Sequence[Step], reply: str) -> bool:
    """Whether an item's program check holds. Raises RewardUnavailable where it has none or one of an unknown kind."""
    check = item.check
    if check is None:
        raise RewardUnavailable(f"the item {item.question!r} has no program check and needs a judge")
    kind = check.get("kind")
    if kind == "no_call":
        return not steps
    if kind == "not_called":
        return not any(name in check["names"] for step in steps for name, *_ in step)
    if kind == "reply":
        return says(reply, check["words"])
    if kind not in ("call", "call_among", "result"):
        raise RewardUnavailable(f"the item {item.question!r} has a check of the unknown kind {kind!r}")
    sound = (step for step in steps if not any(is_error(result) for _, _, result in step))
    return any(_call_passes(check, *entry) for step in sound for entry in step)


def _call_passes(check: Mapping[str, Json], name: str, arguments: Json, result: Json) -> bool:
    if name != check["name"]:
        return False
    if check["kind"] == "call":
        return json_equal(arguments, check["arguments"])
    if check["kind"] == "call_among":
        return _among(arguments, check["arguments"])
    return isinstance(result, dict) and json_equal(result.get(check["field"], _MISSING), check["value"])


def _among(given: Json, accepted: Mapping[str, Json]) -> bool:
    """Whether every member is one of those accepted for it; where "" is among them, it may be left out."""
    if not isinstance(given, Mapping) or not given.keys() <= accepted.keys():
        return False
    return all(
        any(_is_option(given[name], option) for option in options) if name in given else "" in options
        for name, options in accepted.items()
    )


def _is_option(value: Json, option: Json) -> bool:
    if isinstance(option, Mapping) and all(isinstance(options, list) for options in option.values()):
        return _among(value, option)  # members of an object have lists of what is accepted too
    if isinstance(option, list) and isinstance(value, list):
        return len(value) == len(option) and all(map(_is_option, value, option))
    return json_equal(value, option)


def _with_dependence(items: Sequence[CheckItem], passed: Sequence[bool]) -> tuple[bool, ...]:
    """Takes away what rests on an item that does not hold, however long the chain."""
    verdicts = list(passed)
    for _ in items:  # a chain is at most as long as the list
        verdicts = [
            verdict and all(verdicts[other] for other in item.dependence)
            for item, verdict in zip(items, verdicts, strict=True)
        ]
    return tuple(verdicts)


def is_error(result: Json) -> bool:
    """Whether a result of `read_turn` is missing, unreadable or a structured error."""
    return result is _MISSING or (isinstance(result, dict) and "error_tool_call" in result)


def _result(message: Message) -> Json:
    try:
        return json.loads(message["content"])
    except ValueError:
        return _MISSING


def _name_and_arguments(call: Mapping[str, Json]) -> tuple[str, Json]:
    """Takes {"name", "arguments"} and OpenAI's {"function": {"name", "arguments": JSON text}} alike."""
    call = call.get("function", call)
    arguments = call["arguments"]
    return call["name"], json.loads(arguments) if isinstance(arguments, str) else arguments


def _stands_in(word: str, reply: str) -> bool:
    pattern = re.escape(word.strip())
    if re.fullmatch(r"-?\d+(?:\.\d+)?", word.strip()):
        whole, point, rest = word.strip().partition(".")
        grouped = re.escape(re.sub(r"(?<=\d)(?=(?:\d{3})+$)", ",", whole) + point + rest)
        pattern = rf"(?:{pattern}|{grouped})"
        pattern = rf"(?<![\w-])(?<!\d[.,]){pattern}(?!\w)(?![.,]\d)"
    else:
        pattern = rf"(?<!\w){pattern}(?!\w)"
    return re.search(pattern, reply, re.IGNORECASE) is not None
