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
from folovllm.electives.kv_transfer.segment import Segment, Segments
from folovllm.sampling_params import SamplingParams

logger = logging.getLogger("folovllm")
PATIENCE = 10.0  # seconds for the next message of a peer that owes one
QUIET = 60.0  # seconds after one refusal in the log for which no other one is written there: strangers may come by the thousand
NOBODYS = SamplingParams(temperature=0, max_tokens=1, detokenize=False)  # of the token behind a prompt
Engine = Any  # a server's, with `setup`, `call` and `generate`


async def look_up(engine: Engine, token_ids: bytes = b"", salt: str | None = None) -> tuple[wire.Layout, int]:
    """Call `blocks.look_up` in the engine, between two steps."""
    query = {"token_ids": token_ids, "salt": salt}
    found = await engine.call("call_function", "folovllm.electives.kv_transfer.blocks:look_up", query)
    return msgspec.msgpack.decode(found, type=tuple[wire.Layout, int])


async def copy(engine: Engine, function: str, ask: wire.Ask, first: int, end: int, memory: wire.SegmentRef) -> int:
    """Call `blocks.export_blocks` or `blocks.import_blocks` in the engine, between two steps."""
    query = {"blocks": msgspec.msgpack.encode((ask, first, end, memory))}
    return int(await engine.call("call_function", f"folovllm.electives.kv_transfer.blocks:{function}", query))


class PrefillServer:
    """Answers peers. `start` it in the event loop of the engine."""

    def __init__(self, engine: Engine, secret: bytes) -> None:
        self._engine, self._secret = engine, secret
        self._peers: set[asyncio.Task[None]] = set()
        self._num_unlogged, self._logged_at = 0, -QUIET

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
        peer, task = wire.Connection(reader, writer, self._secret, is_server=True), asyncio.current_task()
        assert task is not None
        self._peers.add(task)
        try:
            await self._answer(peer)
        except (OSError, EOFError, asyncio.CancelledError) as error:  # it has left or says nothing, or we close
            logger.debug("a peer's connection ended: %r", error)
        except Exception as error:  # a stranger, another model, too long a prompt, an engine that drains or ended
            self._log(error)
            with suppress(OSError):
                await peer.send(wire.Refusal(str(error)))
        finally:
            self._peers.discard(task)
            writer.close()

    def _log(self, error: Exception) -> None:
        """Log a refusal, at most one in `QUIET` seconds, with the number of those before it that were left out."""
        self._num_unlogged += 1
        if time.monotonic() >= self._logged_at + QUIET:
            logger.warning("a peer is refused: %s (%d others since the last such line)", error, self._num_unlogged - 1)
            self._num_unlogged, self._logged_at = 0, time.monotonic()

    async def _answer(self, peer: wire.Connection) -> None:
        async with asyncio.timeout(PATIENCE):
            await peer.greet()
            ask = await peer.receive(wire.Ask, limit=wire.SHORT + 4 * self._engine.setup.max_model_len)
        layout, _ = await look_up(self._engine)
        layout.require_same(ask.layout)
        num_blocks, rest = divmod(len(ask.token_ids), 4 * layout.block_size)
        if rest or not 0 <= ask.first < num_blocks:
            raise wire.WireError(f"the peer asks for {len(ask.token_ids)} bytes of tokens from block {ask.first} on")
        await wire.unless(peer.reader.read(1), self._compute(ask))
        async with self._segments.one() as segment:
            first = ask.first
            while first < num_blocks and (blocks := await self._export(ask, first, num_blocks, segment)):
                await peer.send(blocks)
                async with asyncio.timeout(PATIENCE):
                    reply = await peer.receive(wire.Reply)
                if reply.wants == "bytes":
                    await peer.write(segment.data[: blocks.num_bytes])
                first = blocks.end
        await peer.send(wire.Done())

    async def _compute(self, ask: wire.Ask) -> None:
        """Have a prompt computed, so that its blocks are cached."""
        prompt = {"prompt_token_ids": memoryview(ask.token_ids).cast("i").tolist()}
        async for _ in self._engine.generate(prompt, NOBODYS, cache_salt=ask.salt):
            pass

    async def _export(self, ask: wire.Ask, first: int, end: int, segment: Segment) -> wire.Blocks | None:
        """Copy the next blocks into the segment, as many as fit and are cached. None: the first of them was evicted."""
        end = min(end, first + self._segments.num_blocks)
        end = first + await copy(self._engine, "export_blocks", ask, first, end, segment.ref)
        if end == first:
            return None
        checksum = await wire.checksum_of(segment.data[: (end - first) * ask.layout.block_bytes])
        return wire.Blocks(ask.layout, first, end, ask.tokens(first, end), checksum, segment.ref)
