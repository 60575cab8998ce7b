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
from folovllm.electives.kv_transfer.segment import IS_SHARED, Segment
from folovllm.electives.kv_transfer.wire import (
    LONGEST_PIECE,
    SHORT,
    Ask,
    Connection,
    Done,
    Layout,
    Piece,
    Refusal,
    Taken,
    WireError,
    checksum_of,
    greet_as_server,
    unless,
)
from folovllm.sampling_params import SamplingParams

logger = logging.getLogger("folovllm")
HERE = "folovllm.electives.kv_transfer.blocks"
PATIENCE = 10.0  # seconds for the next message of a peer that owes one
MOST_PEERS = 256  # connections at a time; one beyond is refused
NUM_SEGMENTS = 4  # pieces that are on their way at a time
SENT = 1 << 20  # bytes that are written to a socket at once


class Engine(Protocol):
    """What this package asks of a server's engine: `AsyncEngine` has it."""

    setup: Any  # its `EngineSetup`

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """Call a method of the engine, between two steps."""

    async def prepare(self, prompt: Any, params: SamplingParams | None = None, *, cache_salt: str | None = None) -> Any:
        """Check a request."""

    def submit(self, seqs: Any) -> Any:
        """Queue a request that was checked. Returns its outputs, which must be closed."""


class Segments:
    """Shared memory for pieces, a few at a time: so there is a bound to it, however many peers ask."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes, self._free = num_bytes, list[Segment]()
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


def segment_bytes(layout: Layout) -> int:
    """The bytes of a piece, whole blocks. Raises ValueError for a block that is larger than any piece."""
    if layout.block_bytes > LONGEST_PIECE:
        raise ValueError(f"a block of {layout.block_bytes} bytes does not travel: choose a smaller block_size")
    return LONGEST_PIECE // layout.block_bytes * layout.block_bytes


async def call(engine: Engine, function: str, **query: Any) -> Any:
    """Call a function of `blocks` beside the engine."""
    return await engine.call("call_function", f"{HERE}:{function}", query)


async def layout_of(engine: Engine) -> Layout:
    """The engine's layout. Raises ValueError if its K/V cannot travel."""
    return msgspec.msgpack.decode(await call(engine, "layout_of"), type=Layout)


class PrefillServer:
    """Answers peers. `start` it in the event loop of the engine."""

    def __init__(self, engine: Engine, secret: bytes) -> None:
        self._engine, self._secret = engine, secret
        self._peers: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises ValueError if the address is not available, or the engine's K/V cannot travel."""
        self._segments = Segments(segment_bytes(await layout_of(self._engine)))
        self._probe = Segment(0) if IS_SHARED else None
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
        if self._probe is not None:
            self._probe.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection. Whatever goes wrong in it ends it alone."""
        peer, task = Connection(reader, writer), asyncio.current_task()
        assert task is not None
        self._peers.add(task)
        try:
            if len(self._peers) > MOST_PEERS:
                raise WireError(f"this server has {MOST_PEERS} peers already")
            await self._answer(peer)
        except (
            OSError,
            EOFError,
            asyncio.CancelledError,
        ) as error:  # it has left, or says nothing (TimeoutError); or we close
            logger.debug("a peer's connection ended: %r", error)
        except (
            Exception
        ) as error:  # a stranger, another model, a prompt that is too long, an engine that drains or ended
            logger.warning("a peer is refused: %s", error)
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await peer.send(Refusal(str(error)))
        finally:
            self._peers.discard(task)
            writer.close()

    async def _answer(self, peer: Connection) -> None:
        engine = self._engine
        layout = await layout_of(engine)
        async with asyncio.timeout(PATIENCE):
            await greet_as_server(peer, self._secret, layout, None if self._probe is None else self._probe.ref)
            ask = await peer.receive(Ask, limit=SHORT + 4 * engine.setup.max_model_len)
        size = 4 * layout.block_size
        if not ask.token_ids or len(ask.token_ids) % size or not 0 <= ask.first < len(ask.token_ids) // size:
            raise WireError(
                f"the peer asks for {len(ask.token_ids)} bytes of tokens from block {ask.first} on: no whole blocks"
            )
        await unless(peer.reader.read(1), self._compute(ask))
        async with self._segments.one() as segment:
            first, goes_on = ask.first, True
            while goes_on and first < len(ask.token_ids) // size:
                piece = await self._piece(ask, first, segment, layout)
                if piece is None:
                    break
                await self._send(peer, piece, segment)
                async with asyncio.timeout(PATIENCE):
                    goes_on = (await peer.receive(Taken)).goes_on
                first += len(piece.keys)
        await peer.send(Done())

    async def _compute(self, ask: Ask) -> None:
        """Have a prompt computed, so that its blocks are cached. The token that comes of it is nobody's."""
        tokens = memoryview(ask.token_ids).cast("i").tolist()
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        prepared = await self._engine.prepare({"prompt_token_ids": tokens}, params, cache_salt=ask.salt)
        stream = self._engine.submit(prepared)
        try:
            async for _ in stream:
                pass
        finally:
            stream.close()

    async def _piece(self, ask: Ask, first: int, segment: Segment, layout: Layout) -> Piece | None:
        """Copy the next blocks into the segment, as many as fit and are cached. None: the first of them was evicted."""
        size, room = 4 * layout.block_size, len(segment.data) // layout.block_bytes
        end = min(first + room, len(ask.token_ids) // size)
        blocks = Blocks(ask.token_ids, ask.salt, first, end, segment.ref)
        if (copied := await call(self._engine, "export_blocks", blocks=blocks.encoded())) is None:
            return None
        own, keys = msgspec.msgpack.decode(copied, type=tuple[Layout, list[int]])
        n = len(keys)
        data = segment.data[: n * own.block_bytes]
        checksum = await asyncio.to_thread(checksum_of, data)
        token_ids = ask.token_ids[first * size : (first + n) * size]
        return Piece(own, first, keys, token_ids, len(data), checksum, segment.ref if ask.shares_memory else None)

    async def _send(self, peer: Connection, piece: Piece, segment: Segment) -> None:
        async with asyncio.timeout(PATIENCE):
            await peer.send(piece)
        for at in range(0, piece.num_bytes if piece.memory is None else 0, SENT):
            async with asyncio.timeout(PATIENCE):
                peer.writer.write(segment.data[at : min(at + SENT, piece.num_bytes)])
                await peer.writer.drain()
