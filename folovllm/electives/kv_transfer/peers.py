"""Prefill apart from decode: what a server with `--role` does beside its engine. `folovllm.plugins` names `role`.

The request comes to the side that answers, and this side asks the one that computes prompts. So a prompt is tokenized once, the answer is
sampled in one place, and the only thing that can go wrong is that K/V do not come: then the prompt is computed where the request is. A
router in front needs to know nothing of it. Each connection is for one prompt (`folovllm.electives.kv_transfer.wire`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import numpy as np

from folovllm.electives.kv_transfer import wire
from folovllm.electives.kv_transfer.segment import SegmentPool, open_segment
from folovllm.request import Request
from folovllm.sampling_params import SamplingParams

logger = logging.getLogger("folovllm")
SECRET = "FOLOVLLM_PEER_SECRET"
LOCAL = "localhost", "127.0.0.1", "::1"  # only this machine can reach them
QUIET = 60.0  # seconds after one refusal in the log for which no other one is written there: strangers may come by the thousand
CONNECT = 5.0  # seconds
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds until a lost peer is asked again
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, detokenize=False)  # behind a prompt; nobody reads it
Engine = Any  # a server's, with `setup`, `call` and `generate`


@asynccontextmanager
async def role(
    engine: Engine, name: str, peer: str, seconds: float
) -> AsyncIterator[Callable[[Request], Awaitable[None]] | None]:
    """Run a role beside an engine: "prefill" computes prompts for others, who connect at `peer`; "decode" has them computed there.

    Yields:
        What a request waits for before it is queued; None: nothing.

    Raises:
        ValueError: the address is none, or another than this machine's own without a secret; or the engine's K/V cannot travel.
    """
    (host, port), secret = address_of(peer), os.environ.get(SECRET, "").encode()
    if name == "prefill" and not secret and host not in LOCAL:
        raise ValueError(f"whoever reaches {peer} could read prompts: set {SECRET} to a secret, or give 127.0.0.1:PORT")
    with closing(await make_pool(engine)) as pool:
        if name == "decode":
            yield PrefillClient(engine, pool, host, port, secret, seconds).bring
            return
        async with PrefillServer(engine, pool, secret).listening(host, port) as port:
            print(f"computing prompts for peers at {host}:{port}", flush=True)
            yield None


def address_of(peer: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT"; a host with colons stands in brackets. Raises ValueError for another form."""
    found = re.fullmatch(r"\[?([\w.:%-]+?)\]?:([0-9]{1,5})", peer)
    if not found or int(found[2]) > 65535:
        raise ValueError(f"peer must be HOST:PORT, not {peer!r}")
    return found[1], int(found[2])


async def make_pool(engine: Engine) -> SegmentPool:
    """Memory for blocks of an engine. Raises ValueError if its K/V cannot travel."""
    return SegmentPool(wire.Layout(*await call(engine, "get_layout")))


async def call(engine: Engine, function: str, **query: Any) -> Any:
    """Call a function of `folovllm.electives.kv_transfer.blocks` in the engine, between two steps."""
    return await engine.call("call_function", f"folovllm.electives.kv_transfer.blocks:{function}", query)


