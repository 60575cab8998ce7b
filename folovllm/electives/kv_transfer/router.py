"""A router in front of servers: it forwards requests to a decode server, and its answer back, byte by byte.

It knows nothing of prompts, for a decode server has them computed by its peer (`folovllm.electives.kv_transfer.peers`). It
chooses the server with the fewest requests. If one cannot be reached, or dies before its answer begins, another gets the request:
the servers of prompts at last, which are whole engines.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from folovllm.electives.kv_transfer.wire import unless

logger = logging.getLogger("folovllm")
# Headers of one connection alone.
HOP = b"connection keep-alive te trailer transfer-encoding upgrade proxy-connection".split()
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]  # HEAD comes with GET
MOST_BODY = 64 << 20  # bytes; servers have a limit of their own
CONNECT = 5.0  # seconds
NOT_MODIFIED, CLIENT_GONE, UNAVAILABLE = 304, 499, 503
# Of an answer. With 503 an engine has ended, sleeps or drains; HTTP has no others.
STATUSES = {*range(200, 600)} - {UNAVAILABLE}
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
        self.app = Starlette(routes=[Route("/{path:path}", self.route, methods=METHODS)])

    async def route(self, request: Request) -> Response:
        """Forward a request to the first server that answers."""
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > MOST_BODY:
                    return refusal(413, f"the body is longer than {MOST_BODY} bytes")
            return await unless(disconnected(request), self._first_answer(request, bytes(body)))
        except (ClientDisconnect, EOFError):
            return Response(status_code=CLIENT_GONE)
        except (httpx.LocalProtocolError, httpx.InvalidURL) as error:  # the client's fault, and no server's
            return refusal(400, f"the request cannot be forwarded: {error}")

    async def _first_answer(self, request: Request, body: bytes) -> Response:
        why = ""
        for server in sorted(self.servers, key=Server.rank):
            server.num_open += 1
            try:
                answer = await self._client.send(self._forwarded(server, request, body), stream=True)
                if answer.status_code in STATUSES:
                    return ForwardedAnswer(server, answer)
                await answer.aclose()
                raise httpx.TransportError(f"status {answer.status_code}")
            except httpx.LocalProtocolError:
                raise
            except httpx.TransportError as error:
                server.failed_at, why = time.monotonic(), f"{why}; {server.url}: {error or type(error).__name__}"
            finally:
                server.num_open -= 1
        return refusal(UNAVAILABLE, f"no server answers{why}")

    def _forwarded(self, server: Server, request: Request, body: bytes) -> httpx.Request:
        """The request as it came, its Host header too: the server behind decides who may ask."""
        headers = [(name, value) for name, value in request.headers.raw if name not in [*HOP, b"content-length"]]
        path = request.scope["raw_path"].decode("latin-1")
        query = f"?{request.url.query}" if request.url.query else ""
        return self._client.build_request(request.method, server.url + path + query, headers=headers, content=body)


class ForwardedAnswer(StreamingResponse):
    """A server's answer, which counts as open until all of it is forwarded, or nobody reads it any more."""

    def __init__(self, server: Server, answer: httpx.Response) -> None:
        super().__init__(answer.aiter_raw(), answer.status_code)
        dropped = [*HOP, b"content-length"] if answer.status_code == NOT_MODIFIED else HOP  # of a body that never comes
        self.raw_headers = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in dropped]
        self._server, self._answer = server, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward it. Its end here ends it at the server."""
        self._server.num_open += 1
        try:
            await super().__call__(scope, receive, send)
        except httpx.TransportError as error:  # the client's connection ends without the answer's end
            logger.warning("%s broke an answer off: %s", self._server.url, error)
        finally:
            self._server.num_open -= 1
            await self._answer.aclose()


async def disconnected(request: Request) -> None:
    """Wait until the client has left. Its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def refusal(status: int, message: str) -> Response:
    """An error as OpenAI's API has it."""
    kind, code = ("server_error", "no_server") if status == UNAVAILABLE else ("invalid_request_error", None)
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)
