"""A server in this process, for tests of whatever talks to it: the tiny model, or a script in place of a model.

with serving.server() as url:                       # http://127.0.0.1:PORT
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    client.chat.completions.create(model=serving.NAME, messages=[...], tools=[...])
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import scripted
import uvicorn

from configs import tiny
from envace_jax import serve
from envace_jax.config import RunConfig, from_config_dict
from envace_jax.episode import Limits
from envace_jax.sampling import Sample, SampleRequest, SamplerStats
from envace_jax.serving.app import Options, make_app
from envace_jax.serving.completions import Served
from envace_jax.serving.engine import Engine
from envace_jax.serving.text import TokenBytes

MODEL = "asset:tiny_base"
NAME = "tiny_base"


def settings(**sampler) -> RunConfig:
    """The tiny world's settings, with few padded shapes to compile; `sampler` changes its sampler's."""
    config = from_config_dict(tiny.get_config())
    few = dict(
        slots=8, cache_rows=32, max_length=1024, prefill_lengths=(64, 512), prefill_rows=(4,), cache_lengths=(1024,),
        refill_share=0.125, decode_chunk=8,
    )  # fmt: skip
    return dataclasses.replace(config, sampler=dataclasses.replace(config.sampler, **(few | sampler)))


@contextlib.contextmanager
def served(path: str = MODEL, **sampler) -> Iterator[Served]:
    """The tiny model, or another, on a running engine; programs are compiled when they are first needed."""
    found = serve.load(path, config=settings(**sampler), warm_up=False)
    try:
        yield found
    finally:
        found.engine.stop()


@contextlib.contextmanager
def serving(model: Served, options: Options | None = None) -> Iterator[str]:
    """Serves it on a free port of 127.0.0.1 in a thread and gives the address, http://127.0.0.1:PORT."""
    with running(make_app(model, options)) as url:
        yield url


@contextlib.contextmanager
def running(app) -> Iterator[str]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextlib.contextmanager
def server(options: Options | None = None, path: str = MODEL, **sampler) -> Iterator[str]:
    """Both at once."""
    with served(path, **sampler) as model, serving(model, options) as url:
        yield url


# --- a script in place of a model ---


class ScriptedSampler:
    """A Sampler that writes `answer(prompt's text, request)`, a byte a token and `chunk` tokens a step; a step takes
    `pace_s`. Answers that begin with "fault" break the device in place of being written."""

    def __init__(self, answer: Callable[[str, SampleRequest], str], slots=4, max_length=4000, chunk=3, pace_s=0.0):
        self.answer, self.slots, self.max_length, self.chunk, self.pace_s = answer, slots, max_length, chunk, pace_s
        self.stop_ids, self.stats = scripted.tiny_chat().stop_ids, SamplerStats()
        self.most = 0  # requests in slots at once
        self.prompts: list[str] = []
        self._running: dict[int, list] = {}  # [tokens still to draw, tokens drawn, request]
        self._drawn: dict[int, tuple[np.ndarray, np.ndarray, int]] = {}

    def free(self):
        return self.slots - len(self._running)

    def reset(self):
        self._running = {}

    def check(self, request):
        if not 0 < len(request.prompt_tokens) < self.max_length or request.max_tokens < 1:
            raise ValueError("a request that no sampler takes")

    def cancel(self, request_id):
        return self._running.pop(request_id, None) is not None

    def drawn(self):
        return self._drawn

    def submit(self, requests):
        assert len(requests) <= self.free()
        for request in requests:
            prompt = scripted.tiny_chat().decode(request.prompt_tokens)
            self.prompts.append(prompt)
            text = self.answer(prompt, request)
            room = min(request.max_tokens, self.max_length - len(request.prompt_tokens))
            tokens = [*scripted.spelled(text), scripted.tiny_chat().end_of_message][:room]
            self._running[request.request_id] = [tokens, [], request, text]
        self.most = max(self.most, len(self._running))

    def step(self, params):
        time.sleep(self.pace_s)
        if any(text.startswith("fault") for _, _, _, text in self._running.values()):
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nwhile running replica 0")
        self._drawn, done = {}, []
        for number, (left, drawn, request, _) in list(self._running.items()):
            now, left[:] = left[: self.chunk], left[self.chunk :]
            drawn += now
            cached = len(request.prompt_tokens) // 2
            self.stats.decoded_tokens += len(now)
            if left:
                self._drawn[number] = (np.asarray(now, np.int32), logprobs_of(now), cached)
                continue
            reason = "stop" if drawn[-1] in self.stop_ids else "length"
            del self._running[number]
            done.append(Sample(number, np.asarray(drawn, np.int32), logprobs_of(drawn), reason, cached))
        return done


def logprobs_of(tokens):
    return np.asarray([-float(token) / 1000 for token in tokens], np.float32)


@contextlib.contextmanager
def scripted_model(answer: Callable[[str, SampleRequest], str], style="compact", **sampler) -> Iterator[Served]:
    """A served model named "scripted" that says what the script answers; `served.engine._sampler` is its sampler."""
    chat = scripted.tiny_chat()
    engine = Engine(ScriptedSampler(answer, **sampler), None)
    engine.start()
    prompts = scripted.prompts(style=style)
    try:
        yield Served(engine, chat, prompts, Limits(), "scripted", 1_700_000_000, TokenBytes(chat.tokenizer))
    finally:
        engine.stop()
