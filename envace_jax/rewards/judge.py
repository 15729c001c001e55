"""The judged checklist reward: items without a program check are put to a language model, one question a turn.

After the authors' checklist scoring: the judge gives one verdict for each step (assistant message) and item, and an
item holds if any step passes it. Items about calls or results fail, whatever it says, in a step whose tool result is an
error. A judge's fault masks the trajectory; it is never a verdict. Knows no policy and no tokens.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from envace_jax import json_values
from envace_jax.answers import AnswerCache, key_of
from envace_jax.futures import done
from envace_jax.local_model import LocalModel
from envace_jax.rewards import RewardUnavailable
from envace_jax.rewards.checklist import is_error, passes, read_turn, turn_score
from envace_jax.types import CheckItem, Json, Message, MessageList, Task, TurnScore

ABOUT_TOOLS = ("assistant.tool_calls", "tool.content")  # what an item about calls or results focuses on
Verdicts = tuple[tuple[bool, ...], ...]  # [step][item]
# Asks a model: (messages, read, **options) -> `read` of the answer's text, as `endpoint.Endpoint.ask` does.
Ask = Callable[..., Future[Verdicts]]

INSTRUCTIONS = """You judge one turn of a conversation between a user and an assistant that calls tools.
The turn is given as numbered steps: each is one message of the assistant, with the results of its tool calls.
For every step and every item say whether this step meets the item's pass condition: true or false.
Judge by what is written alone. An item holds for a step only if everything in its pass condition is met there.
Answer with JSON alone: {"verdicts": [[...], ...]}, a list for each step in order, in it a boolean for each item."""


class JudgedReward:
    """Scores turns by program checks where items have them and by a judge where they have not.

    With `cache` a file keeps verdicts by what was asked (`answers.py`), for this run and later ones; `name` stands for
    the judge there. A turn that needs no judge is scored at once. `counts` are the judge's, for the run's metrics.
    """

    def __init__(
        self,
        ask: Ask,
        *,
        name: str,
        cache: Path | None = None,
        options: Mapping[str, Json] | None = None,
        counts: collections.Counter[str] | None = None,
        model: LocalModel | None = None,
    ) -> None:
        self.model = model  # where `ask` is that of a model in this process
        self.counts = collections.Counter[str]() if counts is None else counts
        self._ask, self._name, self._options = ask, name, dict(options or {})
        self._cache = None if cache is None else AnswerCache(cache, self.counts)

    def close(self) -> None:
        """Closes the file of verdicts."""
        if self._cache is not None:
            self._cache.close()

    def score_turn(self, task: Task, turn: int, turn_messages: MessageList) -> Future[TurnScore]:
        items, score = task.checklist[turn], Future[TurnScore]()
        score.set_running_or_notify_cancel()  # whoever has waited too long goes on; the verdict is kept all the same
        steps, reply = read_turn(turn_messages)
        shown = read_steps(turn_messages)
        asked = [item for item in items if item.check is None]
        where = f"task {task.task_id}, turn {turn}"
        try:
            known = [None if item.check is None else passes(item, steps, reply) for item in items]
        except RewardUnavailable as fault:
            score.set_exception(RewardUnavailable(f"{where}: {fault}"))
            return score

        def settle(verdicts: Future[Verdicts]) -> None:
            try:
                said = verdicts.result()
                judged = iter(zip(any_step(asked, shown, said), in_words(asked, shown, said), strict=True))
                both = [next(judged) if held is None else (held, "") for held in known]
                found = turn_score(items, [held for held, _ in both])
                score.set_result(dataclasses.replace(found, words=tuple(words for _, words in both)))
            except BaseException as fault:  # whatever a judge raises is a fault of this turn alone
                score.set_exception(RewardUnavailable(f"{where}: judge: {fault}"))

        if asked and shown:
            verdicts = self._verdicts(question(turn_messages, shown, asked), len(shown), len(asked))
        else:
            verdicts = done(((),) * len(shown))
        verdicts.add_done_callback(settle)
        return score

    def _verdicts(self, messages: list[Message], steps: int, items: int) -> Future[Verdicts]:
        """The kept verdicts of a question, or the judge's, which are kept from now on."""

        def ask() -> Future[Verdicts]:
            return self._ask(
                messages,
                lambda text: read_verdicts(text, steps, items),
                schema=verdict_schema(steps, items),
                **self._options,
            )

        if self._cache is None:
            return ask()
        key = key_of([self._name, self._options, messages])
        return self._cache.answer(key, ask, lambda rows: _are_verdicts(rows, steps, items))


