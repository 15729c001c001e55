"""Rehearsal of a request in private, before its answer: in a worker thread, on the engine that all requests share.

A memory is kept with the conversation it was made for, so that later steps of the same user turn may go on with it.
Nothing of a rehearsal is ever in a prompt but the memory, and nothing of it in an answer but what a client asks to see.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from envace_jax import rehearsal, roles
from envace_jax.rehearsal import Cache, Memory, Settings
from envace_jax.rollout import Player
from envace_jax.serving import completions, conversation
from envace_jax.serving.completions import Asked, Served
from envace_jax.serving.protocol import RequestError
from envace_jax.types import Message, Segment, Trajectory

TASK_ID = "conversation"  # random numbers follow from a request's seed alone
OnSegment = Callable[[int, Segment], None]  # (attempt, what was just sampled), in the worker's thread


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """What came before an answer."""

    asked: Asked  # with the memory in its prompt
    memory: Memory
    fresh: bool  # made for this request, which pays for it

    def usage(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The answer's usage with the rehearsal's tokens counted in, and beside it."""
        counts = {
            name: getattr(self.memory, name) if self.fresh else 0
            for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
        }
        total = completions.usage(
            own["prompt_tokens"] + counts["prompt_tokens"],
            own["completion_tokens"] + counts["completion_tokens"],
            own["prompt_tokens_details"]["cached_tokens"] + counts["cached_tokens"],
        )
        return total | {"rehearsal_tokens": counts}

    def transcript(self, served: Served) -> dict[str, Any]:
        """What a client may see of it: the memory, and of each attempt why it ended, its segments in order, and its own
        messages, those of the conversation left out."""
        attempts = [
            {
                "reason": attempt.reason,
                "segments": [segment_told(served, segment) for segment in attempt.segments],
                "messages": [_message_told(message) for message in attempt.messages],
            }
            for attempt in self.memory.attempts
        ]
        return {"memory": self.memory.text, "attempts": attempts}


class Rehearsals:
    """Makes memories for one served model.

    Args:
      default: for requests that do not say how; they are rehearsed only if they have tools.
      threads: rehearsals under way at once; others wait.
      kept: the most memories that are kept.
      kept_tokens: the most sampled tokens that they may have together, attempts counted in.
    """

    def __init__(
        self, served: Served, default: Settings, threads: int = 32, kept: int = 1024, kept_tokens: int = 1 << 20
    ):
        self.default = default
        self._served = served
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="rehearsal")
        self._usual_mode = "parallel" if default.mode == "none" else default.mode
        self._kept = Cache(kept, kept_tokens)

    def settings(self, asked: Asked) -> Settings | None:
        """How a request is to be rehearsed; None: not at all. Raises RequestError where it cannot be."""
        wanted = asked.request.rehearsal
        can = asked.messages[-1]["role"] in ("user", "tool")
        mode = self.default.mode if wanted is None else wanted.mode or self._usual_mode
        if mode == "none" or (wanted is None and not (can and asked.tools)):
            return None
        if not can:
            raise RequestError(
                400, "a rehearsal needs 'messages' that end with a user's message or with tool results",
                param="messages", code="invalid_value",
            )  # fmt: skip
        n = self.default.n if wanted is None or wanted.n is None else wanted.n
        return dataclasses.replace(self.default, mode=mode, n=n)

    def count(self, asked: Asked) -> int:
        """Choices that the request is as much as: what it may have in slots at once."""
        settings = self.settings(asked)
        attempts = 1 if settings is None or settings.mode == "sequential" else settings.n
        return max(asked.request.n or 1, attempts)

    async def rehearsed(self, asked: Asked, on_segment: OnSegment | None = None) -> Rehearsed | None:
        """The request with its memory, made now or kept from an earlier step; None where it is not to be rehearsed.

        Given up where the task that waits is cancelled.
        """
        settings = self.settings(asked)
        if settings is None:
            return None
        keys = _keys(asked, settings)
        reuse = None if asked.request.rehearsal is None else asked.request.rehearsal.reuse
        # Unless it is wanted, with a seed only what this very request would make: or the answer would depend on what
        # was asked before it.
        usable = keys if reuse or (reuse is None and asked.request.seed is None) else keys[:1]
        kept = (self._kept.get(key) for key in usable if reuse is not False)
        memory = next((found for found in kept if found is not None), None)
        fresh = memory is None
        given_up = threading.Event()
        try:
            if memory is None:
                make = functools.partial(self._make, asked, settings, given_up, on_segment)
                memory = await asyncio.get_running_loop().run_in_executor(self._threads, make)
                self._kept.put(keys[0], memory)
            # Not in those threads: rehearsals of others may have them all.
            ready = await asyncio.to_thread(self._with_memory, asked, memory, settings)
        finally:
            given_up.set()
        return Rehearsed(ready, memory, fresh=fresh)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _make(
        self, asked: Asked, settings: Settings, given_up: threading.Event, on_segment: OnSegment | None
    ) -> Memory:
        sampler = self._served.engine.as_sampler(given_up)
        task = rehearsal.task_of(asked.messages, asked.tools, TASK_ID)
        try:
            (memory,) = rehearsal.rehearse(
                Player(sampler, None), [task], settings, prompts=asked.prompts, limits=self._served.limits,
                seed=asked.seed,
                on_segment=None if on_segment is None else lambda _, attempt, segment: on_segment(attempt, segment),
            )  # fmt: skip
        finally:
            sampler.close()
        given = len(task.messages)
        return dataclasses.replace(memory, attempts=tuple(_own(attempt, given) for attempt in memory.attempts))

    def _with_memory(self, asked: Asked, memory: Memory, settings: Settings) -> Asked:
        """The request with the memory in its prompt; as it was where there is none, or it does not fit."""
        if not memory.text:
            return asked
        note = roles.titled(asked.prompts, memory.text)
        messages = conversation.with_note(asked.messages, note, settings.placement)
        try:
            return dataclasses.replace(
                completions.with_messages(self._served, asked, messages), messages=asked.messages
            )
        except RequestError:
            return asked


