"""The HTTP side: routes, limits, errors in OpenAI's shape, and what requests share.

Requests are read and tokenised in threads and decoded in the engine's; the event loop only passes pieces on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from envace_jax.rehearsal import Settings
from envace_jax.serving import completions, openapi, protocol
from envace_jax.serving.completions import Asked, Generation, Served
from envace_jax.serving.counters import Counted, Counters
from envace_jax.serving.engine import EngineStopped
from envace_jax.serving.protocol import ChatRequest, Conversation, Rehearsal, RehearsalRequest, RequestError
from envace_jax.serving.rehearsals import Rehearsals, Rehearsed, segment_told
from envace_jax.serving.streams import EventStream, unless_gone
from envace_jax.types import Segment

PAGE = Path(__file__).resolve().parent / "page.html"
UNREAD = 32 << 20  # bytes of a refused body that are taken, so that its sender gets to read why
Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """How the server treats its clients."""

    api_key: str = ""  # "" asks for none
    hosts: tuple[str, ...] = ()  # names that it may be called by, without ports; none: any
    max_body: int = 4 << 20  # bytes of a request
    queue: int = 256  # choices that may wait for a slot; beyond them requests are refused with status 429
    rehearsal: Settings = dataclasses.field(default_factory=lambda: Settings(mode="none"))  # of requests with tools


class Service:
    """What requests share: the model, the options, and how much is under way."""

    def __init__(self, served: Served, options: Options):
        self.served, self.options = served, options
        self.load = 0  # choices of requests under way
        self.stopping = False  # what is under way is finished, nothing new is taken
        self.counters = Counters(served.engine, lambda: self.load)
        self.rehearsals = Rehearsals(served, options.rehearsal)
        self.readers = ThreadPoolExecutor(2, thread_name_prefix="reader")

    def check_ready(self) -> None:
        if self.stopping or not self.served.engine.alive:
            raise RequestError(503, "the server is shutting down", code="unavailable", retry=True)

    def admit(self, choices: int) -> Callable[[], None]:
        """Takes a request with so many choices in; what it gives is to be called when that is over, once or more."""
        most = self.served.engine.slots + self.options.queue
        if self.load and self.load + choices > most:
            raise RequestError(
                429, f"{self.load} choices are under way and {most} may be; try again later",
                code="rate_limit_exceeded", retry=True,
            )  # fmt: skip
        self.load += choices
        left = choices

        def leave() -> None:
            nonlocal left
            self.load -= left
            left = 0

        return leave

    def generate(self, asked: Asked, rehearsed: Rehearsed | None) -> Generation:
        return Generation(self.served, asked if rehearsed is None else rehearsed.asked)

    def count(self, generation: Generation, rehearsed: Rehearsed | None) -> Json:
        """The usage of a request that is over; it is counted."""
        usage = generation.usage() if rehearsed is None else rehearsed.usage(generation.usage())
        self.counters.count_usage(usage)
        if rehearsed is not None:
            self.counters.rehearsals.labels("made" if rehearsed.fresh else "kept").inc()
        for seconds in generation.queue_seconds:
            self.counters.queue_seconds.observe(seconds)
        self.counters.first_token_seconds.observe(generation.first_token_seconds)
        return usage

    async def in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.readers, work, *arguments)

    def close(self) -> None:
        self.readers.shutdown(wait=False, cancel_futures=True)
        self.rehearsals.close()


def make_app(served: Served, options: Options | None = None) -> FastAPI:
    """The application for a running engine; `app.state.service` is what its requests share."""
    service = Service(served, options or Options())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="envace_jax", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    app.add_middleware(Counted, counters=service.counters)

    async def authorised(request: Request) -> None:
        try:
            _check_host(request, service.options.hosts)
            _check_key(request, service.options.api_key)
            service.check_ready()
        except RequestError as error:
            error.close = not await _drained(request)
            raise

    guarded = [Depends(authorised)]

    @app.post("/v1/chat/completions", dependencies=guarded, **openapi.chat_completions())
    async def chat_completions(request: Request) -> Response:
        return await _complete(service, request)

    @app.post("/v1/rehearsals", dependencies=guarded, **openapi.rehearsals())
    async def rehearsals(request: Request) -> Response:
        return await _rehearse(service, request)

    @app.get("/v1/models", dependencies=guarded, **openapi.models())
    async def models() -> Json:
        return {"object": "list", "data": [_model(served)]}

    @app.get("/v1/models/{name:path}", dependencies=guarded, **openapi.model())
    async def model(name: str) -> Json:
        if name != served.name:
            message = f"The model {name!r} does not exist; served is {served.name!r}"
            raise RequestError(404, message, param="model", code="model_not_found")
        return _model(served)

    _add_open_routes(app, service)
    _answer_errors(app)
    openapi.describe(app)
    return app


def _add_open_routes(app: FastAPI, service: Service) -> None:
    """What is given without a key."""

    @app.get("/health", **openapi.health())
    async def health() -> Json:
        service.check_ready()
        return {"status": "ok"}

    @app.get("/metrics", **openapi.text())
    async def metrics() -> Response:
        return Response(service.counters.text(), headers={"Content-Type": service.counters.content_type})

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        if not PAGE.is_file():
            raise RequestError(404, "this server has no page", code="not_found")
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))


def _model(served: Served) -> Json:
    return {
        "id": served.name, "object": "model", "created": served.created, "owned_by": "envace_jax",
        "max_model_len": served.engine.max_length,
    }  # fmt: skip


# --- reading requests ---


def _check_host(request: Request, names: tuple[str, ...]) -> None:
    """A web page can have its own name lead here: then a browser lets it ask, and tells it what is answered."""
    name = request.headers.get("host", "").rpartition("]")[2].partition(":")[0]
    name = name or request.headers.get("host", "").partition("]")[0].lstrip("[")
    if names and name.lower() not in names:
        raise RequestError(403, f"this server is not called {name[:100]!r}", code="wrong_host")


def _check_key(request: Request, key: str) -> None:
    if not key:
        return
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    # Compared as bytes, in a time that does not depend on how much of it is right.
    right = hmac.compare_digest(given.strip().encode("latin-1"), key.encode("utf-8"))
    if kind.lower() != "bearer" or not right:
        raise RequestError(401, "an API key is needed, as 'Authorization: Bearer KEY'", code="invalid_api_key")


async def _read_body(request: Request, limit: int) -> bytes:
    """The body's bytes. Raises RequestError for what is too large, or not sent as JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    refused = None
    if kind != "application/json":  # a web page of another origin cannot send that without being allowed to
        refused = RequestError(415, "the body must be sent as 'Content-Type: application/json'", code="invalid_type")
    elif coding := request.headers.get("content-encoding"):
        refused = RequestError(415, f"a body in {coding[:50]!r} is not accepted; send it as it is", code="invalid_type")
    data, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size > limit and refused is None:
            refused = RequestError(413, f"the body is larger than {limit} bytes", code="request_too_large")
        if refused is None:
            data += part
        elif size > UNREAD:
            refused.close = True
            break
    if refused is not None:
        raise refused
    return bytes(data)


