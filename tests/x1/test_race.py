"""Work for a client races against the client's going away. Clients are scripted: no socket, no clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from functools import partial, wraps
from types import coroutine
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from folovllm.electives.server.sse import EventStream, unless_gone
from tests.tiny import worked_case

GONE = {"type": "http.disconnect"}


class Client:
    """What ASGI's `receive` says of a client that goes when a test says so."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.goes = asyncio.Event()
        self.messages = list(messages)  # that come before
        self.is_watched = False

    async def receive(self) -> dict[str, Any]:
        if self.messages:
            return self.messages.pop(0)
        self.is_watched = True
        try:
            await self.goes.wait()
        finally:
            self.is_watched = False
        return GONE


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a test's coroutine; what would wait for ever fails."""
    return asyncio.run(asyncio.wait_for(main(), 20))


def in_a_loop(test: Callable[[Any], Coroutine[Any, Any, None]]) -> Callable[[Any], None]:
    """A test that runs in an event loop of its own."""
    return wraps(test)(lambda self: run(partial(test, self)))


async def told(race: Awaitable[Any]) -> str:
    """What comes of a race, in a word."""
    try:
        return str(await race)
    except (ClientDisconnect, ValueError, asyncio.CancelledError) as error:
        return type(error).__name__


def time_flies() -> None:
    """From now on each time-out of the running event loop, which ends with the test, is over at once."""
    loop = asyncio.get_running_loop()
    call_at = loop.call_at
    loop.call_at = lambda when, *args, **extra: call_at(loop.time(), *args, **extra)  # type: ignore[method-assign]


async def turns(count: int = 30) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@coroutine
def counted(race: Coroutine[Any, Any, str], steps: list[str]) -> Generator[Any, Any, str]:
    """The same race; each time it goes on is noted in `steps`."""
    going = race.__await__()
    while True:
        steps.append("it goes on")
        try:
            waits_for = next(going)
        except StopIteration as end:
            return str(end.value)
        yield waits_for


class TestUnlessGone:
    def test_a_worked_case(self) -> None:
        """The client goes while the work holds blocks, and to give them back takes the work two turns of the loop."""

        async def main() -> list[str]:
            client, log = Client(), []

            async def work() -> None:
                log.append("the work begins")
                try:
                    client.goes.set()
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    log.append("the blocks are given back")

            log.append(await told(unless_gone(client.receive, work())))
            for _ in range(5):
                await asyncio.sleep(0)  # what comes too late is seen, too
            return list(log)

        says = "the client goes, so the work is cancelled and waited for, and only then somebody hears of it"
        expected = ["the work begins", "the blocks are given back", "ClientDisconnect"]
        worked_case("x1.4", run(main), expected, says)

    @in_a_loop
    async def test_work_that_ends_first(self) -> None:
        """Its result comes, and nobody listens to the client any more."""
        client, others = Client(), asyncio.all_tasks()

        async def work() -> str:
            while not client.is_watched:
                await asyncio.sleep(0)
            return "done"

        assert await told(unless_gone(client.receive, work())) == "done", "the work's result is handed on"
        assert not client.is_watched, "who listened for the client's end has been cancelled, and is over"
        assert asyncio.all_tasks() == others, "no task is left behind"

    @in_a_loop
    async def test_work_that_fails(self) -> None:
        client = Client()

        async def work() -> None:
            await asyncio.sleep(0)
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await unless_gone(client.receive, work())
        assert not client.is_watched, "also then nobody listens any more"

    @in_a_loop
    async def test_both_at_the_same_moment(self) -> None:
        """What is done is done: an answer that was computed is not thrown away."""
        client = Client()
        client.goes.set()

        async def work() -> str:
            return "done"

        assert await told(unless_gone(client.receive, work())) == "done", "the work was done when the client went"

    @in_a_loop
    async def test_other_messages_are_no_goodbye(self) -> None:
        """A body's last piece may still come: only `http.disconnect` ends the work."""
        client = Client({"type": "http.request", "body": b"", "more_body": False})

        async def work() -> str:
            for _ in range(5):
                await asyncio.sleep(0)
            return "done"

        assert await told(unless_gone(client.receive, work())) == "done", "http.request is not http.disconnect"

    @in_a_loop
    async def test_whoever_races_may_be_cancelled(self) -> None:
        """The server shuts down: work and listener end, before the race is over."""
        client, held, others = Client(), ["blocks"], asyncio.all_tasks()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                held.clear()

        race = asyncio.ensure_future(told(unless_gone(client.receive, work())))
        while not client.is_watched:
            await asyncio.sleep(0)
        race.cancel()
        assert await race == "CancelledError", "a race that is cancelled says so"
        assert held == [], "the work has given back what it held"
        assert not client.is_watched, "nobody listens any more"
        assert asyncio.all_tasks() == others, "no task is left behind"

    @in_a_loop
    async def test_it_waits_without_asking(self) -> None:
        """Nothing happens for 30 turns of the event loop, in which every time-out is over at once."""
        client, steps, is_done = Client(), list[str](), asyncio.Event()

        async def work() -> str:
            await is_done.wait()
            return "done"

        time_flies()
        race = asyncio.ensure_future(counted(told(unless_gone(client.receive, work())), steps))
        await turns()
        assert not race.done(), "the work goes on, and the client is there: nothing has ended but a time-out"
        assert len(steps) < 5, f"it went on {len(steps)} times and nothing had happened: it polls"
        is_done.set()
        assert await race == "done", "the work's result is handed on"

    @in_a_loop
    async def test_the_work_takes_its_time_to_give_back_what_it_holds(self) -> None:
        client, held, may_end = Client(), ["blocks"], asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await may_end.wait()
                held.clear()

        time_flies()
        race = asyncio.ensure_future(told(unless_gone(client.receive, work())))
        await turns()
        client.goes.set()
        await turns()
        assert held and not race.done(), "the work still holds its blocks: the race waits for it, however long it takes"
        may_end.set()
        assert await race == "ClientDisconnect" and not held, "the client was gone first"

    @in_a_loop
    async def test_work_that_ends_although_it_was_cancelled(self) -> None:
        """What it returns comes too late: nobody is there to read it."""
        client = Client()

        async def work() -> str:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return "too late"
            return "never"

        race = asyncio.ensure_future(told(unless_gone(client.receive, work())))
        await turns()
        client.goes.set()
        assert await race == "ClientDisconnect", "the client was gone first, whatever the work says then"


class TestEventStream:
    @in_a_loop
    async def test_it_is_closed_however_it_ends(self) -> None:
        got, closed = list[dict[str, Any]](), list[str]()

        async def events() -> AsyncIterator[bytes]:
            for event in (b"one", b"two"):
                await asyncio.sleep(0)
                yield event

        async def send(message: Any) -> None:
            got.append(message)

        async def broken(message: Any) -> None:
            raise OSError("the socket is closed")

        async def respond(client: Client, send: Any, name: str) -> None:
            await EventStream(events(), lambda: closed.append(name))({"method": "GET"}, client.receive, send)

        gone = Client()  # before the first event
        gone.goes.set()
        await respond(Client(), send, "at its end")
        assert [message.get("body") for message in got] == [None, b"one", b"two", b""]
        await respond(gone, send, "client gone")
        with pytest.raises(OSError, match="is closed"):
            await respond(Client(), broken, "socket closed")
        assert closed == ["at its end", "client gone", "socket closed"]
