"""The wire: whatever was damaged or made up on the way is refused, before memory is taken for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from folovllm.electives.kv_transfer import wire
from folovllm.electives.kv_transfer.segment import START, Segment, open_segment

pytestmark = pytest.mark.x7
LAYOUT = wire.Layout("m", 0, "float32", "", 2, 2, 4, 8)
hashes = st.integers(0, 2**64 - 1)
segments = st.builds(wire.SegmentRef, st.text(max_size=30), st.binary(max_size=16), hashes)
layouts = st.builds(wire.Layout, st.text(), hashes, st.text(), st.text(), *[st.integers(1, 999)] * 4)
messages: st.SearchStrategy[Any] = st.one_of(
    st.builds(wire.Hello, hashes, st.binary()),
    st.builds(wire.Proof, st.binary(), st.binary(), layouts),
    st.builds(wire.Welcome, st.binary(), layouts, st.none() | segments),
    st.builds(wire.Ask, st.binary(), hashes, st.none() | st.text(), st.booleans()),
    st.builds(wire.Piece, layouts, hashes, st.lists(hashes), st.binary(), hashes, st.binary(), st.none() | segments),
    st.builds(wire.Refusal, st.text()),
    st.just(wire.Done()),
)


def received(data: bytes, limit: int = wire.SHORT, kind: type[Any] = wire.Done, *others: type[Any]) -> Any:
    """What a peer makes of these bytes, after which nothing comes."""

    async def read() -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await wire.Connection(reader, None).receive(kind, *others, limit=limit)  # type: ignore[arg-type]

    return asyncio.run(read())


@given(messages)
def test_a_message_comes_out_as_it_went_in(message: Any) -> None:
    data = wire.encode(message)
    assert wire.decode(data[: wire.HEAD.size], data[wire.HEAD.size :]) == message


@given(messages, st.data())
def test_a_message_that_was_cut_or_changed_is_none(message: Any, data: st.DataObject) -> None:
    whole = wire.encode(message)
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


def test_a_length_is_checked_before_anything_is_read() -> None:
    with pytest.raises(wire.WireError, match="announces 4294967295 bytes where 65536"):
        received(wire.HEAD.pack(wire.MAGIC, 2**32 - 1, 0))
    with pytest.raises(wire.WireError, match="a Hello where a Done was due"):
        received(wire.encode(wire.Hello(1, b"")))
    with pytest.raises(wire.WireError, match="no time"):
        received(wire.encode(wire.Refusal("no time")))


def greeted(secrets: tuple[bytes, bytes], layouts: tuple[wire.Layout, wire.Layout]) -> list[str]:
    """What a server and a client say at the end of a greeting."""

    async def meet() -> list[str]:
        said: dict[str, str] = {}

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = wire.Connection(reader, writer)
            try:
                await wire.greet_as_server(peer, secrets[0], layouts[0], None)
            except (wire.WireError, EOFError) as error:
                said["server"] = str(error)
                await peer.send(wire.Refusal(str(error)))
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            peer = wire.Connection(*await asyncio.open_connection(*server.sockets[0].getsockname()))
            try:
                await wire.greet_as_client(peer, secrets[1], layouts[1])
            except (wire.WireError, EOFError) as error:
                said["client"] = str(error)
            finally:
                peer.writer.close()
        return [said.get(who, "") for who in ("server", "client")]

    return asyncio.run(meet())


def test_peers_greet_by_one_secret_and_one_layout() -> None:
    assert greeted((b"a", b"a"), (LAYOUT, LAYOUT)) == ["", ""]
    for reason in greeted((b"a", b"b"), (LAYOUT, LAYOUT)):
        assert "another secret" in reason
    for i, name in enumerate(LAYOUT.__struct_fields__):
        values = list(wire.astuple(LAYOUT))
        values[i] = "other" if isinstance(values[i], str) else 7
        for reason in greeted((b"", b""), (LAYOUT, wire.Layout(*values))):  # type: ignore[arg-type]
            assert f"another {name.replace('_', ' ')}: " in reason


def test_a_proof_is_of_one_connection_and_one_side() -> None:
    proof = wire.mac_of(b"s", "client", b"1" * 16, b"2" * 16)
    wire.require_proof(proof, b"s", "client", b"1" * 16, b"2" * 16)
    for who, nonces in (
        ("server", (b"1" * 16, b"2" * 16)),
        ("client", (b"1" * 16, b"3" * 16)),
        ("client", (b"2" * 16, b"1" * 16)),
    ):
        with pytest.raises(wire.WireError):
            wire.require_proof(proof, b"s", who, *nonces)


TOKENS, KEYS = bytes(range(64)), [5, 6, 7, 8]
ASK = wire.Ask(TOKENS, 1, None, False)
SOUND = wire.Piece(LAYOUT, 1, [6, 7], TOKENS[16:48], 2 * LAYOUT.block_bytes, b"", None)


@pytest.mark.parametrize(
    "changes",
    [
        {"first": 2}, {"keys": [6, 9]}, {"keys": []}, {"token_ids": TOKENS[:32]}, {"num_bytes": LAYOUT.block_bytes},
        {"num_bytes": 2**62}, {"keys": [6, 7, 8, 9]}, {"memory": wire.SegmentRef("/etc/passwd", b"", 1)},
    ],
)  # fmt: skip
def test_a_piece_is_what_was_asked_for(changes: dict[str, Any]) -> None:
    SOUND.require_sound(ASK, 1, KEYS)
    values = dict(zip(SOUND.__struct_fields__, wire.astuple(SOUND), strict=True))
    with pytest.raises(wire.WireError):
        wire.Piece(**values | changes).require_sound(ASK, 1, KEYS)


def test_memory_is_shared_only_as_it_was_offered() -> None:
    segment = Segment(100)
    path, nonce, size = wire.astuple(segment.ref)
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
