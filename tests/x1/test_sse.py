"""Responses and the clients that they are for, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from folovllm.electives.server.sse import EventStream


class Client:
    """One end of ASGI: what it got, and a moment at which it goes."""

    def __init__(self) -> None:
        self.goes = asyncio.Event()
        self.got: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        await self.goes.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.got.append(message)

    @property
    def text(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.got)


async def events(*items: bytes) -> AsyncIterator[bytes]:
    for item in items:
        await asyncio.sleep(0)
        yield item


def test_a_stream_is_closed_however_it_ends() -> None:
    async def main() -> None:
        client, closed = Client(), []
        await EventStream(events(b"one", b"two"), lambda: closed.append(1))(
            {"method": "GET"}, client.receive, client.send
        )
        assert (client.text, closed) == (b"onetwo", [1])
        assert client.got[-1] == {"type": "http.response.body", "body": b"", "more_body": False}

        client = Client()  # gone before the first event
        client.goes.set()
        await EventStream(events(b"one"), lambda: closed.append(2))({"method": "GET"}, client.receive, client.send)
        assert closed == [1, 2]

        async def broken(message: Any) -> None:
            raise OSError("the socket is closed")

        with pytest.raises(OSError, match="is closed"):
            await EventStream(events(b"one"), lambda: closed.append(3))({"method": "GET"}, Client().receive, broken)
        assert closed == [1, 2, 3]

    asyncio.run(asyncio.wait_for(main(), 30))
