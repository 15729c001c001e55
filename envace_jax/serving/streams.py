"""Server-sent events, and clients that go away, or read no more: whatever was being made for them is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from envace_jax.serving.engine import EngineStopped
from envace_jax.serving.protocol import RequestError

log = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[Any]]
Json = dict[str, Any]

SEND_SECONDS = 60.0  # for a client to take an event, beyond what buffers hold


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """What `work` gives; it is cancelled, and ClientDisconnect raised, once the client has gone away."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events of JSON objects, `[DONE]` in the end.

    An error under way is told as an event, by `error` of OpenAI's error object. `over` is called however it ends. A
    client that takes nothing for `SEND_SECONDS` counts as gone.
    """

    media_type = "text/event-stream"

    def __init__(
        self, source: AsyncIterator[Json], over: Callable[[], None], error: Callable[[Json], Json] = lambda body: body
    ):
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._source, self._over, self._error = source, over, error

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except ClientDisconnect:
            scope["app"].state.service.counters.disconnects.inc()
        finally:
            self._over()

    async def _send(self, send_at_last: Any) -> None:
        async def send(message: Json) -> None:
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await send_at_last(message)
            except TimeoutError:
                raise ClientDisconnect from None

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._source) as source:  # type: ignore[type-var]
            try:
                async for event in source:
                    await send(_part(json.dumps(event, ensure_ascii=False)))
            except EngineStopped as error:
                await send(_part(json.dumps(self._error(RequestError(503, str(error), code="unavailable").body))))
            except RequestError as error:
                await send(_part(json.dumps(self._error(error.body))))
            except ClientDisconnect:
                raise
            except Exception:
                log.exception("a stream failed")
                body = RequestError(500, "the server failed; its log says why", code="internal").body
                await send(_part(json.dumps(self._error(body))))
        await send(_part("[DONE]") | {"more_body": False})


def _part(data: str) -> Json:
    return {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}
