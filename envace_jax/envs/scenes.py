"""Writing one conversation of the tiny world: what a user asks, the right calls with their executed results, the reply.

A domain lists `REQUESTS`: (weight, function) pairs. Each function plays one user turn on a `Scene` and returns False,
before it called anything, where the turn does not fit. Nothing here knows about checklists, splits or policies.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

from envace_jax.types import Json, ToolCall

NAMES = (
    "ann", "bob", "cal", "dan", "eve", "fay", "gus", "hal", "ida", "jon", "leo", "mia",
    "ned", "oto", "pam", "quin", "ray", "sam", "tia", "uma", "vic", "wes", "yan", "zoe",
)  # fmt: skip

Execute = Callable[[Json, str, dict[str, Json]], tuple[Json, Json]]


@dataclasses.dataclass(frozen=True)
class Turn:
    """One user turn solved: `steps[i]` holds the (call, result) pairs of the i-th assistant message with calls."""

    text: str
    steps: tuple[tuple[tuple[ToolCall, Json], ...], ...]
    reply: str
    words: tuple[str, ...]  # what a right reply must hold


class Scene:
    """The state of the world while one conversation is written, turn by turn."""

    def __init__(self, execute: Execute, state: Json, rng: random.Random):
        self.state = state
        self.rng = rng
        self.focus: dict[str, Json] = {}  # what earlier turns spoke of, for requests that refer back to it
        self.turns: list[Turn] = []
        self._execute = execute
        self._text = ""
        self._steps: list[tuple[tuple[ToolCall, Json], ...]] = []

    def ask(self, phrasings: Sequence[str], **values: Json) -> None:
        """Opens a turn with one of the phrasings."""
        self._text, self._steps = self.rng.choice(phrasings).format(**values), []

    def call(self, *calls: tuple[str, dict[str, Json]]) -> list[Json]:
        """One assistant message with these calls; their results, each after those before it took effect."""
        results = []
        for name, arguments in calls:
            self.state, result = self._execute(self.state, name, arguments)
            results.append(result)
        pairs = zip(calls, results, strict=True)
        self._steps.append(tuple((ToolCall(name, arguments), result) for (name, arguments), result in pairs))
        return results

    def say(self, reply: str, *words: Json) -> None:
        """Closes the turn with its reply and the words or numbers that must be in it."""
        self.turns.append(Turn(self._text, tuple(self._steps), reply, tuple(str(word) for word in words)))


Request = Callable[[Scene], "bool | None"]

GREETINGS = (
    "hello there , how are you today ?",
    "hi , are you there right now ?",
    "good morning to you my friend .",
    "hey , nice to meet you today .",
)
THANKS = (
    "thanks , that is all for now .",
    "thank you very much for the help .",
    "great , that was all i needed .",
    "ok good , thanks for your help .",
)


def small_talk(scene: Scene) -> bool | None:
    """A turn that asks nothing of the tools: a greeting first, thanks later."""
    if scene.turns:
        scene.ask(THANKS)
        scene.say("you are welcome.", "welcome")
    else:
        scene.ask(GREETINGS)
        scene.say("hello, what can i do?", "hello")
    return None
