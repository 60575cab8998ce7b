"""A server in a thread of the tests' own process: real sockets, a real engine, and a look inside."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import uvicorn

from folovllm.config import EngineConfig
from folovllm.electives.server.app import build_app
from folovllm.electives.server.async_engine import AsyncEngine
from folovllm.electives.server.config import ServerConfig
from folovllm.electives.server.listener import listen, make_server

PATIENCE = 30.0  # seconds until a test gives up
START = 120.0  # and until it gives up a server that is to start
LOOK = 0.005  # seconds between two looks at what we wait for


class Background:
    """`with Background(...) as server`: `server.url` answers meanwhile."""

    def __init__(
        self, config: ServerConfig | None = None, transport: Any = "thread", loop: Any = "asyncio", **overrides: Any
    ) -> None:
        self._config = config or ServerConfig()
        self._overrides = {"use_tqdm": False} | overrides
        self._transport = transport
        self._ready = threading.Event()
        self._make_loop = uvicorn.Config("", loop=loop).get_loop_factory()
        self._thread = threading.Thread(target=self._run, name="server")
        self._listener = listen("127.0.0.1", 0)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # what is not read is felt soon
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._make_loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        async with AsyncEngine(EngineConfig(**self._overrides), transport=self._transport) as self.engine:
            app = build_app(self.engine, self._config)
            self._server = make_server(app, timeout_graceful_shutdown=1, log_config=None, log_level=None)
            self._loop = asyncio.get_running_loop()
            self._listener.listen()
            self._ready.set()
            await self._server.serve(sockets=[self._listener])

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(START)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def ask(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> tuple[int, Any]:
        """Status and reply of a request on a connection of its own. JSON is written and read; `bytes` go as they are.

        A server that wants keys gets its first one.
        """
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        own = {"Content-Type": "application/json"}
        if keys := self._config.api_key:
            own["Authorization"] = f"Bearer {keys[0]}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, data, own | headers)
            response = connection.getresponse()
            said = response.read().decode()
        finally:
            connection.close()
        is_json = response.headers.get("Content-Type", "").startswith("application/json")
        return response.status, json.loads(said) if is_json else said

    def call(self, function: Callable[[], Any]) -> None:
        """Call something in the server's event loop."""
        self._loop.call_soon_threadsafe(function)

    def wait_until_idle(self) -> None:
        """Until the engine has nothing to do, and holds nothing."""
        engine = self.engine
        eventually(lambda: not (engine.num_open or engine.stats.num_running or engine.stats.num_waiting))
        assert (engine.stats.kv_blocks_used, engine.num_queued, engine.num_queued_tokens) == (0, 0, 0)


def served(config: ServerConfig | None = None, **options: Any) -> Iterator[Background]:
    """A server for a fixture: `yield from served(...)`. At its end nothing is left in it."""
    with Background(config, **options) as server:
        yield server
        server.wait_until_idle()


def events_in(stream: str) -> list[Any]:
    """The JSON of a stream's events, but for the last one, which is none."""
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(LOOK)


def within(seconds: float, holds: Callable[[], bool]) -> None:
    """Wait until something holds that must hold so soon.

    The time is counted in looks and not read from a clock: a machine that is busy with other things, which slows down what
    we wait for, gives it more time too.
    """
    for _ in range(round(seconds / LOOK)):
        if holds():
            return
        time.sleep(LOOK)
    raise AssertionError(f"it did not come to hold within {seconds:g} s")
