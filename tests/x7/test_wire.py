"""The wire: whatever was damaged or made up on the way is refused, before memory is taken for it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from folovllm.electives.kv_transfer import wire
from folovllm.electives.kv_transfer.segment import START, Segment, open_segment

pytestmark = pytest.mark.x7
LAYOUT = wire.Layout(0, b"m", "float32", "", 4, (2, 2, 2, 4, 8), 1)
hashes = st.integers(0, 2**64 - 1)
segments = st.builds(wire.SegmentRef, st.text(max_size=30), st.binary(max_size=16), hashes)
shapes = st.lists(st.integers(1, 999)).map(tuple)
layouts = st.builds(wire.Layout, hashes, st.binary(), st.text(), st.text(), hashes, shapes, hashes)
messages: st.SearchStrategy[Any] = st.one_of(
    st.builds(wire.Hello, st.binary()),
    st.builds(wire.Ask, layouts, st.binary(), hashes, st.none() | st.text()),
    st.builds(wire.Piece, layouts, hashes, st.lists(hashes), st.binary(), hashes, st.binary(), segments),
    st.builds(wire.Reply, st.sampled_from(["bytes", "next", "nothing"])),
    st.builds(wire.Refusal, st.text()),
    st.just(wire.Done()),
)


def received(data: bytes, limit: int = wire.SHORT, kind: type[Any] = wire.Done, secret: bytes = b"s") -> Any:
    """What a client makes of these bytes, after which nothing comes."""

    async def read() -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        peer = wire.Connection(reader, None, secret, is_server=False)  # type: ignore[arg-type]
        return await peer.receive(kind, limit=limit)

    return asyncio.run(read())


def said(message: Any, secret: bytes = b"s", context: bytes = b"server" + bytes(8)) -> bytes:
    """A server's first message."""
    return wire.pack(message, secret, context)


@given(messages)
def test_a_message_comes_out_as_it_went_in(message: Any) -> None:
    data = said(message)
    assert wire.unpack(data[: wire.HEAD.size], data[wire.HEAD.size :], b"s", b"server" + bytes(8)) == message


@given(messages, st.data())
def test_a_message_that_was_cut_or_changed_is_none(message: Any, data: st.DataObject) -> None:
    whole = said(message)
    at = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(EOFError):
        received(whole[:at], kind=type(message))
    changed = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    with pytest.raises((wire.WireError, EOFError)):
        received(changed, kind=type(message))


@given(st.binary(max_size=200))
def test_what_strangers_say_is_refused(data: bytes) -> None:
    with pytest.raises((wire.WireError, EOFError)):
        received(data)
    with pytest.raises(wire.WireError):
        received(wire.HEAD.pack(wire.MAGIC, len(data), bytes(32)) + data)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (wire.HEAD.pack(wire.MAGIC, 2**32 - 1, bytes(32)), "announces 4294967295 bytes where 65536"),
        (wire.HEAD.pack(b"HTTP/1.1", 0, bytes(32)), "no peer of ours"),
        (said(wire.Hello(b"")), "a Hello where a Done was due"),
        (said(wire.Refusal("no time")), "no time"),
        (said(wire.Done(), secret=b"t"), "another secret"),
        (said(wire.Done(), context=b"client" + bytes(8)), "another secret"),  # its own words, sent back
        (said(wire.Done(), context=b"server" + b"\1" + bytes(7)), "another secret"),  # said again
        (said(wire.Done(), context=b"server" + bytes(32 + 8)), "another secret"),  # of another connection
    ],
)
def test_a_refusal_says_why(data: bytes, says: str) -> None:
    with pytest.raises(wire.WireError, match=says):
        received(data)


def test_layouts_differ_in_a_sentence() -> None:
    LAYOUT.require_same(LAYOUT)
    assert LAYOUT.block_bytes == 2 * 2 * 2 * 4 * 8
    for name, value in zip(LAYOUT.__struct_fields__, (1, b"o", "o", "o", 8, (1,), 2), strict=True):
        with pytest.raises(wire.WireError, match=f"another {name}: "):
            LAYOUT.require_same(msgspec.structs.replace(LAYOUT, **{name: value}))


TOKENS, KEYS = bytes(range(64)), [5, 6, 7, 8]
SOUND = wire.Piece(LAYOUT, 1, [6, 7], TOKENS[16:48], 2 * LAYOUT.block_bytes, b"", wire.SegmentRef("", b"", 0))


@pytest.mark.parametrize(
    "changes",
    [
        {"first": 2}, {"keys": [6, 9]}, {"keys": []}, {"keys": [6, 7, 8, 9]}, {"token_ids": TOKENS[:32]},
        {"num_bytes": LAYOUT.block_bytes}, {"num_bytes": 2**62},
        {"layout": msgspec.structs.replace(LAYOUT, weights=1)},
    ],
)  # fmt: skip
def test_a_piece_is_what_was_asked_for(changes: dict[str, Any]) -> None:
    ask = wire.Ask(LAYOUT, TOKENS, 1, None)
    SOUND.require_sound(ask, 1, KEYS)
    with pytest.raises(wire.WireError):
        msgspec.structs.replace(SOUND, **changes).require_sound(ask, 1, KEYS)


def test_memory_is_shared_only_as_it_was_offered() -> None:
    segment = Segment(100)
    path, nonce, size = msgspec.structs.astuple(segment.ref)
    segment.data[:3] = b"abc"
    memory = open_segment(segment.ref)
    assert memory[START : START + 3] == b"abc"
    for other in (
        (path, b"x" * 16, size),
        (path, nonce, size + 1),
        ("/etc/passwd", nonce, size),
        (path, nonce, 2**40),
        ("/proc/1/fd/99", nonce, size),
    ):
        with pytest.raises(wire.WireError):
            open_segment(wire.SegmentRef(*other))  # type: ignore[arg-type]
    segment.close()
    with pytest.raises(wire.WireError):
        open_segment(segment.ref)
    assert memory[START : START + 3] == b"abc", "who has it open still sees it"
