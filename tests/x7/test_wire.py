"""The wire: whatever was damaged or made up on the way is refused, before memory is taken for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from folovllm.electives.kv_transfer import wire
from folovllm.electives.kv_transfer.segment import Segment, open_segment
from tests.x7.pair import between

pytestmark = pytest.mark.x7
LAYOUT = wire.Layout(b"m", "float32", 4, 1, 256)
hashes = st.integers(0, 2**64 - 1)
segments = st.builds(wire.SegmentRef, st.text(max_size=30), st.binary(max_size=16))
layouts = st.builds(wire.Layout, st.binary(), st.text(), hashes, hashes, hashes)
messages: st.SearchStrategy[Any] = st.one_of(
    st.builds(wire.PrefillRequest, layouts, st.binary(), hashes, st.none() | st.text()),
    st.builds(wire.Blocks, layouts, hashes, st.binary(), segments),
    st.sampled_from(["bytes", "next", None]),
    st.builds(wire.Refusal, st.text()),
)


def ask(data: bytes, work: Callable[[wire.Connection], Awaitable[Any]]) -> Any:
    """What comes of this work at a client's end of a connection in which these bytes come, and nothing more."""

    async def run() -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await work(wire.Connection(reader, Mock(drain=AsyncMock()), b"s", is_server=False))

    return asyncio.run(run())


def said(message: Any) -> bytes:
    """A message as it is written."""

    async def write(peer: Any) -> bytes:
        await peer.send(message)
        return bytes(peer.writer.write.call_args.args[0])

    return bytes(ask(b"", write))


def received(data: bytes, kind: Any = wire.Blocks) -> Any:
    """What a client makes of these bytes."""
    return ask(data, lambda peer: peer.receive(kind))


@given(messages, st.data())
def test_a_message_comes_out_as_it_went_in_or_not_at_all(message: Any, data: st.DataObject) -> None:
    whole = said(message)
    kind = wire.Reply | None if message in ("bytes", "next", None) else type(message)
    if not isinstance(message, wire.Refusal):
        assert received(whole, kind=kind) == message
    with pytest.raises(EOFError):
        received(whole[: data.draw(st.integers(0, len(whole) - 1))], kind=kind)


@given(st.binary(max_size=200))
def test_what_strangers_say_is_refused(data: bytes) -> None:
    with pytest.raises((wire.WireError, EOFError)):
        received(data, kind=wire.Blocks)
    with pytest.raises((wire.WireError, EOFError)):
        ask(data, wire.Connection.handshake)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (bytes([255] * 4), "announces 4294967295 bytes where 65536"),
        (said("next"), "another message than it owes: .*str"),
        (said(wire.Refusal("no time")), "no time"),
        (b"\3\0\0\0abc", "another message than it owes"),
    ],
)
def test_a_refusal_says_why(data: bytes, says: str) -> None:
    with pytest.raises(wire.WireError, match=says):
        received(data)


async def greeting(secret: bytes = b"s", is_server: bool = True, at: int = 10**9) -> None:
    """A client greets another end. Of what that one says, a bit of byte `at` changes on the way."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ValueError, EOFError, OSError):
            await wire.Connection(reader, writer, secret, is_server).handshake()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with between(server.sockets[0].getsockname()[1], "flip", at) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await wire.Connection(reader, writer, b"s", is_server=False).handshake()
        finally:
            writer.close()
            server.close()


def test_both_sides_prove_that_they_know_the_secret() -> None:
    asyncio.run(greeting())
    for secret, is_server in ((b"t", True), (b"s", False), (b"", True)):  # the second says our own words
        with pytest.raises(wire.WireError, match="another secret"):
            asyncio.run(greeting(secret, is_server))
    for at in range(len(wire.MAGIC) + wire.NONCE + 32):
        with pytest.raises(wire.WireError, match="no peer of ours" if at < len(wire.MAGIC) else "another secret"):
            asyncio.run(greeting(at=at))


def test_layouts_differ_in_a_sentence() -> None:
    LAYOUT.require_same(LAYOUT)
    for name, value in zip(LAYOUT.__struct_fields__, (b"o", "o", 8, 2, 1), strict=True):
        with pytest.raises(wire.WireError, match=f"another {name}: "):
            LAYOUT.require_same(msgspec.structs.replace(LAYOUT, **{name: value}))


def test_blocks_are_those_that_were_asked_for() -> None:
    """Of four blocks those from number 1 on; not none, no more than the prompt has, and no more than fit in memory."""
    request = wire.PrefillRequest(LAYOUT, bytes(64), 1, None)

    def require(end: int, request: wire.PrefillRequest = request, layout: wire.Layout | None = None) -> None:
        request.require_next(wire.Blocks(layout or request.layout, end, b"", wire.SegmentRef("", b"")), 1)

    require(2)
    require(4)
    for end in (-1, 0, 1, 5, 2**40):
        with pytest.raises(wire.WireError, match="not asked for"):
            require(end)
    with pytest.raises(wire.WireError, match="another model"):
        require(3, layout=msgspec.structs.replace(LAYOUT, model=b"o"))
    large = msgspec.structs.replace(LAYOUT, block_bytes=wire.MOST_BYTES)
    with pytest.raises(wire.WireError, match="not asked for"):
        require(3, msgspec.structs.replace(request, layout=large))


def test_memory_is_shared_only_as_it_was_offered() -> None:
    segment = Segment(100)
    path, nonce = msgspec.structs.astuple(segment.ref)
    segment.data[:3] = b"abc"
    memory = open_segment(segment.ref)
    assert memory is not None and bytes(memory[:3]) == b"abc"
    for other in ((path, b"x" * 16), ("/etc/passwd", nonce), ("/proc/1/fd/99", nonce), ("", nonce), ("\0", nonce)):
        assert open_segment(wire.SegmentRef(*other)) is None
    segment.close()
    open_segment.cache_clear()
    assert open_segment(segment.ref) is None
    assert bytes(memory[:3]) == b"abc", "who has it open still sees it"