def _are_verdicts(rows: Json, steps: int, items: int) -> bool:
    try:
        read_verdicts(json.dumps({"verdicts": rows}), steps, items)
    except ValueError:
        return False
    return True


# --- what is asked ---


def read_steps(turn_messages: MessageList) -> list[tuple[Message, list[Message], bool]]:
    """(assistant message, its results, whether one of them is an error) for every assistant message of a turn."""
    groups: list[tuple[Message, list[Message]]] = []
    for message in turn_messages:
        if message["role"] == "assistant":
            groups.append((message, []))
        elif message["role"] == "tool" and groups:
            groups[-1][1].append(message)
    return [
        (message, results, any(is_error(result) for step in read_turn([message, *results])[0] for *_, result in step))
        for message, results in groups
    ]


def any_step(
    items: Sequence[CheckItem], steps: Sequence[tuple[Message, list[Message], bool]], verdicts: Verdicts
) -> list[bool]:
    """Whether each item holds in any step. A step with an error passes no item about calls or results."""
    rows = [(row, failed) for row, (_, _, failed) in zip(verdicts, steps, strict=True)]
    return [any(row[place] and not _void(item, failed) for row, failed in rows) for place, item in enumerate(items)]


def in_words(
    items: Sequence[CheckItem], steps: Sequence[tuple[Message, list[Message], bool]], verdicts: Verdicts
) -> list[str]:
    """What the judge said of each item, step by step, and where that does not count; what it thought is not kept."""
    return [
        "; ".join(
            f"step {number}: {'true' if row[place] else 'false'}"
            + (", which does not count: a result is an error" if _void(item, failed) and row[place] else "")
            for number, (row, (_, _, failed)) in enumerate(zip(verdicts, steps, strict=True), start=1)
        )
        for place, item in enumerate(items)
    ]


def _void(item: CheckItem, failed: bool) -> bool:
    """Whether a step passes the item in no case."""
    return failed and item.focus_on in ABOUT_TOOLS


def question(
    turn_messages: MessageList, steps: Sequence[tuple[Message, list[Message], bool]], items: Sequence[CheckItem]
) -> list[Message]:
    """The messages that put a turn's items to a judge."""
    users = [str(message.get("content", "")) for message in turn_messages if message["role"] == "user"]
    parts = ["# The user's message", *users]
    for number, (message, results, _) in enumerate(steps, start=1):
        parts.append(f"# Step {number}")
        parts.append(json.dumps({name: message[name] for name in message if name != "role"}, ensure_ascii=False))
        parts += [f"Result of {result.get('name', 'the call')}: {result['content']}" for result in results]
    parts.append(f"# Items ({len(items)})")
    parts += [f"Item {number}\n{_described(item)}" for number, item in enumerate(items, start=1)]
    parts.append(f"Give {len(steps)} lists of {len(items)} booleans.")
    return [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": "\n\n".join(parts)}]


def _described(item: CheckItem) -> str:
    fields = {"Question": item.question, "Looks at": item.focus_on, "Passes if": item.pass_condition}
    fields |= {"Fails for example if": "; ".join(item.failure_examples), "Evidence": "; ".join(item.evidence)}
    return "\n".join(f"{name}: {text}" for name, text in fields.items() if text)


# --- what is answered ---


def verdict_schema(steps: int, items: int) -> dict[str, Json]:
    """JSON schema of an answer."""

    def exactly(count: int, entry: Json) -> dict[str, Json]:
        return {"type": "array", "items": entry, "minItems": count, "maxItems": count}

    return {
        "type": "object",
        "properties": {"verdicts": exactly(steps, exactly(items, {"type": "boolean"}))},
        "required": ["verdicts"],
        "additionalProperties": False,
    }


def read_verdicts(text: str, steps: int, items: int) -> Verdicts:
    """The verdicts of an answer. Raises ValueError for anything but `steps` lists of `items` booleans: what is not said
    is not taken for false."""
    value = json_values.parse(text.rpartition("</think>")[2].strip())
    rows = value.get("verdicts") if isinstance(value, dict) else None
    if not isinstance(rows, list) or len(rows) != steps:
        raise ValueError(f"no list 'verdicts' with an entry for each of {steps} steps")
    for row in rows:
        if not isinstance(row, list) or len(row) != items or not all(isinstance(entry, bool) for entry in row):
            raise ValueError(f"a step's verdicts are not {items} booleans: {json.dumps(row)[:80]}")
    return tuple(map(tuple, rows))
