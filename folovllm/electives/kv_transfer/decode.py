"""The side that answers: it has a peer compute each prompt, and takes the K/V into its own cache before the request is queued.

The request comes to this side, and this side asks the peer. So a prompt is tokenized once, the answer is sampled in one place, and the only
thing that can go wrong is that K/V do not come: then the prompt is computed here. A router in front needs to know nothing of it.
"""

from __future__ import annotations

import asyncio
import logging
import time

import numpy as np

from folovllm.electives.kv_transfer import wire
from folovllm.electives.kv_transfer.prefill import Engine, copy, look_up
from folovllm.electives.kv_transfer.segment import Segments, open_segment
from folovllm.request import Request

logger = logging.getLogger("folovllm")
GREETING = 5.0  # seconds to connect, and to prove who one is
MOST_WAITING = 64  # prompts that wait for a peer at a time; one beyond is computed here
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds until a lost peer is asked again


class PrefillClient:
    """Brings K/V of prompts from one peer.

    Args:
        host, port: where the peer listens. secret: which both know.
        seconds: from the arrival of a request until its prompt is computed here, if not all has come.
    """

    def __init__(self, engine: Engine, host: str, port: int, secret: bytes, seconds: float) -> None:
        self._engine, self._host, self._port, self._secret, self._seconds = engine, host, port, secret, seconds
        self._num_waiting = 0
        self._num_failures, self._retry_at = 0, 0.0  # in a row; no request is brought before this time

    async def start(self) -> None:
        """Raises ValueError if the engine's K/V cannot travel. The peer need not be there yet."""
        self._segments = Segments((await look_up(self._engine))[0])

    def close(self) -> None:
        """Give back the shared memory."""
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
                await self._transfer(token_ids, request.cache_salt, num_blocks)
            self._num_failures, self._retry_at = 0, 0.0
        except Exception as error:  # it died, is slow, refuses or lies; or the engine takes nothing, which the request will hear itself
            pause = min(FIRST_PAUSE * 2**self._num_failures, LONGEST_PAUSE)
            self._num_failures, self._retry_at = self._num_failures + 1, time.monotonic() + pause
            peer, why = f"{self._host}:{self._port}", str(error) or type(error).__name__
            logger.warning("prompts are computed here for %g s: the peer at %s failed (%s)", pause, peer, why)
        finally:
            self._num_waiting -= 1

    async def _transfer(self, token_ids: bytes, salt: str | None, num_blocks: int) -> None:
        """Bring what is not cached yet, some blocks at a time. Raises OSError, EOFError, ValueError (`WireError` is one) or what the engine raises."""
        layout, have = await look_up(self._engine, token_ids, salt)
        if have == num_blocks:
            return
        ask = wire.Ask(layout, token_ids, have, salt)
        async with asyncio.timeout(GREETING):
            reader, writer = await asyncio.open_connection(self._host, self._port)
            peer = wire.Connection(reader, writer, self._secret, is_server=False)
        try:
            async with asyncio.timeout(GREETING):
                await peer.greet()
                await peer.send(ask)
            while isinstance(
                blocks := await peer.receive(wire.Blocks, wire.Done, limit=wire.SHORT + len(token_ids)), wire.Blocks
            ):
                blocks.require_sound(ask, have)
                have = await self._take(peer, blocks, ask)
                if have < blocks.end:
                    return  # the cache has no room
        finally:
            writer.close()

    async def _take(self, peer: wire.Connection, blocks: wire.Blocks, ask: wire.Ask) -> int:
        """Check the bytes of some blocks, and hand them to the engine. Returns how many blocks of the prompt are cached then."""
        if (shared := self._shared(blocks.memory)) is not None:
            have = await self._import(shared, blocks.memory, blocks, ask)
            await peer.send(wire.Reply("next"))
            return have
        await peer.send(wire.Reply("bytes"))
        async with self._segments.one() as segment:
            await peer.read_into(segment.data[: blocks.num_bytes])
            return await self._import(segment.data, segment.ref, blocks, ask)

    def _shared(self, memory: wire.SegmentRef) -> memoryview | None:
        """What a segment of the peer's holds; None if it is not seen here, as on another host."""
        try:
            return open_segment(memory)
        except ValueError:
            return None

    async def _import(self, data: memoryview, memory: wire.SegmentRef, blocks: wire.Blocks, ask: wire.Ask) -> int:
        """Raises WireError if the bytes are not those that the peer announced."""
        if blocks.num_bytes > len(data) or await wire.checksum_of(data[: blocks.num_bytes]) != blocks.checksum:
            raise wire.WireError("the peer's K/V are damaged: their checksum is another")
        return await copy(self._engine, "import_blocks", ask, blocks.first, blocks.end, memory)
