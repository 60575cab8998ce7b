"""What two engines say to each other over a socket: each message behind a header, each length known before memory is taken.

A message is MAGIC, its length and its checksum (xxh64), then itself in msgpack. A `Piece` describes K/V: the layout, the names
and the tokens of its blocks, their length and checksum. The K/V lie in memory that both processes see, or come behind the message.

Peers prove to each other that they know one secret, and send it never (a challenge and an HMAC both ways). This keeps strangers
out. It does not encrypt: prompts and K/V go as they are, so the network between two hosts must be your own.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import struct
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import xxhash

MAGIC = b"FOLOKV1\n"
VERSION = 1
HEAD = struct.Struct("<8sIQ")  # magic, length and checksum of what follows
SHORT = 1 << 16  # the longest message without tokens, in bytes
NONCE = 16  # bytes
LONGEST_PIECE = 256 << 20  # bytes of K/V


class WireError(ValueError):
    """The peer said what it must not say, or refuses; the sentence says what."""


class SegmentRef(msgspec.Struct, array_like=True, frozen=True):
    """Where memory lies that two processes share (`folovllm.electives.kv_transfer.segment`)."""

    path: str
    nonce: bytes  # its first bytes, so that another file in its place is not taken for it
    size: int  # bytes, all of it


class Layout(msgspec.Struct, array_like=True, frozen=True):
    """What the bytes of a block depend on, beside its tokens: they mean the same to two engines if all of this is equal."""

    model: str  # digest of configuration and weights
    weights: int  # how often the weights have changed since the start (X6)
    dtype: str  # of a number in the cache
    scales: str  # digest of what the numbers of an 8-bit cache are multiples of
    num_layers: int  # L
    num_kv_heads: int  # Hkv, of all ranks together
    block_size: int  # B
    head_bytes: int  # of one token's key in one head

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: [Hkv, L, 2, B, D]."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_bytes

    def require_same(self, other: Layout) -> None:
        """Raise WireError for the first thing in which another engine differs."""
        for name, own, theirs in zip(self.__struct_fields__, astuple(self), astuple(other), strict=True):
            if own != theirs:
                what = name.replace("_", " ")
                raise WireError(f"the peer has another {what}: {theirs} there, {own} here. Serve one model, alike")


class Hello(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A challenge, which opens a connection: its server speaks first."""

    version: int
    nonce: bytes