async def _drained(request: Request) -> bool:
    """Takes a body that nobody reads; False where it is too long for that."""
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > UNREAD:
            return False
    return True


def _read_chat(served: Served, body: bytes) -> Asked:
    value = protocol.parse(body)
    request: ChatRequest = protocol.read(ChatRequest, value)
    asked = completions.read_conversation(served, request, value)
    if request.stream_options is not None and not request.stream:
        raise RequestError(
            400, "'stream_options' is only allowed with 'stream': true", param="stream_options", code="invalid_value"
        )
    return asked


def _read_rehearsal(served: Served, body: bytes) -> Asked:
    value = protocol.parse(body)
    request: RehearsalRequest = protocol.read(RehearsalRequest, value)
    as_chat = ChatRequest.model_construct(
        **{name: getattr(request, name) for name in Conversation.model_fields},
        rehearsal=Rehearsal(mode=request.mode, n=request.n, return_transcript=False, reuse=False),
        temperature=request.temperature, max_tokens=request.max_tokens,
    )  # fmt: skip
    return completions.read_conversation(served, as_chat, value)


# --- answers ---


async def _complete(service: Service, request: Request) -> Response:
    asked = await service.in_thread(_read_chat, service.served, await _read_body(request, service.options.max_body))
    leave = service.admit(service.rehearsals.count(asked))
    if asked.request.stream:
        return EventStream(_chunks(service, asked), leave)
    try:
        return JSONResponse(await unless_gone(request.receive, _whole(service, asked)))
    finally:
        leave()


