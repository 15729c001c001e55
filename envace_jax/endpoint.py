"""Questions to a language model behind OpenAI-compatible addresses: side by side, retried, every fault counted.

A question is answered by a future, so whoever asks goes on. What an answer must look like is the caller's `read`; an
answer that it refuses is asked for again, like one that never came. Knows no judges, tasks or tools.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import urllib3

from envace_jax import json_values
from envace_jax.config import EndpointConfig
from envace_jax.types import Json, Message

Answer = TypeVar("Answer")
LONGEST_WAIT_S = 10.0  # between two tries
PASSING = (408, 409, 425, 429)  # statuses below 500 that another try may not meet again


class EndpointFault(RuntimeError):
    """No usable answer after all tries. `kind` is the last try's: timeout, connection, status N, body or answer."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class EndpointSettings:
    """Where a model answers and how patiently it is asked."""

    urls: tuple[str, ...]  # base addresses such as http://host:8000/v1; questions go to them in turn
    model: str
    key_variable: str = "OPENAI_API_KEY"  # environment variable with the key; none is sent where it is not set
    concurrency: int = 32  # questions under way at once
    timeout_s: float = 60.0  # of a try: without any byte of an answer
    retries: int = 7  # tries after the first; with these waits, 34 s at least: an outage of 30 s is outlived
    backoff_s: float = 1.0  # before the first retry; doubles up to LONGEST_WAIT_S

    def __post_init__(self) -> None:
        if not self.urls or not all(url.startswith(("http://", "https://")) for url in self.urls):
            raise ValueError(f"endpoint urls {list(self.urls)} must be addresses such as http://host:8000/v1")
        if not self.model:
            raise ValueError("endpoint model is empty; name the model that the address serves")
        for name, least in (("concurrency", 1), ("retries", 0), ("backoff_s", 0.0)):
            if getattr(self, name) < least:
                raise ValueError(f"endpoint {name} is {getattr(self, name)}; must be at least {least}")
        if self.timeout_s <= 0:
            raise ValueError(f"endpoint timeout_s is {self.timeout_s}; must be greater than 0")


def open_endpoint(config: EndpointConfig) -> Endpoint:
    """The endpoint of a group of a run's settings. To be closed."""
    names = ("urls", "model", "key_variable", "concurrency", "timeout_s", "retries")
    return Endpoint(EndpointSettings(**{name: getattr(config, name) for name in names}))


def sampling_options(config: EndpointConfig) -> dict[str, Json]:
    """How the model of a group of settings samples, as `Endpoint.ask` takes it."""
    return {name: getattr(config, name) for name in ("temperature", "top_p", "max_tokens")}


