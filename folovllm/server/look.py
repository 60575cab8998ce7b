"""The inspector's addresses on a server."""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from folovllm.inspector.live import Audience
from folovllm.inspector.web import file_response, page_response
from folovllm.server.async_engine import AsyncEngine
from folovllm.server.config import ServerConfig
from folovllm.server.sse import EventStream


class Look:
    """The inspector's addresses."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self._engine = engine
        self._audience = Audience(engine.watch)
        engine.on_seen = self._audience.take_in
        self._needs_key = bool(config.api_key)
        self._ending: asyncio.Task[None] | None = None

    async def page(self, request: Request) -> Response:
        """The page."""
        return page_response({"kind": "live", "events": "inspector/events", "needs_key": self._needs_key})

    async def file(self, request: Request) -> Response:
        """One of its files."""
        return file_response(request.path_params["name"])

    async def events(self, request: Request) -> Response:
        """What the engine does, from now on."""
        self._engine.require_open()
        self._ending = self._ending or asyncio.create_task(self._end())
        reader = self._audience.join()
        return EventStream(self._audience.events(reader), partial(self._audience.leave, reader))

    async def _end(self) -> None:
        """Streams end with the engine, and do not hold up the server's end."""
        await self._engine.is_over.wait()
        self._audience.close()
