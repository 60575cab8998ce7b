"""The side that answers: it has a peer compute each prompt, and takes the K/V into its own cache before the request is queued.

The request comes to this side, and this side asks the peer. So a prompt is tokenized once, the answer is sampled in one place, and the only
thing that can go wrong is that K/V do not come: then the prompt is computed here. A router in front needs to know nothing of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import msgspec
import numpy as np

from folovllm.electives.kv_transfer.blocks import Blocks, block_keys
from folovllm.electives.kv_transfer.prefill import NUM_SEGMENTS, SENT, Engine, Segments, call, layout_of, segment_bytes
from folovllm.electives.kv_transfer.segment import START, open_segment
from folovllm.electives.kv_transfer.wire import (
    SHORT,
    Ask,
    Connection,
    Done,
    Layout,
    Piece,
    SegmentRef,
    Taken,
    WireError,
    checksum_of,
    greet_as_client,
)
from folovllm.request import Request

logger = logging.getLogger("folovllm")
GREETING = 5.0  # seconds to connect, and to prove who one is
MOST_WAITING = 64  # prompts that wait for a peer at a time; one beyond is computed here
IMPORTED = 64 << 20  # bytes that the engine takes in between two steps
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds until a lost peer is asked again


class PrefillClient:
    """Brings K/V of prompts from one peer.

    Args:
        host, port: where the peer listens. secret: which both know.
        seconds: from the arrival of a request until its prompt is computed here, if not all has come.
    """

    def __init__(self, engine: Engine, host: str, port: int, secret: bytes, seconds: float) -> None:
        self._engine, self._host, self._port, self._secret, self._seconds = engine, host, port, secret, seconds
        self._peer = f"{host}:{port}"
        self._num_waiting = 0
        self._mapped: dict[SegmentRef, memoryview] = {}  # the peer's segments that this process sees
        self._num_failures, self._retry_at = 0, 0.0  # in a row; no request is brought before this time

    async def start(self) -> None:
        """Raises ValueError if the engine's K/V cannot travel. The peer need not be there yet."""
        self._segments = Segments(segment_bytes(await layout_of(self._engine)))

    def close(self) -> None:
        """Give back the shared memory."""
        self._mapped.clear()
        self._segments.close()

    async def bring(self, request: Request) -> None:
        """Bring the K/V of a prompt into the cache, as far as they come in time. Raises nothing: what is missing will be computed.

        Cancelling it, because the client left, ends the request at the peer, too.
        """
        size, now = self._engine.setup.block_size, time.monotonic()
        num_blocks = (len(request.prompt_token_ids) - 1) // size  # one token is left to compute here
        scored = request.params.prompt_logprobs is not None  # all of it must be computed where it is sampled
        if not num_blocks or scored or now < self._retry_at or self._num_waiting >= MOST_WAITING:
            return
        if self._num_failures:  # one request tries, the others do not wait for it
            self._retry_at = now + self._seconds
        token_ids = np.array(request.prompt_token_ids[: num_blocks * size], np.int32).tobytes()
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._seconds):
                await self._transfer(token_ids, request.cache_salt)
            self._num_failures, self._retry_at = 0, 0.0
        except Exception as error:  # it died, is slow, refuses or lies; or the engine takes nothing, which the request will hear itself
            pause = min(FIRST_PAUSE * 2**self._num_failures, LONGEST_PAUSE)
            self._num_failures, self._retry_at = self._num_failures + 1, time.monotonic() + pause
            why = str(error) or type(error).__name__
            logger.warning("prompts are computed here for %g s: the peer at %s failed (%s)", pause, self._peer, why)
        finally:
            self._num_waiting -= 1

    async def _transfer(self, token_ids: bytes, salt: str | None) -> None:
        """Bring what is not cached yet, piece by piece. Raises OSError, EOFError, ValueError (`WireError` is one) or what the engine raises."""
        known = await call(self._engine, "look_up", token_ids=token_ids, salt=salt)
        layout, have, root = msgspec.msgpack.decode(known, type=tuple[Layout, int, int])
        keys = block_keys(token_ids, layout.block_size, root)
        if have == len(keys):
            return
        async with self._connected(layout) as (peer, shares_memory):
            ask = Ask(token_ids, have, salt, shares_memory)
            await peer.send(ask)
            while isinstance(piece := await peer.receive(Piece, Done, limit=SHORT + 16 * len(token_ids)), Piece):
                piece.require_sound(ask, have, keys)
                layout.require_same(piece.layout)
                have = await self._take(peer, piece, ask)
                goes_on = have == piece.first + len(piece.keys)  # else the cache has no room
                await peer.send(Taken(goes_on and have < len(keys)))
                if not goes_on:
                    return

    @contextlib.asynccontextmanager
    async def _connected(self, layout: Layout) -> AsyncIterator[tuple[Connection, bool]]:
        """A connection to the peer, and whether both see the same memory."""
        async with asyncio.timeout(GREETING):
            peer = Connection(*await asyncio.open_connection(self._host, self._port))
        try:
            async with asyncio.timeout(GREETING):
                memory = await greet_as_client(peer, self._secret, layout)
            yield peer, memory is not None and is_here(memory)
        finally:
            peer.writer.close()

    async def _take(self, peer: Connection, piece: Piece, ask: Ask) -> int:
        """Check the bytes of a piece, and hand it to the engine. Returns how many blocks of the prompt are cached then."""
        if piece.memory is not None:
            if piece.memory not in self._mapped:
                if len(self._mapped) == NUM_SEGMENTS:
                    self._mapped.clear()  # of a peer that has ended, most likely
                self._mapped[piece.memory] = memoryview(open_segment(piece.memory))[START:]
            await self._check(self._mapped[piece.memory], piece)
            return await self._import(piece.memory, piece, ask)
        async with self._segments.one() as segment:
            for at in range(0, piece.num_bytes, SENT):
                n = min(SENT, piece.num_bytes - at)
                segment.data[at : at + n] = await peer.reader.readexactly(n)
            await self._check(segment.data, piece)
            return await self._import(segment.ref, piece, ask)

    async def _check(self, data: memoryview, piece: Piece) -> None:
        """Raise WireError if the bytes are not those that the peer announced."""
        if (
            piece.num_bytes > len(data)
            or await asyncio.to_thread(checksum_of, data[: piece.num_bytes]) != piece.checksum
        ):
            raise WireError("the peer's K/V are damaged: their checksum is another")

    async def _import(self, memory: SegmentRef, piece: Piece, ask: Ask) -> int:
        """Hand a piece to the engine in parts, since no step runs meanwhile."""
        have, end = piece.first, piece.first + len(piece.keys)
        part = max(1, IMPORTED // piece.layout.block_bytes)
        while have < end:
            until = min(have + part, end)
            blocks = Blocks(ask.token_ids, ask.salt, piece.first, end, memory, until, piece.layout)
            have = await call(self._engine, "import_blocks", blocks=blocks.encoded())
            if have < until:
                break
        return min(have, end)


def is_here(memory: SegmentRef) -> bool:
    """Whether a segment of the peer's is to be seen from here: both are on one host."""
    try:
        open_segment(memory).close()
    except WireError:
        return False
    return True
