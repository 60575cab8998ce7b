"""What two engines say to each other over a socket: each message has a header, and each length is known before memory is taken.

A message is MAGIC, its length and an HMAC, then itself in msgpack. The HMAC is over the secret, a number that each side has just made
up, who speaks, and how often before. So it is a checksum, too, and no message can be made by a stranger, said again, or said in the
other direction. Nothing is encrypted: prompts and K/V go as they are, and K/V have a checksum (xxh3) alone.

A `Piece` describes K/V. They lie in memory that both processes see, where both are on one host, or come behind it.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import struct
from collections.abc import Coroutine
from math import prod
from typing import Any, Literal, TypeVar, cast

import msgspec
import xxhash

from folovllm.models.messages import printable

MAGIC = b"FOLOKV1\n"  # the version is in it
HEAD = struct.Struct("<8sI32s")  # magic, length and HMAC of what follows
SHORT = 1 << 16  # the longest message without tokens, in bytes
NONCE = 16  # bytes
STALLED = 10.0  # seconds
LONGEST_PIECE = 256 << 20  # bytes of K/V
SLICE = 16 << 20  # bytes that one thread hashes at a time


class WireError(ValueError):
    """The peer said what it must not say, or refuses; the sentence says what."""


class SegmentRef(msgspec.Struct, array_like=True, frozen=True):
    """Where memory lies that two processes share (`folovllm.electives.kv_transfer.segment`)."""

    path: str
    nonce: bytes  # its first bytes, so that another file in its place is not taken for it
    size: int  # bytes, all of it


class Layout(msgspec.Struct, array_like=True, frozen=True):
    """What the bytes of a block depend on, beside its tokens: they mean the same to two engines if all of this is equal."""

    weights: int  # how often the weights have changed since the start (X6)
    model: bytes  # digest of configuration and weights
    dtype: str  # of a number in the cache
    scales: str  # digest of what the numbers of an 8-bit cache are multiples of
    block_size: int  # B
    shape: tuple[int, ...]  # of a block on one rank: [L, 2, Hkv, B, bytes of D numbers]
    ranks: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, on all ranks."""
        return self.ranks * prod(self.shape)

    def require_same(self, other: Layout) -> None:
        """Raise WireError for the first thing in which another engine differs."""
        for name in self.__struct_fields__:
            if (own := getattr(self, name)) != (theirs := getattr(other, name)):
                raise WireError(f"the peer has another {name}: {theirs} there, {own} here. Serve one model, alike")


