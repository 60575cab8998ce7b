"""From flags to a server that runs: the socket, the engine, signals, the end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import uvicorn

from folovllm.config import EngineConfig
from folovllm.electives.server.app import build_app
from folovllm.electives.server.async_engine import AsyncEngine
from folovllm.electives.server.config import ServerConfig
from folovllm.electives.server.errors import EngineDead
from folovllm.electives.server.listener import Server, ending_signals, listen
from folovllm.electives.structured_output.params import GrammarLimits
from folovllm.engine.setup import choose_device
from folovllm.plugins import ROLE, load_elective

LINGER = 5.0  # seconds that /health says 503 before a server without an engine ends
LAST_WORDS = 5  # seconds that responses have to reach their readers once the engine is done with them
BACKLOG = 2048


def run_server(config: ServerConfig, engine_config: EngineConfig) -> int:
    """Serve until a signal comes or the engine ends; returns the exit code.

    Raises:
        ValueError: the address or the model is not available, or torchrun runs this (every rank would serve).
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ValueError(
            "a server starts its ranks by itself: run `folovllm serve --tensor-parallel-size N`, without torchrun"
        )
    keys = [key for key in os.environ.get("FOLOVLLM_API_KEY", "").split(",") if key]
    config = replace(config, api_key=[*config.api_key, *keys])
    listener, handlers = listen(config.host, config.port), {sign: signal.getsignal(sign) for sign in ending_signals()}
    try:
        with listener, asyncio.Runner(loop_factory=uvicorn.Config("", loop="auto").get_loop_factory()) as runner:
            return runner.run(serve(config, engine_config, listener))
    except EngineDead as error:  # while it was built
        raise ValueError(f"the engine cannot be built: {error}") from error
    finally:
        for sign, handler in handlers.items():  # uvloop would leave its own
            signal.signal(sign, handler)


async def serve(config: ServerConfig, engine_config: EngineConfig, listener: socket.socket) -> int:
    """Serve until the process is told to end. Returns its exit code: 1 if the engine died, else 0."""
    shutdown = Shutdown()
    engine = AsyncEngine(
        engine_config,
        transport="process" if has_process(config, engine_config) else "thread",
        grammar_limits=GrammarLimits(config.grammar_seconds, config.grammar_memory),
    )
    async with engine, beside(engine, config):
        server = Server(build_app(engine, config), backlog=BACKLOG, timeout_graceful_shutdown=LAST_WORDS)
        ending = asyncio.create_task(shutdown.wait(server, engine, config.drain_seconds))
        gc.collect()
        gc.freeze()  # what exists by now stays: to search it in each collection would hold up all requests
        listener.listen(BACKLOG)  # a client that reads the next line may connect at once
        announce(engine, config, listener)
        await server.serve(sockets=[listener])
        await ending
    return 1 if engine.death is not None else 0


@asynccontextmanager
async def beside(engine: AsyncEngine, config: ServerConfig) -> AsyncIterator[None]:
    """Run what `--role` asks for beside the engine. Raises ValueError if it cannot be had."""
    if config.role is None:
        yield
        return
    async with load_elective(ROLE, "--role")(engine, config.role, config.peer, config.peer_seconds) as engine.bring:
        yield


def has_process(config: ServerConfig, engine_config: EngineConfig) -> bool:
    """Whether the engine gets a process: as configured; else on a GPU, so that its Python does not hold up the server's."""
    if config.engine_process is not None:
        return config.engine_process
    return choose_device(engine_config.device).type == "cuda"


def announce(engine: AsyncEngine, config: ServerConfig, listener: socket.socket) -> None:
    """Say where the server is, once it is there."""
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    names = ", ".join(config.served_model_name or [engine.config.model])
    print(f"serving {names} at http://{address}/v1, a page to chat at http://{address} (Ctrl-C ends it)", flush=True)


class Shutdown:
    """Ends a server: a first signal lets running answers end, a second one does not wait."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._is_serving = False
        for sign in ending_signals():
            asyncio.get_running_loop().add_signal_handler(sign, self._on_signal, sign)

    def _on_signal(self, sign: int) -> None:
        if self._requested.is_set() or not self._is_serving:
            os._exit(128 + sign)  # the engine's process goes with its parent
        self._requested.set()

    async def wait(self, server: uvicorn.Server, engine: AsyncEngine, drain_seconds: float) -> None:
        """Wait for a signal and drain, or for the engine's death; then stop the server."""
        self._is_serving = True
        requested, is_over = asyncio.ensure_future(self._requested.wait()), asyncio.ensure_future(engine.is_over.wait())
        await asyncio.wait((requested, is_over), return_when=asyncio.FIRST_COMPLETED)
        if is_over.done():
            await asyncio.wait((requested,), timeout=LINGER)
        else:
            if count := engine.num_open:
                print(f"{count} running: up to {drain_seconds:g} s to end; a second signal does not wait", flush=True)
            await engine.drain(drain_seconds)
        requested.cancel()
        is_over.cancel()
        server.should_exit = True
