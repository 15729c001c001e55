"""What /metrics tells, in a registry of its own: several servers in one process do not mix."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from envace_jax.serving.engine import Engine

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, float("inf"))


class Counters:
    """Counted by the server; what the engine counts itself is read when it is asked for."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, engine: Engine, under_way: Callable[[], int]):
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "envace_requests", "Requests answered", ["method", "route", "status"], registry=registry
        )
        self.disconnects = Counter("envace_disconnects", "Requests whose client went away first", registry=registry)
        self.tokens = Counter(
            "envace_tokens", "Tokens of finished requests; those of rehearsals are counted in", ["kind"],
            registry=registry,
        )  # fmt: skip
        self.rehearsal_tokens = Counter("envace_rehearsal_tokens", "Tokens of rehearsals", ["kind"], registry=registry)
        self.rehearsals = Counter(
            "envace_rehearsals", "Requests answered with a memory, made for them or kept", ["memory"],
            registry=registry,
        )  # fmt: skip
        self.seconds = self._histogram("envace_request_seconds", "From a request's arrival to its end")
        self.queue_seconds = self._histogram("envace_queue_seconds", "From a prompt's submission to a slot")
        self.first_token_seconds = self._histogram(
            "envace_first_token_seconds", "From a prompt's submission to its first tokens"
        )
        for name, text, read in (
            ("envace_choices_under_way", "Choices of requests under way", under_way),
            ("envace_slots", "Slots", lambda: engine.slots),
            ("envace_slots_taken", "Slots that a prompt is in", lambda: engine.running),
            ("envace_prompts_waiting", "Prompts that wait for a slot", lambda: engine.waiting),
            ("envace_decode_steps", "Steps of decoding so far", lambda: engine.stats.decode_steps),
            ("envace_decoded_tokens", "Tokens drawn so far", lambda: engine.stats.decoded_tokens),
            ("envace_prefilled_tokens", "Prompt tokens computed so far", lambda: engine.stats.prefilled_tokens),
            ("envace_reused_tokens", "Prompt tokens found in a kept cache so far", lambda: engine.stats.reused_tokens),
            ("envace_engine_faults", "Faults of the device so far", lambda: engine.faults),
        ):
            Gauge(name, text, registry=registry).set_function(read)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def count_usage(self, usage: dict[str, Any]) -> None:
        """Adds a finished request's `usage`."""
        self.tokens.labels("prompt").inc(usage["prompt_tokens"])
        self.tokens.labels("completion").inc(usage["completion_tokens"])
        self.tokens.labels("cached").inc(usage["prompt_tokens_details"]["cached_tokens"])
        for kind, count in usage.get("rehearsal_tokens", {}).items():
            self.rehearsal_tokens.labels(kind.removesuffix("_tokens")).inc(count)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=SECONDS, registry=self._registry)


class Counted:
    """ASGI middleware that counts answers by method, route and status, and times them."""

    def __init__(self, app: Any, counters: Counters):
        self._app, self._counters = app, counters

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def noting(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            # What nobody serves makes one line together, whatever it is called.
            route = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in ("GET", "POST") else "other"
            self._counters.requests.labels(method, route, str(status)).inc()
            self._counters.seconds.observe(time.monotonic() - began)
