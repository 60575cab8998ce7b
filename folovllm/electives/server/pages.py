"""What a browser asks for: the chat page at `/`, and the inspector's page with its stream."""

from __future__ import annotations

import asyncio
import secrets
from functools import partial
from pathlib import Path

from starlette.responses import Response

from folovllm.apps.inspector.live import Subscribers
from folovllm.apps.inspector.page import STATIC
from folovllm.apps.inspector.web import SAFE, file_response, page_response
from folovllm.electives.server.async_engine import AsyncEngine
from folovllm.electives.server.sse import EventStream

PAGE = Path(__file__).parent / "static" / "chat.html"


def chat_page(has_inspector: bool) -> Response:
    """The chat page, one file, with a policy that holds the browser to it: its own script and style, and requests to its own server.

    With an inspector each answer can be watched.
    """
    text, nonce = PAGE.read_text("utf-8"), secrets.token_urlsafe()
    if has_inspector:
        text = text.replace("<body>", '<body data-inspector="inspector">')
    for tag in ("style", "script"):
        text = text.replace(f"<{tag}", f'<{tag} nonce="{nonce}"', 1)
    text = text.replace("/* house.css */\n", (STATIC / "house.css").read_text("utf-8"))
    policy = (
        f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    )
    return Response(text, headers=SAFE | {"Content-Security-Policy": policy}, media_type="text/html")


class InspectorRoutes:
    """The inspector's addresses on a server."""

    def __init__(self, engine: AsyncEngine, needs_key: bool) -> None:
        self._engine, self._needs_key = engine, needs_key
        self._subscribers = Subscribers(engine.watch)
        engine.on_seen = self._subscribers.publish
        self._ending: asyncio.Task[None] | None = None

    async def page(self) -> Response:
        """The page."""
        return page_response({"kind": "live", "events": "inspector/events", "needs_key": self._needs_key})

    async def file(self, name: str) -> Response:
        """One of its files."""
        return file_response(name)

    async def events(self) -> Response:
        """What the engine does, from now on. The stream ends with the engine, and does not hold up the server's end."""
        self._engine.require_open()
        self._ending = self._ending or asyncio.create_task(self._end())
        subscriber = self._subscribers.add()
        return EventStream(self._subscribers.events(subscriber), partial(self._subscribers.remove, subscriber))

    async def _end(self) -> None:
        await self._engine.is_over.wait()
        self._subscribers.close()
