"""Questions to a model in this process, asked as those to an address are (`endpoint.py`), answered between segments.

The model has a sampler of its own, or answers in the policy's slots with the policy's parameters; the rollout's loop
moves it along either way, so nobody waits for it. What it answers is never trained. Its random numbers follow from the
question and the try alone: the same parameters give the same answer, whoever asks and whenever. Knows no judges or
tasks.

Several processes ask one model in step: what one asks is told to all (`told`, `queue`), since all take part in sampling
the answer; only who asked reads and counts it.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from envace_jax.chat import Chat
from envace_jax.endpoint import EndpointFault
from envace_jax.sampling import Sample, Sampler, SampleRequest
from envace_jax.types import Json, Message, Params

STREAM = -3  # random numbers that no training step and no evaluation uses


@dataclasses.dataclass
class _Question:
    tokens: list[int]
    name: int  # a hash of what is asked
    temperature: float
    top_p: float
    max_tokens: int
    tries: int = 0
    read: Callable[[str], Any] | None = None
    answer: Future[Any] | None = None  # None: another process asks, and reads what comes


class LocalModel:
    """Takes questions at any time and answers them once it is bound to a model (`bind`) and is moved along.

    `counts` are as an Endpoint's: tries, answers, given_up, tokens, fault_answer and fault_length.
    """

    def __init__(self, *, seed: int = 0, retries: int = 7) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.sampler: Sampler | None = None  # its own, with `params`, or None where it shares the policy's
        self._seed, self._retries = seed, retries
        self.params: Params = None
        self._new: list[_Question] = []  # asked here, and not yet told to all
        self._waiting: collections.deque[_Question] = collections.deque()
        self._running: dict[int, _Question] = {}  # by request id, all below 0: those of segments are not
        self._number = 0

    def bind(
        self, chat: Chat, *, max_length: int, thinking: bool, sampler: Sampler | None = None, params: Params = None
    ) -> None:
        """Says how questions are written and who answers: `sampler` with `params`, or else the policy's slots, of
        `max_length` tokens either way."""
        self._chat, self._max_length, self._thinking = chat, max_length, thinking
        self.sampler, self.params = sampler, params

    @property
    def busy(self) -> bool:
        """Whether any question is still to be answered."""
        return bool(self._new or self._waiting or self._running)

    def ask(
        self,
        messages: Sequence[Message],
        read: Callable[[str], Any],
        *,
        schema: Mapping[str, Json] | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        max_tokens: int = 1024,
    ) -> Future[Any]:
        """`read` of the answer's text, as `Endpoint.ask`; the schema is told in the system text.

        The future raises EndpointFault where no try gave an answer that `read` accepts, and where the question leaves
        no room for one.
        """
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()
        system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
        if schema is not None:
            system += f"\n\nThe answer fits this JSON schema: {json.dumps(dict(schema))}"
        tokens = self._chat.system(system or None, [])
        for message in messages:
            if message["role"] == "user":
                tokens += self._chat.user(message["content"])
        tokens += self._chat.assistant_prefix(thinking=self._thinking)
        if len(tokens) >= self._max_length:
            self.counts.update(("given_up", "fault_length"))
            answer.set_exception(
                EndpointFault("length", f"a question of {len(tokens)} tokens; sampler.max_length={self._max_length}")
            )
            return answer
        name = int.from_bytes(hashlib.sha256(json.dumps([tokens, temperature, top_p]).encode()).digest()[:8])
        self._new.append(_Question(tokens, name, temperature, top_p, max_tokens, read=read, answer=answer))
        return answer

    def told(self) -> list[_Question]:
        """What is asked here since the last `queue`, as the other processes are to be told it."""
        return [dataclasses.replace(question, read=None, answer=None) for question in self._new]

    def queue(self, questions: Sequence[_Question], own: bool) -> None:
        """Takes what a process has `told` into the line; to be called for every process, in their order."""
        self._waiting += self._new if own else questions
        if own:
            self._new = []

    def requests(self, free: int) -> list[SampleRequest]:
        """What to put into at most `free` slots now, in the order of asking; `take` gets what comes of it."""
        found = []
        for _ in range(min(free, len(self._waiting))):
            question = self._waiting.popleft()
            self._number += 1
            self._running[-self._number] = question
            self.counts["tries"] += question.answer is not None
            found.append(
                SampleRequest(
                    request_id=-self._number,
                    prompt_tokens=question.tokens,
                    max_tokens=question.max_tokens,
                    key_ids=(self._seed, STREAM, question.name, question.tries),
                    temperature=question.temperature,
                    top_p=question.top_p,
                )
            )
        return found

    def take(self, sample: Sample) -> None:
        """An answer came: whoever asked gets it, or it is asked for again with other random numbers."""
        question, tokens = self._running.pop(sample.request_id), sample.tokens.tolist()
        if question.read is None or question.answer is None:
            return
        question.tries += 1
        self.counts["prompt_tokens"] += len(question.tokens)
        self.counts["completion_tokens"] += len(tokens)
        text = self._chat.decode(tokens[:-1] if tokens and tokens[-1] in self._chat.stop_ids else tokens)
        try:
            answer = question.read(text)
        except ValueError as error:
            self.counts["fault_answer"] += 1
            if question.tries <= self._retries:
                self._new.append(question)
                return
            self.counts["given_up"] += 1
            question.answer.set_exception(EndpointFault("answer", f"an answer that is not what was asked for: {error}"))
        else:
            self.counts["answers"] += 1
            question.answer.set_result(answer)

    def step(self) -> None:
        """Moves a model with a sampler of its own along, where no rollout does and no other process asks."""
        assert self.sampler is not None
        self.queue((), own=True)
        requests = self.requests(self.sampler.free())
        if requests:
            self.sampler.submit(requests)
        for sample in sorted(self.sampler.step(self.params), key=lambda sample: -sample.request_id):
            self.take(sample)

    def reset(self) -> None:
        """Drops all questions, and the caches of a sampler of its own; those who wait hear of it."""
        for question in (*self._new, *self._waiting, *self._running.values()):
            if question.answer is not None:
                question.answer.set_exception(EndpointFault("dropped", "the question was dropped"))
        self._new.clear()
        self._waiting.clear()
        self._running.clear()
        if self.sampler is not None:
            self.sampler.reset()