class Proof(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The client knows the secret; its own challenge, and what its K/V are."""

    nonce: bytes
    mac: bytes
    layout: Layout


class Welcome(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The server knows the secret; its layout, and memory by which a client finds out whether both are on one host."""

    mac: bytes
    layout: Layout
    memory: SegmentRef | None


class Ask(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Compute a prompt. `token_ids`, int32 as bytes, fill whole blocks, of which those from number `first` on are sent."""

    token_ids: bytes
    first: int
    salt: str | None
    shares_memory: bool


class Piece(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """K/V of consecutive blocks, [Hkv, n, L, 2, B, D]. They lie in `memory`, or follow on the socket if that is None."""

    layout: Layout
    first: int  # number of the first block in the prompt
    keys: list[int]  # the chained hash of each block
    token_ids: bytes  # of these blocks, int32
    num_bytes: int
    checksum: bytes  # xxh3_128 of the K/V
    memory: SegmentRef | None

    def require_sound(self, ask: Ask, first: int, keys: list[int]) -> None:
        """Raise WireError unless this is the next piece, block `first` on, of the prompt that was asked for, whose blocks have these keys."""
        n, size = len(self.keys), 4 * self.layout.block_size
        if not n or self.first != first or self.keys != keys[first : first + n]:
            raise WireError("the peer sent other blocks than it was asked for")
        if self.token_ids != ask.token_ids[first * size : (first + n) * size]:
            raise WireError("the peer sent blocks of other tokens")
        if self.num_bytes != n * self.layout.block_bytes or self.num_bytes > LONGEST_PIECE:
            raise WireError(f"the peer sends {self.num_bytes} bytes for {n} blocks of {self.layout.block_bytes}")
        if (self.memory is not None) and not ask.shares_memory:
            raise WireError("the peer names memory that is not shared")


class Taken(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The piece was taken in: its memory may be written again. `goes_on` is False if no more is wanted."""

    goes_on: bool


class Done(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """No more pieces come."""


class Refusal(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Why the connection ends."""

    message: str


Message = Hello | Proof | Welcome | Ask | Piece | Taken | Done | Refusal
T = TypeVar("T")
M = TypeVar("M", bound=msgspec.Struct)
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Message)


def astuple(record: msgspec.Struct) -> tuple[object, ...]:
    """The values of a record."""
    return msgspec.structs.astuple(record)


def encode(message: Message) -> bytes:
    """A message as it is written to a socket."""
    body = _encoder.encode(message)
    return HEAD.pack(MAGIC, len(body), xxhash.xxh64_intdigest(body)) + body


def body_length(head: bytes, limit: int) -> int:
    """How long the message behind a header is. Raises WireError for what is no header, or more than `limit` bytes."""
    if len(head) != HEAD.size:
        raise WireError("the peer ended within a header")
    magic, length, _ = HEAD.unpack(head)
    if magic != MAGIC:
        raise WireError("this is no peer of ours: another program, or another version of it, answers there")
    if length > limit:
        raise WireError(f"the peer announces {length} bytes where {limit} are the most")
    return int(length)


def decode(head: bytes, body: bytes) -> Message:
    """The message of a header and what came behind it. Raises WireError unless it is one, and whole."""
    if body_length(head, len(body)) != len(body) or HEAD.unpack(head)[2] != xxhash.xxh64_intdigest(body):
        raise WireError("the peer's message is damaged: its checksum is another")
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"the peer's message is none of ours: {error}") from error


def checksum_of(data: memoryview) -> bytes:
    """The checksum of K/V."""
    return xxhash.xxh3_128_digest(data)


class Connection(NamedTuple):
    """Both directions of a socket."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, message: Message) -> None:
        """Send a message, and wait until the socket takes more."""
        self.writer.write(encode(message))
        await self.writer.drain()

    async def receive(self, kind: type[M], *others: type[M], limit: int = SHORT) -> M:
        """The next message, which must be of one of these kinds.

        Raises:
            WireError: it is none, is longer than `limit` bytes, or is a `Refusal`, whose sentence it has.
            EOFError, OSError: the peer has left.
        """
        head = await self.reader.readexactly(HEAD.size)
        message = decode(head, await self.reader.readexactly(body_length(head, limit)))
        if isinstance(message, Refusal):
            raise WireError(message.message)
        if not isinstance(message, (kind, *others)):
            raise WireError(f"the peer sent a {type(message).__name__} where a {kind.__name__} was due")
        return cast(M, message)


def mac_of(secret: bytes, who: str, *nonces: bytes) -> bytes:
    """The proof that `who` ("server" or "client") knows the secret: nobody can use it in another connection, or in the other role."""
    return hmac.digest(secret, b"|".join((MAGIC, who.encode(), *(nonce.hex().encode() for nonce in nonces))), "sha256")


def require_proof(mac: bytes, secret: bytes, who: str, *nonces: bytes) -> None:
    """Raise WireError unless this is the proof."""
    if not hmac.compare_digest(mac, mac_of(secret, who, *nonces)):
        raise WireError("the peer has another secret: set FOLOVLLM_PEER_SECRET to the same text on both sides")


async def greet_as_server(to: Connection, secret: bytes, layout: Layout, memory: SegmentRef | None) -> None:
    """Open a connection that came. Raises WireError for a stranger, or for an engine with another layout."""
    nonce = secrets.token_bytes(NONCE)
    await to.send(Hello(VERSION, nonce))
    proof = await to.receive(Proof)
    require_proof(proof.mac, secret, "client", nonce, proof.nonce)
    layout.require_same(proof.layout)
    await to.send(Welcome(mac_of(secret, "server", proof.nonce, nonce), layout, memory))


async def greet_as_client(to: Connection, secret: bytes, layout: Layout) -> SegmentRef | None:
    """Open a connection that was made; returns the server's memory. Raises WireError as `greet_as_server`."""
    hello, nonce = await to.receive(Hello), secrets.token_bytes(NONCE)
    if hello.version != VERSION:
        raise WireError(f"the peer speaks version {hello.version}, this engine {VERSION}: install the same on both")
    await to.send(Proof(nonce, mac_of(secret, "client", hello.nonce, nonce), layout))
    welcome = await to.receive(Welcome)
    require_proof(welcome.mac, secret, "server", nonce, hello.nonce)
    layout.require_same(welcome.layout)
    return welcome.memory


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
