"""Server-sent events. They end when the client leaves: the work for it races against its disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, or cancel it as soon as the client is gone. The request's body must have been read.

    `_disconnect(receive)` returns when the client is gone. Work that is done by then is done. However the race ends, and also
    if it is cancelled itself, nothing of it still runs afterwards: neither the work, which may take a while to give back what
    it holds, nor the wait for the client.

    Returns:
        What the work returns; what it raises is raised.

    Raises:
        ClientDisconnect: the client was gone first.
    """
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        return doing.result()
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.wait((doing, leaving))  # what the work holds is given back by now


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. A client that reads slowly holds up this response: `send` waits until the socket takes more."""

    HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self._events, self._close = events, close
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except ClientDisconnect:
            return
        finally:
            self._close()  # here too, for a generator that was never begun ends nothing

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(self.HEADERS)})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
