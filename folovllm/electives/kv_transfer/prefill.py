"""The side that computes prompts: it answers peers over a socket, beside the server's own clients.

Each connection is for one prompt. Whoever closes it, or says nothing for too long, ends its request, which then holds nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

import msgspec

from folovllm.electives.kv_transfer import wire
from folovllm.electives.kv_transfer.segment import SegmentPool
from folovllm.sampling_params import SamplingParams

logger = logging.getLogger("folovllm")
QUIET = 60.0  # seconds after one refusal in the log for which no other one is written there: strangers may come by the thousand
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, detokenize=False)  # behind a prompt; nobody reads it
Engine = Any  # a server's, with `setup`, `call` and `generate`


async def call(engine: Engine, function: str, **query: Any) -> Any:
    """Call a function of `folovllm.electives.kv_transfer.blocks` in the engine, between two steps."""
    return await engine.call("call_function", f"folovllm.electives.kv_transfer.blocks:{function}", query)


async def make_pool(engine: Engine) -> SegmentPool:
    """Memory for blocks of an engine. Raises ValueError if its K/V cannot travel."""
    return SegmentPool(msgspec.msgpack.decode(await call(engine, "get_layout"), type=wire.Layout))


class PrefillServer:
    """Answers peers. `start` it in the event loop of the engine."""

    def __init__(self, engine: Engine, secret: bytes) -> None:
        self._engine, self._secret = engine, secret
        self._connections: set[asyncio.Task[None]] = set()
        self._num_unlogged, self._logged_at = 0, -QUIET

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises ValueError if the address is not available, or the engine's K/V cannot travel."""
        self._pool = await make_pool(self._engine)
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
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._pool.close()

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
        await peer.handshake()
        async with asyncio.timeout(wire.PATIENCE):
            request = await peer.receive(wire.PrefillRequest, wire.SHORT + 4 * self._engine.setup.max_model_len)
        num_blocks, first = request.num_blocks(self._pool.layout), request.first
        await wire.unless(peer.reader.read(1), self._compute(request))
        async with self._pool.segment() as segment:
            while first < num_blocks:
                end = min(num_blocks, first + self._pool.num_blocks)
                count = await call(self._engine, "export_blocks", **request.query(first, end, segment.ref))
                if not count:
                    break  # it was evicted
                data, end = segment.data[: count * request.layout.block_bytes], first + count
                token_ids, checksum = request.tokens(first, end), await wire.checksum_of(data)
                await peer.send(wire.Blocks(self._pool.layout, token_ids, checksum, segment.ref))
                async with asyncio.timeout(wire.PATIENCE):
                    if (await peer.receive(wire.Reply)).wants == "bytes":
                        await peer.write(data)
                        await peer.receive(wire.Reply)  # the last bytes have left the memory, too
                first = end
        await peer.send(wire.Done())

    async def _compute(self, request: wire.PrefillRequest) -> None:
        """Have a prompt computed, so that its blocks are cached."""
        prompt = {"prompt_token_ids": memoryview(request.token_ids).cast("i").tolist()}
        async for _ in self._engine.generate(prompt, ONE_TOKEN, cache_salt=request.salt):
            pass
