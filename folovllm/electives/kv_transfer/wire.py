"""What two engines say to each other over a socket: each length is known before memory is taken.

A connection begins with a greeting, in which each side proves that it knows the secret: by an HMAC over two numbers that were just made
up, so no proof can be said again. Behind it a message is its length, then itself in msgpack. Nothing is encrypted: prompts and K/V go
as they are. K/V have a checksum (xxh3), and all else is compared with what was asked for.

A `PrefillRequest` is answered by `Blocks`, each of which waits for a `Reply`, and by None when no more come; or by a `Refusal`. K/V lie
in memory that both processes see, where both are on one host, or come behind `Blocks`.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

import msgspec
import xxhash

from folovllm.models.messages import printable

MAGIC = b"FOLOKV5\n"  # the version is in it
SHORT = 1 << 16  # the longest message without tokens, in bytes
NONCE = 16  # bytes
PATIENCE = 10.0  # seconds for what a peer owes
READ = 1 << 20  # bytes that are buffered beside the memory that they go to
MOST_BYTES = 64 << 20  # of K/V at a time, for which no step runs in an engine
# To `Blocks`: their bytes are wanted, since the memory is not seen here; or they have come, and may be overwritten.
Reply = Literal["bytes", "next"]
T = TypeVar("T")


class WireError(ValueError):
    """The peer said what it must not say, or refuses; the sentence says what."""


class SegmentRef(msgspec.Struct, array_like=True, frozen=True):
    """Where memory lies that two processes share (`folovllm.electives.kv_transfer.segment`)."""

    path: str
    nonce: bytes  # its first bytes, so that another file in its place is not taken for it


class Layout(msgspec.Struct, array_like=True, frozen=True):
    """What the bytes of a block depend on, beside its tokens: they mean the same to two engines if all of this is equal."""

    model: bytes  # digest of configuration and weights
    dtype: str  # of a number in the cache
    block_size: int  # B
    ranks: int
    block_bytes: int  # on all ranks

    def require_same(self, other: Layout) -> None:
        """Raise WireError for the first thing in which another engine differs."""
        for name in self.__struct_fields__:
            if (own := getattr(self, name)) != (theirs := getattr(other, name)):
                raise WireError(f"the peer has another {name}: {theirs} there, {own} here. Serve one model, alike")


class PrefillRequest(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Compute a prompt. `token_ids`, int32 as bytes, fill whole blocks, of which those from number `first` on are sent."""

    layout: Layout
    token_ids: bytes
    first: int
    salt: str | None

    def num_blocks(self, layout: Layout) -> int:
        """The blocks of the prompt. Raises WireError if they mean something else to an engine with this layout, or are none."""
        layout.require_same(self.layout)
        num_blocks, rest = divmod(len(self.token_ids), 4 * layout.block_size)
        if rest or not 0 <= self.first < num_blocks:
            raise WireError(f"the peer asks for {len(self.token_ids)} bytes of tokens from block {self.first} on")
        return num_blocks

    def require_next(self, blocks: Blocks, first: int) -> None:
        """Raise WireError unless these blocks have this layout, are the next of the prompt, from number `first` on, and not too many."""
        num_blocks, count = self.num_blocks(blocks.layout), blocks.end - first
        if not 0 < count <= num_blocks - first or count * self.layout.block_bytes > MOST_BYTES:
            raise WireError(f"the peer sends blocks {first} to {blocks.end - 1}, which it was not asked for")

    def query(self, first: int, end: int, memory: SegmentRef) -> dict[str, Any]:
        """What tells an engine to copy blocks `first` to `end - 1` (`folovllm.electives.kv_transfer.blocks`)."""
        token_ids, where = self.token_ids[: 4 * self.layout.block_size * end], msgspec.structs.astuple(memory)
        return {"token_ids": token_ids, "salt": self.salt, "first": first, "memory": where}

    async def checksum(self, end: int, data: memoryview) -> bytes:
        """That of K/V, and of the tokens up to block `end - 1`. A thread computes it, so that the event loop goes on."""
        digest = xxhash.xxh3_128(self.token_ids[: 4 * self.layout.block_size * end])
        await asyncio.to_thread(digest.update, data)
        return digest.digest()


class Blocks(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """K/V of the next blocks of a prompt, [ranks, n, L, 2, Hkv, B, D]."""

    layout: Layout
    end: int  # the number behind the last one
    checksum: bytes  # `PrefillRequest.checksum`
    memory: SegmentRef  # where they lie, on the peer's host


class Refusal(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Why the connection ends."""

    message: str


class Connection:
    """One end of a socket."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, is_server: bool
    ) -> None:
        self.reader, self.writer, self._secret, self._is_server = reader, writer, secret, is_server

    async def handshake(self) -> None:
        """Prove to each other who one is. Raises WireError if the peer is another program, or does not know the secret."""
        own = secrets.token_bytes(NONCE)
        async with asyncio.timeout(PATIENCE):
            await self.write(MAGIC + own)
            theirs = await self.reader.readexactly(len(MAGIC) + NONCE)
            if not theirs.startswith(MAGIC):
                raise WireError("this is no peer of ours: another program, or another version of it, answers there")
            theirs = theirs[len(MAGIC) :]
            await self.write(self._proof(self._is_server, own + theirs))
            expected = self._proof(not self._is_server, theirs + own)
            if not hmac.compare_digest(await self.reader.readexactly(len(expected)), expected):
                raise WireError("the peer has another secret: FOLOVLLM_PEER_SECRET must be one text on both sides")

    def _proof(self, by_server: bool, numbers: bytes) -> bytes:
        """What one side says, which has made up the first number: the other's is in it, so it was not said before."""
        return hmac.digest(self._secret, (b"server" if by_server else b"client") + numbers, "sha256")

    async def send(self, message: PrefillRequest | Blocks | Refusal | Reply | None) -> None:
        """Send a message. Raises TimeoutError, an OSError, if the peer takes nothing for too long."""
        body = msgspec.msgpack.encode(message)
        await self.write(len(body).to_bytes(4, "little") + body)

    async def write(self, data: bytes | memoryview) -> None:
        """Write bytes. Raises TimeoutError, an OSError, if the peer takes nothing for too long."""
        self.writer.write(data)
        async with asyncio.timeout(PATIENCE):
            await self.writer.drain()

    async def receive(self, kind: Any, limit: int = SHORT) -> Any:
        """The next message, which must be of this kind (a class, or several joined by |).

        Raises:
            WireError: it is none, is longer than `limit` bytes, or is a `Refusal`, whose sentence it has.
            EOFError, OSError: the peer has left.
        """
        length = int.from_bytes(await self.reader.readexactly(4), "little")
        if length > limit:
            raise WireError(f"the peer announces {length} bytes where {limit} are the most")
        try:
            message = msgspec.msgpack.decode(await self.reader.readexactly(length), type=kind | Refusal)
        except msgspec.MsgspecError as error:
            raise WireError(f"the peer sent another message than it owes: {error}") from error
        if isinstance(message, Refusal):
            raise WireError(printable(message.message, 300))  # it is logged
        return message

    async def read_into(self, data: memoryview) -> None:
        """Fill memory with bytes that come."""
        for at in range(0, len(data), READ):
            part = data[at : at + READ]
            part[:] = await self.reader.readexactly(len(part))


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
