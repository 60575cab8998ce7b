"""From flags to a server that runs: the socket, the engine, signals, the end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from contextlib import AsyncExitStack
from dataclasses import replace

import uvicorn

from folovllm.config import EngineConfig
from folovllm.electives.server.app import build_app
from folovllm.electives.server.async_engine import AsyncEngine
from folovllm.electives.server.config import ServerConfig
from folovllm.electives.server.errors import EngineDead
from folovllm.electives.server.listener import address_of, ending_signals, listen, make_server
from folovllm.electives.structured_output.params import GrammarLimits
from folovllm.engine.setup import choose_device
from folovllm.plugins import ROLE, load_elective

LINGER = 5.0  # seconds that /health says 503 before a server without an engine ends
LAST_WORDS = 5  # seconds that responses have to reach their readers once the engine is done with them


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
    """Serve until the process is told to end. Returns its exit code: 1 if the engine died, else 0.

    A first signal lets running answers end. A second one does not wait, nor does one before there are any.
    """
    told = asyncio.Event()
    told.set()

    def on_signal(sign: int) -> None:
        if told.is_set():
            os._exit(128 + sign)  # the engine's process goes with its parent
        told.set()

    for sign in ending_signals():
        asyncio.get_running_loop().add_signal_handler(sign, on_signal, sign)
    has_process = config.engine_process
    if has_process is None:  # on a GPU it has one, so that its Python does not hold up the server's
        has_process = choose_device(engine_config.device).type == "cuda"
    limits = GrammarLimits(config.grammar_seconds, config.grammar_memory)
    engine = AsyncEngine(engine_config, transport="process" if has_process else "thread", grammar_limits=limits)
    async with engine, AsyncExitStack() as stack:
        if config.role is not None:
            role = load_elective(ROLE, "--role")(engine, config.role, config.peer, config.peer_seconds)
            engine.bring = await stack.enter_async_context(role)
        server = make_server(build_app(engine, config), timeout_graceful_shutdown=LAST_WORDS)
        told.clear()
        ending = asyncio.create_task(end(server, engine, told, config.drain_seconds))
        gc.collect()
        gc.freeze()  # what exists by now stays: to search it in each collection would hold up all requests
        listener.listen(server.config.backlog)  # a client that reads the next line may connect at once
        names, address = ", ".join(config.served_model_name or [engine.config.model]), address_of(listener)
        print(f"serving {names} at {address}/v1, a page to chat at {address} (Ctrl-C ends it)", flush=True)
        await server.serve(sockets=[listener])
        await ending
    return 1 if engine.death is not None else 0


async def end(server: uvicorn.Server, engine: AsyncEngine, told: asyncio.Event, drain_seconds: float) -> None:
    """Wait until the server is told to end, and drain, or for the engine's death; then stop the server."""
    is_told, is_over = asyncio.create_task(told.wait()), asyncio.create_task(engine.is_over.wait())
    await asyncio.wait((is_told, is_over), return_when=asyncio.FIRST_COMPLETED)
    if is_over.done():
        await asyncio.wait((is_told,), timeout=LINGER)
    else:
        if count := engine.num_open:
            print(f"{count} running: up to {drain_seconds:g} s to end; a second signal does not wait", flush=True)
        await engine.drain(drain_seconds)
    server.should_exit = True
