"""The side that computes prompts: it answers peers over a socket, beside the server's own clients.

Each connection is for one prompt. Whoever closes it, or says nothing for too long, ends its request, which then holds nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Protocol

import msgspec

from folovllm.electives.kv_transfer.blocks import Blocks
from folovllm.electives.kv_transfer.segment import Segment
from folovllm.electives.kv_transfer.wire import (
    LONGEST_PIECE,
    SHORT,
    Ask,
    Connection,
    Done,
    Layout,
    Piece,
    Refusal,
    Reply,
    WireError,
    checksum_of,
    unless,
)
from folovllm.sampling_params import SamplingParams

logger = logging.getLogger("folovllm")
PATIENCE = 10.0  # seconds for the next message of a peer that owes one
MOST_PEERS = 256  # connections at a time; one beyond is refused
NUM_SEGMENTS = 4  # pieces that are on their way at a time
SENT = 1 << 20  # bytes that go to a socket at once
NOBODYS = SamplingParams(temperature=0, max_tokens=1, detokenize=False)  # of the token behind a prompt


class Engine(Protocol):
    """What this package asks of a server's engine: `AsyncEngine` has it."""

    setup: Any  # its `EngineSetup`

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """Call a method of the engine, between two steps."""

    async def prepare(self, prompt: Any, params: SamplingParams | None = None, *, cache_salt: str | None = None) -> Any:
        """Check a request."""

    def submit(self, seqs: Any) -> Any:
        """Queue a request that was checked. Returns its outputs, which must be closed."""


async def call(engine: Engine, function: str, **query: Any) -> Any:
    """Call a function of `blocks` beside the engine."""
    return await engine.call("call_function", f"folovllm.electives.kv_transfer.blocks:{function}", query)


async def look_up(engine: Engine, token_ids: bytes = b"", salt: str | None = None) -> tuple[Layout, int, int]:
    """Call `blocks.look_up`."""
    return msgspec.msgpack.decode(
        await call(engine, "look_up", token_ids=token_ids, salt=salt), type=tuple[Layout, int, int]
    )


class Segments:
    """Shared memory for pieces, a few at a time: so there is a bound to it, however many peers ask."""

    def __init__(self, layout: Layout) -> None:
        """Raises ValueError for blocks that are larger than any piece."""
        self.num_blocks = LONGEST_PIECE // layout.block_bytes
        if not self.num_blocks:
            raise ValueError(f"a block of {layout.block_bytes} bytes does not travel: choose a smaller block_size")
        self._num_bytes, self._free = self.num_blocks * layout.block_bytes, list[Segment]()
        self._room = asyncio.Semaphore(NUM_SEGMENTS)

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[Segment]:
        """A segment for a while. After an error somebody may still read it, so it is never written again."""
        async with self._room:
            segment = self._free.pop() if self._free else Segment(self._num_bytes)
            try:
                yield segment
            except BaseException:
                segment.close()
                raise
            self._free.append(segment)

    def close(self) -> None:
        """Give back what is free."""
        while self._free:
            self._free.pop().close()


class PrefillServer:
    """Answers peers. `start` it in the event loop of the engine."""

    def __init__(self, engine: Engine, secret: bytes) -> None:
        self._engine, self._secret = engine, secret
        self._peers: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises ValueError if the address is not available, or the engine's K/V cannot travel."""
        self._segments = Segments((await look_up(self._engine))[0])
        try:
            self._server = await asyncio.start_server(self._serve, host, port)
        except OSError as error:
            raise ValueError(
                f"cannot listen at {host}:{port} for peers ({error.strerror}): choose another --peer"
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening, and end all connections."""
        self._server.close()
        for task in list(self._peers):
            task.cancel()
        await asyncio.gather(*self._peers, return_exceptions=True)
        self._segments.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection. Whatever goes wrong in it ends it alone."""
        peer, task = Connection(reader, writer, self._secret, is_server=True), asyncio.current_task()
        assert task is not None
        self._peers.add(task)
        try:
            if len(self._peers) > MOST_PEERS:
                raise WireError(f"this server has {MOST_PEERS} peers already")
            await self._answer(peer)
        except (OSError, EOFError, asyncio.CancelledError) as error:  # it has left or says nothing, or we close
            logger.debug("a peer's connection ended: %r", error)
        except Exception as error:  # a stranger, another model, too long a prompt, an engine that drains or ended
            logger.warning("a peer is refused: %s", error)
            with contextlib.suppress(OSError):
                async with asyncio.timeout(1.0):
                    await peer.send(Refusal(str(error)))
        finally:
            self._peers.discard(task)
            writer.close()

    async def _answer(self, peer: Connection) -> None:
        async with asyncio.timeout(PATIENCE):
            await peer.greet()
            ask = await peer.receive(Ask, limit=SHORT + 4 * self._engine.setup.max_model_len)
        layout, _, _ = await look_up(self._engine)
        layout.require_same(ask.layout)
        num_blocks, rest = divmod(len(ask.token_ids), 4 * layout.block_size)
        if rest or not 0 <= ask.first < num_blocks:
            raise WireError(f"the peer asks for {len(ask.token_ids)} bytes of tokens from block {ask.first} on")
        await unless(peer.reader.read(1), self._compute(ask))
        async with self._segments.one() as segment:
            first, wants = ask.first, "next"
            while wants == "next" and first < num_blocks and (piece := await self._copy(ask, first, segment)):
                await peer.send(piece)
                wants = await self._send(peer, piece, segment)
                first += len(piece.keys)
        await peer.send(Done())

    async def _compute(self, ask: Ask) -> None:
        """Have a prompt computed, so that its blocks are cached."""
        tokens = memoryview(ask.token_ids).cast("i").tolist()
        prepared = await self._engine.prepare({"prompt_token_ids": tokens}, NOBODYS, cache_salt=ask.salt)
        stream = self._engine.submit(prepared)
        try:
            async for _ in stream:
                pass
        finally:
            stream.close()

    async def _copy(self, ask: Ask, first: int, segment: Segment) -> Piece | None:
        """Copy the next blocks into the segment, as many as fit and are cached. None: the first of them was evicted."""
        size = 4 * ask.layout.block_size
        end = min(first + self._segments.num_blocks, len(ask.token_ids) // size)
        blocks = Blocks(ask.token_ids, ask.salt, first, end, end, segment.ref, ask.layout)
        keys = await call(self._engine, "export_blocks", blocks=msgspec.msgpack.encode(blocks))
        if not keys:
            return None
        num_bytes = len(keys) * ask.layout.block_bytes
        checksum = await checksum_of(segment.data[:num_bytes])
        token_ids = ask.token_ids[first * size : (first + len(keys)) * size]
        return Piece(ask.layout, first, keys, token_ids, num_bytes, checksum, segment.ref)

    async def _send(self, peer: Connection, piece: Piece, segment: Segment) -> str:
        """Send the bytes of a piece, too, if the peer wants them. Returns what it wants then."""
        wants = await self._wants(peer)
        if wants != "bytes":
            return wants
        for at in range(0, piece.num_bytes, SENT):
            async with asyncio.timeout(PATIENCE):
                peer.writer.write(segment.data[at : min(at + SENT, piece.num_bytes)])
                await peer.writer.drain()
        return await self._wants(peer)

    async def _wants(self, peer: Connection) -> str:
        async with asyncio.timeout(PATIENCE):
            return (await peer.receive(Reply)).wants
