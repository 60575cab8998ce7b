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


def test_a_slow_socket_holds_up_its_own_stream_alone() -> None:
    """Nothing is read ahead of a `send` that waits."""

    async def main() -> None:
        made: list[int] = []
        may_send = asyncio.Event()

        async def count() -> AsyncIterator[bytes]:
            for i in range(5):
                made.append(i)
                yield b"x"

        async def send(message: Any) -> None:
            if message.get("body"):
                await may_send.wait()

        task = asyncio.ensure_future(EventStream(count(), lambda: None)({"method": "GET"}, Client().receive, send))
        for _ in range(20):
            await asyncio.sleep(0)
        assert made == [0]
        may_send.set()
        await task
        assert made == [0, 1, 2, 3, 4]

    asyncio.run(asyncio.wait_for(main(), 30))
