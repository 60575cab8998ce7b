"""One request as a client sends it, through the application that HTTP would reach: what `read x1` traces."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from milestones.trace import PROMPT


def run(preset: str, enter: Callable[[str], None]) -> None:
    """Serve one completion, streamed, over the engine of a preset."""
    asyncio.run(_serve(preset, enter))


async def _serve(preset: str, enter: Callable[[str], None]) -> None:
    from folovllm.electives.server.app import build_app
    from folovllm.electives.server.async_engine import AsyncEngine
    from folovllm.electives.server.config import ServerConfig

    body = json.dumps({"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "stream": True}).encode()
    gone = asyncio.Event()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        """Nobody reads it."""

    enter("putting the server together")
    async with AsyncEngine(milestone=preset, use_tqdm=False) as engine:
        app = build_app(engine, ServerConfig())
        enter("one request")
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        path = "/v1/completions"
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "root_path": "", "headers": headers,
                 "query_string": b"", "scheme": "http", "server": ("x", 80), "http_version": "1.1"}  # fmt: skip
        await app(scope, receive, send)
        enter("the end")
