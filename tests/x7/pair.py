"""Two engines in this process, one of which computes the prompts of the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

from folovllm.electives.kv_transfer.peers import PrefillClient, PrefillServer, make_pool
from folovllm.electives.kv_transfer.segment import SegmentPool
from folovllm.electives.server.async_engine import AsyncEngine
from folovllm.sampling_params import SamplingParams

OPTIONS: dict[str, Any] = {
    "model": "stories-5m",
    "device": "cpu",
    "block_size": 16,
    "num_kv_blocks": 96,
    "max_model_len": 512,
    "use_tqdm": False,
}
TEXT = "Once upon a time there was a little girl who had a red ball. " * 12
PROMPTS = [TEXT, "Once", "The dog " * 60]
GREEDY, SEEDED = SamplingParams(temperature=0, max_tokens=24), SamplingParams(temperature=1.0, seed=5, max_tokens=24)


class Pair:
    """`decode` answers; `client` asks `server`, which listens at `port`."""

    pool: SegmentPool
    server: PrefillServer
    client: PrefillClient
    port: int

    def __init__(self, prefill: AsyncEngine, decode: AsyncEngine, secret: bytes) -> None:
        self.prefill, self.decode, self.secret = prefill, decode, secret

    async def ask(self, port: int, seconds: float = 20.0) -> None:
        """Let `decode` ask a peer at another port."""
        self.client = PrefillClient(self.decode, self.pool, "127.0.0.1", port, self.secret, seconds)
        self.decode.bring = self.client.bring

    async def answer(self, prompt: Any, params: SamplingParams = GREEDY, **options: Any) -> tuple[list[int], int]:
        """The tokens of an answer, and how many of the prompt's were not computed here."""
        outputs = [output async for output in self.decode.generate(prompt, params, **options)]
        return list(outputs[-1].outputs[0].token_ids), outputs[-1].num_cached_tokens or 0

    async def require_idle(self) -> None:
        """Nothing is held on either side."""
        for engine in (self.prefill, self.decode):
            for _ in range(400):
                if not (engine.num_open or engine.stats.num_running or engine.stats.num_waiting):
                    break
                await asyncio.sleep(0.01)
            assert (engine.num_open, engine.stats.kv_blocks_used, engine.num_queued) == (0, 0, 0)


@asynccontextmanager
async def pair(
    secret: bytes = b"", theirs: bytes | None = None, common: dict[str, Any] | None = None, **other: Any
) -> AsyncIterator[Pair]:
    """Both engines. `common` are options of both, `other` those in which the one that answers differs."""
    shared = OPTIONS | (common or {})
    async with AsyncEngine(**shared) as prefill, AsyncEngine(**shared | other) as decode:
        both = Pair(prefill, decode, secret)
        with closing(await make_pool(decode)) as both.pool, closing(await make_pool(prefill)) as own:
            both.server = PrefillServer(prefill, own, secret if theirs is None else theirs)
            async with both.server.listening("127.0.0.1", 0) as both.port:
                await both.ask(both.port)
                yield both
                await both.require_idle()


@asynccontextmanager
async def between(port: int, what: str, after: int) -> AsyncIterator[int]:
    """A port that leads to another one, and passes `after` bytes of the answers. Then it does something else.

    Args:
        what: "cut" ends the connection, "hang" passes nothing more, "flip" changes a bit of the next byte and goes on, "wrong" is a program
            of another kind, which says something else from the start.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to = await asyncio.open_connection("127.0.0.1", port)
        asking = asyncio.create_task(forward(reader, to))
        try:
            if what == "wrong":
                writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            else:
                await forward(there, writer, after)
        except (OSError, asyncio.CancelledError):
            pass  # the client has left, or the test
        finally:
            asking.cancel()
            writer.close()
            to.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int = -1) -> None:
        while data := await reader.read(1 << 16):
            if is_now := 0 <= left < len(data):
                changed = data[:left] + bytes([data[left] ^ 0x10]) + data[left + 1 :]
                data = changed if what == "flip" else data[:left]
            writer.write(data)
            await writer.drain()
            if is_now and what == "hang":
                await asyncio.sleep(60)
            if is_now and what == "cut":
                return
            left -= len(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