class PrefillServer:
    """The prefill side: it computes prompts for peers over a socket, beside the server's own clients.

    Whoever closes a connection, or says nothing for too long, ends its request, which then holds nothing.
    """

    def __init__(self, engine: Engine, pool: SegmentPool, secret: bytes) -> None:
        self._engine, self._pool, self._secret = engine, pool, secret
        self._connections: set[asyncio.Task[None]] = set()
        self._num_unlogged, self._logged_at = 0, -QUIET

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[int]:
        """Listen for a while; yields the port. At the end all connections end. Raises ValueError if the address is not available."""
        try:
            server = await asyncio.start_server(self._serve, host, port)
        except OSError as error:
            why = f"cannot listen at {host}:{port} for peers ({error.strerror})"
            raise ValueError(f"{why}: choose another --peer") from error
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection. Whatever goes wrong in it ends it alone."""
        peer, task = wire.Connection(reader, writer, self._secret, is_server=True), asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._answer(peer)
        except (OSError, EOFError, asyncio.CancelledError) as error:  # it has left or says nothing, or we close
            logger.debug("a peer's connection ended: %r", error)
        except Exception as error:  # a stranger, another model, too long a prompt, an engine that drains or ended
            self._log(error)
            with suppress(OSError):
                await peer.send(wire.Refusal(str(error)))
        finally:
            self._connections.discard(task)
            writer.close()

    def _log(self, error: Exception) -> None:
        """Log a refusal, at most one in `QUIET` seconds, with the number of those before it that were left out."""
        self._num_unlogged += 1
        if time.monotonic() >= self._logged_at + QUIET:
            logger.warning("a peer is refused: %s (%d others since the last such line)", error, self._num_unlogged - 1)
            self._num_unlogged, self._logged_at = 0, time.monotonic()

    async def _answer(self, peer: wire.Connection) -> None:
        """Have the prompt computed that the peer asks for, and send its blocks, some at a time."""
        await peer.handshake()
        async with asyncio.timeout(wire.PATIENCE):
            request = await peer.receive(wire.PrefillRequest, wire.SHORT + 4 * self._engine.setup.max_model_len)
        layout, first = self._pool.layout, request.first
        num_blocks = request.num_blocks(layout)
        await wire.unless(peer.reader.read(1), self._compute(request))
        async with self._pool.segment() as segment:
            while first < num_blocks:
                end = min(num_blocks, first + self._pool.num_blocks)
                count = await call(self._engine, "export_blocks", **request.query(first, end, segment.ref))
                if not count:
                    break  # it was evicted
                data, first = segment.data[: count * layout.block_bytes], first + count
                await peer.send(wire.Blocks(layout, first, await request.checksum(first, data), segment.ref))
                async with asyncio.timeout(wire.PATIENCE):
                    if await peer.receive(wire.Reply) == "bytes":
                        await peer.write(data)
                        await peer.receive(wire.Reply)  # the last bytes have left the memory, too
        await peer.send(None)

    async def _compute(self, request: wire.PrefillRequest) -> None:
        """Have a prompt computed, so that its blocks are cached."""
        prompt = {"prompt_token_ids": memoryview(request.token_ids).cast("i").tolist()}
        async for _ in self._engine.generate(prompt, ONE_TOKEN, cache_salt=request.salt):
            pass


class PrefillClient:
    """The decode side: it has a peer compute each prompt, and caches the K/V before the request is queued.

    Args:
        pool: memory for blocks. host, port: where the peer listens; it need not be there yet. secret: which both know.
        seconds: from the arrival of a request until its prompt is computed here, if not all has come.
    """

    def __init__(self, engine: Engine, pool: SegmentPool, host: str, port: int, secret: bytes, seconds: float) -> None:
        self._engine, self._pool, self._address, self._secret = engine, pool, (host, port), secret
        self._seconds = seconds
        self._num_failures, self._retry_at = 0, 0.0  # in a row; the peer is not asked before this time

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
            why = str(error) or type(error).__name__
            logger.warning(
                "prompts are computed here for %g s: the peer at %s:%d failed (%s)", pause, *self._address, why
            )

    async def _transfer(self, token_ids: bytes, salt: str | None, num_blocks: int) -> None:
        """Bring what is not cached yet, some blocks at a time. Raises OSError, EOFError, ValueError (`WireError` is one) or what the engine raises."""
        first = await call(self._engine, "get_computed_blocks", token_ids=token_ids, salt=salt)
        if first == num_blocks:
            return
        request = wire.PrefillRequest(self._pool.layout, token_ids, first, salt)
        streams = await asyncio.wait_for(asyncio.open_connection(*self._address), CONNECT)
        peer = wire.Connection(*streams, self._secret, is_server=False)
        with closing(peer.writer):
            await peer.handshake()
            await peer.send(request)
            while (blocks := await peer.receive(wire.Blocks | None)) is not None:
                request.require_next(blocks, first)
                if (first := await self._receive(peer, request, first, blocks)) < blocks.end:
                    return  # the cache has no room

    async def _receive(
        self, peer: wire.Connection, request: wire.PrefillRequest, first: int, blocks: wire.Blocks
    ) -> int:
        """Bring blocks from number `first` on into the cache. Returns how many blocks of the prompt are cached then."""

        async def store(data: memoryview, memory: wire.SegmentRef) -> int:
            if num_bytes > len(data) or await request.checksum(blocks.end, data[:num_bytes]) != blocks.checksum:
                raise wire.WireError("the peer's K/V are damaged: their checksum is another")
            return int(await call(self._engine, "import_blocks", **request.query(first, blocks.end, memory)))

        num_bytes = (blocks.end - first) * request.layout.block_bytes
        if (shared := open_segment(blocks.memory)) is not None:
            num_cached = await store(shared, blocks.memory)
            await peer.send("next")
            return num_cached
        await peer.send("bytes")
        async with self._pool.segment() as segment:
            await peer.read_into(segment.data[:num_bytes])
            await peer.send("next")
            return await store(segment.data, segment.ref)
