"""The side that answers: it has a peer compute each prompt, and caches the K/V before the request is queued.

The request comes to this side, and this side asks the peer. So a prompt is tokenized once, the answer is sampled in one place, and the only
thing that can go wrong is that K/V do not come: then the prompt is computed here. A router in front needs to know nothing of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import closing

import numpy as np

from folovllm.electives.kv_transfer import wire
from folovllm.electives.kv_transfer.prefill import Engine, call, make_pool
from folovllm.electives.kv_transfer.segment import open_segment
from folovllm.request import Request

logger = logging.getLogger("folovllm")
CONNECT = 5.0  # seconds
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds until a lost peer is asked again


class PrefillClient:
    """Brings K/V of prompts from one peer.

    Args:
        host, port: where the peer listens. secret: which both know.
        seconds: from the arrival of a request until its prompt is computed here, if not all has come.
    """

    def __init__(self, engine: Engine, host: str, port: int, secret: bytes, seconds: float) -> None:
        self._engine, self._host, self._port, self._secret, self._seconds = engine, host, port, secret, seconds
        self._num_failures, self._retry_at = 0, 0.0  # in a row; the peer is not asked before this time

    async def start(self) -> None:
        """Raises ValueError if the engine's K/V cannot travel. The peer need not be there yet."""
        self._pool = await make_pool(self._engine)

    async def close(self) -> None:
        """Give back the shared memory."""
        self._pool.close()

    async def bring(self, request: Request) -> None:
        """Bring the K/V of a prompt into the cache, as far as they come in time. Raises nothing: what is missing will be computed.

        Cancelling it, because the client left, ends the request at the peer, too.
        """
        size, now = self._engine.setup.block_size, time.monotonic()
        num_blocks = (len(request.prompt_token_ids) - 1) // size  # one token is left to compute here
        needs_scores = request.params.prompt_logprobs is not None  # then all of it is computed where it is sampled
        if not num_blocks or needs_scores or now < self._retry_at:
            return
        if self._num_failures:  # one request tries, the others do not wait for it
            self._retry_at = now + self._seconds
        token_ids = np.array(request.prompt_token_ids[: num_blocks * size], np.int32).tobytes()
        try:
            async with asyncio.timeout(self._seconds):
                await self._transfer(token_ids, request.cache_salt, num_blocks)
            self._num_failures, self._retry_at = 0, 0.0
        except Exception as error:  # the peer died, is slow, refuses or lies; if our engine ended, the request is told
            pause = min(FIRST_PAUSE * 2**self._num_failures, LONGEST_PAUSE)
            self._num_failures, self._retry_at = self._num_failures + 1, time.monotonic() + pause
            peer, why = f"{self._host}:{self._port}", str(error) or type(error).__name__
            logger.warning("prompts are computed here for %g s: the peer at %s failed (%s)", pause, peer, why)

    async def _transfer(self, token_ids: bytes, salt: str | None, num_blocks: int) -> None:
        """Bring what is not cached yet, some blocks at a time. Raises OSError, EOFError, ValueError (`WireError` is one) or what the engine raises."""
        num_cached = await call(self._engine, "get_computed_blocks", token_ids=token_ids, salt=salt)
        if num_cached == num_blocks:
            return
        request = wire.PrefillRequest(self._pool.layout, token_ids, num_cached, salt)
        streams = await asyncio.wait_for(asyncio.open_connection(self._host, self._port), CONNECT)
        peer = wire.Connection(*streams, self._secret, is_server=False)
        with closing(peer.writer):
            await peer.handshake()
            await peer.send(request)
            limit = wire.SHORT + len(token_ids)
            while isinstance(blocks := await peer.receive(wire.Blocks | wire.Done, limit), wire.Blocks):
                end = request.end_of(blocks, num_cached)
                num_cached = await self._receive(peer, blocks, request, num_cached, end)
                if num_cached < end:
                    return  # the cache has no room

    async def _receive(
        self, peer: wire.Connection, blocks: wire.Blocks, request: wire.PrefillRequest, first: int, end: int
    ) -> int:
        """Bring blocks `first` to `end - 1` into the cache. Returns how many blocks of the prompt are cached then."""

        async def store(data: memoryview, memory: wire.SegmentRef) -> int:
            if num_bytes > len(data) or await wire.checksum_of(data[:num_bytes]) != blocks.checksum:
                raise wire.WireError("the peer's K/V are damaged: their checksum is another")
            return int(await call(self._engine, "import_blocks", **request.query(first, end, memory)))

        num_bytes = (end - first) * request.layout.block_bytes
        if (shared := open_segment(blocks.memory)) is not None:
            num_cached = await store(shared, blocks.memory)
            await peer.send(wire.Reply("next"))
            return num_cached
        await peer.send(wire.Reply("bytes"))
        async with self._pool.segment() as segment:
            await peer.read_into(segment.data[:num_bytes])
            await peer.send(wire.Reply("next"))
            return await store(segment.data, segment.ref)
