"""A router in front of servers: it forwards requests to a decode server, and its answer back, byte by byte.

It knows nothing of prompts, for a decode server has them computed by its peer (`folovllm.electives.kv_transfer.decode`). It
chooses the server with the fewest requests. If one cannot be reached, or dies before its answer begins, another gets the request:
the servers of prompts at last, which are whole engines.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from folovllm.electives.kv_transfer.wire import unless

logger = logging.getLogger("folovllm")
# Headers of one connection alone, by which each side says how long a body is, too.
HOP = b"connection keep-alive te trailer transfer-encoding upgrade proxy-connection content-length".split()
MOST_BODY = 64 << 20  # bytes; servers have a limit of their own
CONNECT = 5.0  # seconds
UNAVAILABLE = 503  # of a server whose engine has ended, sleeps or drains
PAUSE = 2.0  # seconds for which a server that failed comes last


@dataclass(slots=True, eq=False)
class Server:
    """A server behind the router."""

    url: str
    is_prefill: bool
    num_open: int = 0
    failed_at: float = -PAUSE

    def rank(self) -> tuple[bool, bool, int]:
        """The smallest is asked first."""
        return time.monotonic() < self.failed_at + PAUSE, self.is_prefill, self.num_open


class Router:
    """The application, for uvicorn."""

    def __init__(
        self, decode: list[str], prefill: list[str], transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.servers = [Server(url.rstrip("/"), i >= len(decode)) for i, url in enumerate(decode + prefill)]
        timeout, limits = httpx.Timeout(None, connect=CONNECT), httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, transport=transport, trust_env=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request to the first server that answers, and its answer back. The client's end ends it at the server."""
        request, body = Request(scope, receive), bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > MOST_BODY:
                    return await refusal(413, f"the body is longer than {MOST_BODY} bytes")(scope, receive, send)
            failures = await unless(disconnected(receive), self._forward(request, bytes(body), send))
        except (ClientDisconnect, EOFError):
            return
        if failures:
            await refusal(UNAVAILABLE, f"no server answers; {'; '.join(failures)}")(scope, receive, send)

    async def _forward(self, request: Request, body: bytes, send: Send) -> list[str]:
        """Returns how each server failed, and nothing if one has answered."""
        failures, has_begun = list[str](), False
        headers = [
            pair for pair in request.headers.raw if pair[0] not in HOP
        ]  # Host, too: a server decides who may ask
        query = b"?" + request.scope["query_string"] if request.scope["query_string"] else b""
        path = (request.scope["raw_path"] + query).decode("latin-1")
        for server in sorted(self.servers, key=Server.rank):
            server.num_open += 1
            try:
                url = server.url + path
                async with self._client.stream(request.method, url, headers=headers, content=body) as answer:
                    if answer.status_code == UNAVAILABLE:
                        raise httpx.TransportError(f"status {UNAVAILABLE}")
                    passed = [pair for pair in answer.headers.raw if pair[0].lower() not in HOP]
                    await send({"type": "http.response.start", "status": answer.status_code, "headers": passed})
                    has_begun = True
                    async for part in answer.aiter_raw():
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                    await send({"type": "http.response.body"})
                    return []
            except httpx.TransportError as error:
                if has_begun:  # the client's connection ends without the answer's end
                    logger.warning("%s broke an answer off: %s", server.url, error)
                    return []
                server.failed_at = time.monotonic()
                failures.append(f"{server.url}: {error or type(error).__name__}")
            finally:
                server.num_open -= 1
        return failures


async def disconnected(receive: Receive) -> None:
    """Wait until the client has left. Its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def refusal(status: int, message: str) -> JSONResponse:
    """An error as OpenAI's API has it."""
    kind, code = ("server_error", "no_server") if status == UNAVAILABLE else ("invalid_request_error", None)
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)
