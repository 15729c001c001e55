"""`External`: another model answers tool calls, asked by the policy's own REHEARSE prompts (the simulator baseline).

Only ACT segments exist then, so training with it is caller-only. The answer is read as a rehearsed one is; one that
cannot be read is not the policy's doing, so it is asked for again, and in the end the trajectory is masked.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from envace_jax.answers import AnswerCache, key_of
from envace_jax.chat import parse_assistant, render_call
from envace_jax.config import ExternalConfig
from envace_jax.endpoint import open_endpoint, sampling_options
from envace_jax.roles import Prompts, canonical_result, read_rehearsal, rehearse_question
from envace_jax.types import Json, MessageList, Need, Task, ToolCall

ANSWERS_FILE = "external.jsonl"  # in the work folder
# Asks a model: (messages, read, **options) -> `read` of the answer's text, as `endpoint.Endpoint.ask` does.
Ask = Callable[..., Future[str]]


class External:
    """Puts every call to `ask`, with the prompt that the policy would get in its REHEARSE role.

    With `cache`, a file, the same call in the same state of the same conversation is asked once (`state_key`), and all
    who come to it get one answer; `name` stands for the model there. `counts` are the model's, for the run's metrics;
    the cache adds `cache_hits`.
    """

    needs = Need.RESPONSE
    prompted = True

    def __init__(
        self,
        ask: Ask,
        prompts: Prompts,
        *,
        name: str,
        options: Mapping[str, Json] | None = None,
        cache: Path | None = None,
        counts: collections.Counter[str] | None = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.counts = collections.Counter[str]() if counts is None else counts
        self._ask, self._prompts, self._name, self._options = ask, prompts, name, dict(options or {})
        self._cache = None if cache is None else AnswerCache(cache, self.counts)
        self._close = close

    def respond(
        self, trajectory_index: int, task: Task, call: ToolCall, messages: MessageList, act_text: str = ""
    ) -> Future[str]:
        question = rehearse_question(self._prompts, task, messages[:-1], act_text, call)
        ask = functools.partial(self._ask, question.messages, read_rehearsal, **self._options)
        if self._cache is None:
            return ask()
        key = state_key(self._prompts, self._name, self._options, task, messages, act_text, call)
        return self._cache.answer(key, ask, _is_result)

    def end(self, trajectory_index: int, task: Task) -> None:
        pass

    def close(self) -> None:
        """Gives up what is still being asked, and closes the file of answers."""
        self._close()
        if self._cache is not None:
            self._cache.close()


def opened(settings: ExternalConfig, prompts: Prompts, workdir: Path) -> External:
    """The responder that a run's settings ask for, with a cache in the work folder. To be closed."""
    endpoint = open_endpoint(settings)
    return External(
        endpoint.ask,
        prompts,
        name=settings.model,
        options=sampling_options(settings),
        cache=workdir / ANSWERS_FILE if settings.cache else None,
        counts=endpoint.counts,
        close=endpoint.close,
    )


def state_key(
    prompts: Prompts,
    name: str,
    options: Mapping[str, Json],
    task: Task,
    messages: Sequence[Mapping[str, Json]],
    act_text: str,
    call: ToolCall,
) -> str:
    """The cache's key of a call: the model's name, how it samples, and the whole prompt without the policy's thoughts.

    The prompt holds the tools' schemas, the examples, the conversation so far, what the calling message says and calls,
    and the call; so all of these have to be the same, to the letter.
    """
    parsed = parse_assistant(act_text)
    said = "\n".join([parsed.content, *map(render_call, parsed.calls)])
    question = rehearse_question(prompts, task, messages[:-1], said, call)
    return key_of([name, dict(options), list(question.messages)])


def _is_result(answer: Json) -> bool:
    try:
        return isinstance(answer, str) and canonical_result(answer) == answer
    except ValueError:
        return False
