"""`folovllm inspect` as a small server of its own: it replays recordings, or runs the playground."""

from __future__ import annotations

import asyncio
import socket
import webbrowser
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from folovllm.inspector.playground import Playground
from folovllm.inspector.web import FILES, PAGE, SAFE, file_response, page_response
from folovllm.server.errors import ApiError, as_api_error
from folovllm.server.guard import HostGuard
from folovllm.server.http import CLIENT_GONE, error_response, json_response, read_body, require_json
from folovllm.server.http_protocol import BoundedProtocol
from folovllm.server.serve import Server, ending_signals, listen
from folovllm.server.sse import EventStream

Handler = Callable[[Request], Awaitable[Response]]
CONTROL = f"{PAGE}/playground"
LONGEST_BODY = 1 << 20  # bytes


class AskRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Prompts from the page."""

    prompts: list[str]
    max_tokens: int = 64
    temperature: float = 0.7
    seed: int | None = None


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request that is to end; None: all."""

    request: str | None = None


class PaceRequest(msgspec.Struct, forbid_unknown_fields=True):
    """How fast the engine is to go."""

    delay: float | None = None
    paused: bool | None = None
    step: int = 0


def answered(handler: Handler) -> Handler:
    """The handler, with an answer for every error."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:
            return error_response(as_api_error(error))

    return guarded


async def _file(request: Request) -> Response:
    return file_response(request.path_params["name"])


async def _home(request: Request) -> Response:
    return RedirectResponse(PAGE)


async def _no_such_address(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))


def replay_app(recordings: list[Path], host: str) -> Starlette:
    """The page with recordings, which it fetches."""
    described = [{"name": path.name, "url": f"inspector/recordings/{i}"} for i, path in enumerate(recordings)]

    async def page(request: Request) -> Response:
        return page_response({"kind": "files", "recordings": described})

    async def recording(request: Request) -> Response:
        return FileResponse(recordings[request.path_params["number"]], media_type="application/jsonl", headers=SAFE)

    numbers = f"{PAGE}/recordings/{{number:int}}"
    return _app(host, {"/": _home, PAGE: page, FILES: _file, numbers: _known(recording, len(recordings))})


def _known(handler: Handler, count: int) -> Handler:
    async def checked(request: Request) -> Response:
        if request.path_params["number"] >= count:
            raise ApiError(404, f"{request.url.path}: not found")
        return await handler(request)

    return checked


def playground_app(playground: Playground, host: str) -> Starlette:
    """The page with an engine of its own."""

    async def page(request: Request) -> Response:
        return page_response({"kind": "playground", "events": "inspector/events", "control": "inspector/playground"})

    async def events(request: Request) -> Response:
        reader = playground.audience.join()
        return EventStream(playground.audience.events(reader), partial(playground.audience.leave, reader))

    async def control(request: Request) -> Response:
        if request.method == "POST":
            await playground.build(await _json(request, dict[str, Any]))
        return json_response(playground.described())

    async def prompts(request: Request) -> Response:
        asked = await _json(request, AskRequest)
        return json_response(
            {"requests": await playground.ask(asked.prompts, asked.max_tokens, asked.temperature, asked.seed)}
        )

    async def abort(request: Request) -> Response:
        playground.abort((await _json(request, AbortRequest)).request)
        return json_response({})

    async def pace(request: Request) -> Response:
        asked = await _json(request, PaceRequest)
        playground.change_pace(delay=asked.delay, paused=asked.paused, step=asked.step)
        return json_response({"delay": playground.delay, "paused": int(playground.is_held)})

    posts: dict[str, Handler] = {f"{CONTROL}/prompts": prompts, f"{CONTROL}/abort": abort, f"{CONTROL}/pace": pace}
    return _app(host, {"/": _home, PAGE: page, FILES: _file, f"{PAGE}/events": events}, posts | {CONTROL: control})


def _app(host: str, gets: dict[str, Handler], posts: dict[str, Handler] | None = None) -> Starlette:
    routes = [Route(path, answered(handler)) for path, handler in gets.items()]
    routes += [
        Route(path, answered(handler), methods=["GET", "POST"] if path == CONTROL else ["POST"])
        for path, handler in (posts or {}).items()
    ]
    guard = Middleware(HostGuard, names=[host], flag="--host")
    return Starlette(routes=routes, middleware=[guard], exception_handlers={HTTPException: _no_such_address})


async def _json(request: Request, kind: Any) -> Any:
    """The body. Only JSON: a page from elsewhere may send other kinds to any address, unasked."""
    require_json(request)
    body = await read_body(request, LONGEST_BODY)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body cannot be read: {error}") from error


def run_replay(recordings: list[Path], host: str, port: int, browser: bool) -> None:
    """Show recordings until Ctrl-C. Raises ValueError if the address cannot be had."""
    with listen(host, port) as listener:
        app = replay_app(recordings, host)
        asyncio.run(_serve(app, listener, f"showing {', '.join(path.name for path in recordings)}", browser))


def run_playground(overrides: dict[str, Any], host: str, port: int, browser: bool) -> None:
    """Run the playground until Ctrl-C. Raises ValueError if the address, or the engine, cannot be had."""
    with listen(host, port) as listener:
        asyncio.run(_play(Playground(overrides), listener, host, browser))


async def _play(playground: Playground, listener: socket.socket, host: str, browser: bool) -> None:
    await playground.build({})
    try:
        await _serve(playground_app(playground, host), listener, "a playground", browser, playground.audience.close)
    finally:
        await playground.close()


async def _serve(
    app: Starlette,
    listener: socket.socket,
    what: str,
    browser: bool,
    at_end: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal comes."""
    options: dict[str, Any] = {"lifespan": "off", "log_level": "warning", "access_log": False}
    server = Server(uvicorn.Config(app, http=BoundedProtocol, ws="none", **options))
    for sign in ending_signals():
        asyncio.get_running_loop().add_signal_handler(sign, _end, server, at_end)
    listener.listen()
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}{PAGE}"
    print(f"{what} at {address} (Ctrl-C ends it)", flush=True)
    if browser:
        await asyncio.to_thread(webbrowser.open, address)
    await server.serve(sockets=[listener])


def _end(server: uvicorn.Server, at_end: Callable[[], None]) -> None:
    if server.should_exit:
        server.force_exit = True
    server.should_exit = True
    at_end()