async def _whole(service: Service, asked: Asked) -> Json:
    identity = completions.new_id(), int(time.time())
    rehearsed = await service.rehearsals.rehearsed(asked)
    with contextlib.closing(service.generate(asked, rehearsed)) as generation:
        deltas = [delta async for delta in generation.deltas()]
    usage = service.count(generation, rehearsed)
    more: Json = {"usage": usage}
    if rehearsed is not None and asked.request.rehearsal and asked.request.rehearsal.return_transcript:
        more["rehearsal"] = rehearsed.transcript(service.served)
    return completions.completion(service.served, identity, deltas, bool(asked.request.logprobs), **more)


async def _chunks(service: Service, asked: Asked) -> AsyncIterator[Json]:
    served, request = service.served, asked.request
    identity = completions.new_id(), int(time.time())
    wants_usage = request.stream_options is not None and request.stream_options.include_usage
    more: Json = {"usage": None} if wants_usage else {}
    for index in range(request.n or 1):
        yield completions.chunk(served, identity, [completions.opening_choice(index)], **more)
    rehearsed = await service.rehearsals.rehearsed(asked)
    with contextlib.closing(service.generate(asked, rehearsed)) as generation:
        async for delta in generation.deltas():
            for choice in completions.chunk_choices(delta, bool(request.logprobs)):
                yield completions.chunk(served, identity, [choice], **more)
    usage = service.count(generation, rehearsed)
    if wants_usage:
        more["usage"] = usage
    if rehearsed is not None and request.rehearsal and request.rehearsal.return_transcript:
        more["rehearsal"] = rehearsed.transcript(served)
    if wants_usage or "rehearsal" in more:
        yield completions.chunk(served, identity, [], **more)


async def _rehearse(service: Service, request: Request) -> Response:
    """A rehearsal as it goes, and what is then said: server-sent events."""
    body = await _read_body(request, service.options.max_body)
    asked = await service.in_thread(_read_rehearsal, service.served, body)
    if asked.messages[-1]["role"] not in ("user", "tool"):
        raise RequestError(
            400, "'messages' must end with a user's message or with tool results", param="messages",
            code="invalid_value",
        )  # fmt: skip
    leave = service.admit(service.rehearsals.count(asked))
    return EventStream(_rehearsal_events(service, asked), leave, error=lambda body: {"type": "error", **body})


async def _rehearsal_events(service: Service, asked: Asked) -> AsyncIterator[Json]:
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Segment] | None]()

    def tell(attempt: int, segment: Segment) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone
            loop.call_soon_threadsafe(queue.put_nowait, (attempt, segment))

    making = asyncio.ensure_future(service.rehearsals.rehearsed(asked, tell))
    making.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (told := await queue.get()) is not None:
            yield {"type": "segment", "attempt": told[0], **segment_told(service.served, told[1])}
        rehearsed = await making
    finally:
        making.cancel()
    if rehearsed is not None:
        yield {"type": "memory", "text": rehearsed.memory.text}
    with contextlib.closing(service.generate(asked, rehearsed)) as generation:
        deltas = [delta async for delta in generation.deltas()]
    usage = service.count(generation, rehearsed)
    (choice,) = completions.completion(service.served, ("", 0), deltas, False)["choices"]
    yield {"type": "message", "message": choice["message"], "finish_reason": choice["finish_reason"]}
    yield {"type": "done", "usage": usage}


# --- errors ---


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        headers = {"Retry-After": "1"} if error.retry else {}
        if error.close:  # or the rest of the body would be taken for as long as it comes
            headers["Connection"] = "close"
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(error.body, error.status, headers)

    @app.exception_handler(HTTPException)
    async def not_there(request: Request, error: HTTPException) -> Response:
        messages = {404: f"no such path: {request.url.path!r}", 405: f"{request.method} is not allowed here"}
        codes = {404: "not_found", 405: "method_not_allowed"}
        message = messages.get(error.status_code, str(error.detail))[:400]
        body = RequestError(error.status_code, message, code=codes.get(error.status_code)).body
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(EngineStopped)
    async def stopped(request: Request, error: EngineStopped) -> Response:
        return JSONResponse(RequestError(503, str(error), code="unavailable").body, 503, {"Retry-After": "1"})

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        app.state.service.counters.disconnects.inc()
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return JSONResponse(RequestError(500, "the server failed; its log says why", code="internal").body, 500)