class Hello(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The first message of both sides: a number that was never used before."""

    nonce: bytes


class Ask(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Compute a prompt. `token_ids`, int32 as bytes, fill whole blocks, of which those from number `first` on are sent."""

    layout: Layout
    token_ids: bytes
    first: int
    salt: str | None


class Piece(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """K/V of n consecutive blocks, [ranks, n, L, 2, Hkv, B, D]."""

    layout: Layout
    first: int  # number of the first block in the prompt
    keys: list[int]  # the chained hash of each block
    token_ids: bytes  # of these blocks, int32
    num_bytes: int
    checksum: bytes  # of the K/V (`checksum_of`)
    memory: SegmentRef  # where they lie, on the peer's host

    def require_sound(self, ask: Ask, first: int, keys: list[int]) -> None:
        """Raise WireError unless this is the next piece, block `first` on, of the prompt that was asked for, whose blocks have these keys."""
        n, size = len(self.keys), 4 * ask.layout.block_size
        ask.layout.require_same(self.layout)
        if not n or self.first != first or self.keys != keys[first : first + n]:
            raise WireError("the peer sent other blocks than it was asked for")
        if self.token_ids != ask.token_ids[first * size : (first + n) * size]:
            raise WireError("the peer sent blocks of other tokens")
        if self.num_bytes != n * self.layout.block_bytes or self.num_bytes > LONGEST_PIECE:
            raise WireError(f"the peer sends {self.num_bytes} bytes for {n} blocks of {self.layout.block_bytes}")


class Reply(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """To a piece: its bytes are wanted, since the memory is not seen here; or it is taken in, and may be overwritten by the next one."""

    wants: Literal["bytes", "next", "nothing"]


class Done(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """No more pieces come."""


class Refusal(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Why the connection ends."""

    message: str


Message = Hello | Ask | Piece | Reply | Done | Refusal
T = TypeVar("T")
M = TypeVar("M", bound=msgspec.Struct)
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Message)


def pack(message: Message, secret: bytes, context: bytes) -> bytes:
    """A message as it is written to a socket. `context`: when and by whom it is said."""
    body = _encoder.encode(message)
    return HEAD.pack(MAGIC, len(body), hmac.digest(secret, context + body, "sha256")) + body


def body_length(head: bytes, limit: int) -> int:
    """How long the message behind a header is. Raises WireError for what is no header, or more than `limit` bytes."""
    magic, length, _ = HEAD.unpack(head)
    if magic != MAGIC:
        raise WireError("this is no peer of ours: another program, or another version of it, answers there")
    if length > limit:
        raise WireError(f"the peer announces {length} bytes where {limit} are the most")
    return int(length)


def unpack(head: bytes, body: bytes, secret: bytes, context: bytes) -> Message:
    """The message of a header and what came behind it. Raises WireError unless it is one, whole, and from who knows the secret."""
    if not hmac.compare_digest(HEAD.unpack(head)[2], hmac.digest(secret, context + body, "sha256")):
        raise WireError(
            "the peer has another secret, or was disturbed: FOLOVLLM_PEER_SECRET must be one text on both sides"
        )
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"the peer's message is none of ours: {error}") from error


class Connection:
    """One end of a socket."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, is_server: bool
    ) -> None:
        self.reader, self.writer, self._secret = reader, writer, secret
        self._sides = (b"server", b"client") if is_server else (b"client", b"server")
        self._nonces = b""
        self._counts = [0, 0]  # messages sent and received

    async def greet(self) -> None:
        """Exchange numbers, so that no message of another connection is of use in this one."""
        own = secrets.token_bytes(NONCE)
        await self.send(Hello(own))
        theirs = (await self.receive(Hello)).nonce
        if len(theirs) != NONCE:
            raise WireError("the peer greets in another way")
        self._nonces = own + theirs if self._sides[0] == b"client" else theirs + own

    async def send(self, message: Message) -> None:
        """Send a message. Raises TimeoutError, an OSError, if the peer takes nothing for too long."""
        self.writer.write(pack(message, self._secret, self._context(0)))
        async with asyncio.timeout(STALLED):
            await self.writer.drain()

    async def receive(self, kind: type[M], *others: type[M], limit: int = SHORT) -> M:
        """The next message, which must be of one of these kinds.

        Raises:
            WireError: it is none, is longer than `limit` bytes, or is a `Refusal`, whose sentence it has.
            EOFError, OSError: the peer has left.
        """
        head = await self.reader.readexactly(HEAD.size)
        body = await self.reader.readexactly(body_length(head, limit))
        message = unpack(head, body, self._secret, self._context(1))
        if isinstance(message, Refusal):
            raise WireError(printable(message.message, 300))  # it is logged
        if not isinstance(message, (kind, *others)):
            raise WireError(f"the peer sent a {type(message).__name__} where a {kind.__name__} was due")
        return cast(M, message)

    def _context(self, direction: int) -> bytes:
        count, self._counts[direction] = self._counts[direction], self._counts[direction] + 1
        return self._sides[direction] + self._nonces + count.to_bytes(8, "little")


async def checksum_of(data: memoryview) -> bytes:
    """The checksum of K/V: of the checksums of its slices, which threads compute at once."""
    slices = [data[at : at + SLICE] for at in range(0, len(data), SLICE)]
    digests = await asyncio.gather(*(asyncio.to_thread(xxhash.xxh3_128_digest, part) for part in slices))
    return xxhash.xxh3_128_digest(b"".join(digests))


async def unless(leaving: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T]) -> T:
    """Do the work, or cancel it and raise EOFError as soon as `leaving` returns: nobody waits for it any more."""
    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(leaving)
    try:
        await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise EOFError("nobody waits for it")
        return doing.result()
    finally:
        doing.cancel()
        gone.cancel()
        await asyncio.wait((doing, gone))