class Endpoint:
    """Asks; threads wait for the answers. `counts`: tries, answers, given_up, tokens and fault_KIND so far."""

    def __init__(self, settings: EndpointSettings):
        self.settings = settings
        self.counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._turn = itertools.count()
        self._pool = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="endpoint")
        key = os.environ.get(settings.key_variable)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._http = urllib3.PoolManager(maxsize=settings.concurrency, headers=headers, retries=False)

    def ask(
        self,
        messages: Sequence[Message],
        read: Callable[[str], Answer],
        *,
        schema: Mapping[str, Json] | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        max_tokens: int = 1024,
        seed: int | None = None,
    ) -> Future[Answer]:
        """`read` of the answer's text. The future raises EndpointFault where no try gave one that `read` accepts;
        `read` refuses by raising ValueError. With `schema` the answer is asked for as JSON of that schema."""
        body: dict[str, Json] = {
            "model": self.settings.model,
            "messages": [dict(message) for message in messages],
            "temperature": temperature,
            "top_p": top_p,
            "max_tokens": max_tokens,
        }
        if seed is not None:
            body["seed"] = seed
        if schema is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "strict": True, "schema": dict(schema)},
            }
        return self._pool.submit(self._answer, json.dumps(body, ensure_ascii=False).encode(), _read_text(read))

    def complete(self, messages: Sequence[Message], **fields: Json) -> Future[dict[str, Any]]:
        """The first choice of a chat completion, {"message", "finish_reason", ...}; `fields` are further members of the
        request, such as tools. The future raises EndpointFault as that of `ask`."""
        body = {"model": self.settings.model, "messages": [dict(message) for message in messages], **fields}
        return self._pool.submit(self._answer, json.dumps(body, ensure_ascii=False).encode(), lambda choice: choice)

    def close(self) -> None:
        """Gives up what is still being asked."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._http.clear()

    def _answer(self, body: bytes, read: Callable[[dict[str, Any]], Answer]) -> Answer:
        first, wait = next(self._turn), self.settings.backoff_s
        for number in range(self.settings.retries + 1):
            url = self.settings.urls[(first + number) % len(self.settings.urls)]
            self._count("tries")
            try:
                answer = self._try(url, body, read)
                self._count("answers")
                return answer
            except EndpointFault as fault:
                self._count(f"fault_{fault.kind.replace(' ', '_')}")
                last = fault
            status = last.kind.removeprefix("status ")
            if status.isdigit() and int(status) < 500 and int(status) not in PASSING:
                break  # a wrong key, model or question stays wrong
            if number == self.settings.retries or self._stop.wait(wait * random.uniform(0.75, 1.25)):
                break
            wait = min(2 * wait, LONGEST_WAIT_S)
        self._count("given_up")
        raise last

    def _try(self, url: str, body: bytes, read: Callable[[dict[str, Any]], Answer]) -> Answer:
        address = url.rstrip("/") + "/chat/completions"
        timeout = urllib3.Timeout(self.settings.timeout_s)
        try:
            response = self._http.request("POST", address, body=body, timeout=timeout)
        except urllib3.exceptions.HTTPError as error:
            # A refused connection is a time-out to urllib3.
            refused = isinstance(error, urllib3.exceptions.NewConnectionError)
            if isinstance(error, urllib3.exceptions.TimeoutError) and not refused:
                raise EndpointFault("timeout", f"{address}: no answer within {self.settings.timeout_s} s") from None
            raise EndpointFault("connection", f"{address}: {type(error).__name__}: {error}") from None
        if response.status != 200:
            start = " ".join(response.data[:200].decode("utf-8", "replace").split())
            raise EndpointFault(f"status {response.status}", f"{address}: HTTP status {response.status}: {start}")
        choice, tokens = _choice_of(address, response.data)
        try:
            return read(choice)
        except _NoText as error:
            tokens = {}  # nothing was answered
            raise EndpointFault("body", f"{address}: a body that is no chat completion: {error!r}") from None
        except ValueError as error:
            raise EndpointFault("answer", f"{address}: an answer that is not what was asked for: {error}") from None
        finally:
            with self._lock:
                self.counts.update(tokens)

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1


class _NoText(ValueError):
    """A message whose content is no text."""


def _read_text(read: Callable[[str], Answer]) -> Callable[[dict[str, Any]], Answer]:
    """`read` of the text of a choice's message."""

    def read_choice(choice: dict[str, Any]) -> Answer:
        text = choice["message"].get("content")
        if not isinstance(text, str):
            raise _NoText(f"the message's content is of type {type(text).__name__}")
        return read(text)

    return read_choice


def _choice_of(address: str, data: bytes) -> tuple[dict[str, Any], dict[str, int]]:
    """The first choice, and the tokens it took, from the body of a response."""
    try:
        body = json_values.parse(data.decode("utf-8"))
        choice = body["choices"][0]
        if not isinstance(choice["message"], dict):
            raise ValueError(f"the message is of type {type(choice['message']).__name__}")
    except (ValueError, LookupError, TypeError) as error:
        raise EndpointFault("body", f"{address}: a body that is no chat completion: {error!r}") from None
    usage: Any = body.get("usage")
    names = ("prompt_tokens", "completion_tokens")
    usage = usage if isinstance(usage, dict) else {}
    return choice, {name: usage[name] for name in names if type(usage.get(name)) is int}