def _own(attempt: Trajectory, given: int) -> Trajectory:
    """An attempt as far as a transcript needs it, without the conversation's `given` messages: in size it is what was
    sampled, and no prompts."""
    nothing = np.zeros(0, np.int32)
    segments = [
        dataclasses.replace(segment, prompt_tokens=nothing, logprobs=nothing.astype(np.float32))
        for segment in attempt.segments
    ]
    return dataclasses.replace(attempt, segments=tuple(segments), messages=attempt.messages[given:])


def _keys(asked: Asked, settings: Settings) -> list[str]:
    """Names of the conversation as it stands, and as it stood at earlier steps of the same user turn, latest first.

    A request with a seed shares memories only with those of the same seed, made for the same conversation: it is to
    get the same answer again, whatever was asked before.
    """
    given = [asked.tools, dataclasses.asdict(settings), asked.prompts.thinking, asked.request.seed]
    hashed = hashlib.sha256(json.dumps(given).encode("utf-8"))
    last_user = max((at for at, message in enumerate(asked.messages) if message["role"] == "user"), default=-1)
    keys = []
    for place, message in enumerate(asked.messages):
        hashed.update(json.dumps(_without_ids(message)).encode("utf-8"))
        if place >= last_user and message["role"] in ("user", "tool"):
            keys.append(hashed.copy().hexdigest())
    return keys[::-1]


def _without_ids(message: Message) -> list[Any]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return [message["role"], message["content"], message.get("reasoning_content"), calls]


def segment_told(served: Served, segment: Segment) -> dict[str, str]:
    """A segment's role, and what it says without the id that stopped it."""
    tokens, chat = segment.tokens.tolist(), served.chat
    text = chat.decode(tokens[:-1] if tokens and tokens[-1] in chat.stop_ids else tokens)
    return {"role": segment.role.name.lower(), "text": text}


def _message_told(message: Message) -> dict[str, Any]:
    told = dict(message)
    if message.get("tool_calls"):
        told["tool_calls"] = roles.call_entries(roles.message_calls(message), as_text=True)
    return told
