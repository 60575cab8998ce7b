"""`folovllm inspect` as a small server of its own: it replays recordings, or runs the playground.

Nothing here imports torch: the page and its scenes are there at once, and the playground builds its engine behind them.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import webbrowser
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from folovllm.apps.inspector.playground import Playground
from folovllm.apps.inspector.scenes import scenes
from folovllm.apps.inspector.web import FILES, PAGE, SAFE, file_response, page_response
from folovllm.electives.server import http
from folovllm.electives.server.errors import ApiError
from folovllm.electives.server.listener import address_of, ending_signals, listen, make_server
from folovllm.electives.server.sse import EventStream

Handler = Callable[[Request], Awaitable[Response]]
CONTROL = f"{PAGE}/playground"
BOOK = Path(__file__).resolve().parents[3] / "docs"  # of a checkout
LONGEST_BODY = 1 << 20  # bytes


def body_of(method: Callable[..., Any]) -> type[msgspec.Struct]:
    """What the body of a request holds that calls a method: its parameters."""
    kinds, parameters = get_type_hints(method), inspect.signature(method).parameters.values()
    fields = [(p.name, kinds[p.name], *([] if p.default is p.empty else [p.default])) for p in parameters]
    return msgspec.defstruct(method.__name__, fields, forbid_unknown_fields=True)


def replay_app(recordings: list[Path], host: str) -> Starlette:
    """The page with recordings, which it fetches."""
    described = [{"name": path.name, "url": f"inspector/recordings/{i}"} for i, path in enumerate(recordings)]

    async def page(request: Request) -> Response:
        return page_response({"kind": "files", "recordings": described})

    async def recording(request: Request) -> Response:
        if (number := request.path_params["number"]) >= len(recordings):
            raise HTTPException(404)
        return FileResponse(recordings[number], media_type="application/jsonl", headers=SAFE)

    return _app(host, page, [Route(f"{PAGE}/recordings/{{number:int}}", recording)])


def playground_app(playground: Playground, host: str) -> Starlette:
    """The page with an engine of its own."""

    async def page(request: Request) -> Response:
        return page_response(_source(playground.has_flags))

    async def events(request: Request) -> Response:
        subscriber = playground.subscribers.add()
        return EventStream(
            playground.subscribers.events(subscriber), partial(playground.subscribers.remove, subscriber)
        )

    async def control(request: Request) -> Response:
        if request.method == "POST":
            await playground.build(await _json(request, dict[str, Any]))
        return JSONResponse(playground.described())

    def calls(method: Callable[..., Awaitable[Any]]) -> Handler:
        kind = body_of(method)

        async def handler(request: Request) -> Response:
            answer = await method(**msgspec.structs.asdict(await _json(request, kind)))
            return JSONResponse(answer or playground.described())

        return handler

    routes = [Route(f"{PAGE}/events", events), Route(CONTROL, control, methods=["GET", "POST"])]
    routes += [Route(f"{PAGE}/scenes/{{name}}", _recording), Route(f"{PAGE}/book/{{name}}.md", _chapter)]
    methods = playground.ask, playground.play, playground.abort, playground.change_pace
    for name, method in zip(("prompts", "scene", "abort", "pace"), methods, strict=True):
        routes.append(Route(f"{CONTROL}/{name}", calls(method), methods=["POST"]))  # type: ignore[arg-type]
    return _app(host, page, routes)


def _source(live: bool) -> dict[str, Any]:
    """Where the page finds events, controls, scenes and chapters; `live`: it shows the engine at once."""
    described = []
    for scene in scenes().values():
        recordings = [{"name": file.name, "url": f"inspector/scenes/{file.name}"} for file in scene.files]
        described.append(scene.described() | {"recordings": recordings})
    source = {"kind": "playground", "events": "inspector/events", "control": "inspector/playground", "live": live}
    return source | {"scenes": described, "book": "inspector/book/{}.md" if BOOK.is_dir() else None}


async def _recording(request: Request) -> Response:
    """A recording of a scene."""
    files = {file.name: file for scene in scenes().values() for file in scene.files}
    if (file := files.get(request.path_params["name"])) is None:
        raise HTTPException(404)
    return FileResponse(file, media_type="application/jsonl", headers=SAFE)


async def _chapter(request: Request) -> Response:
    """A chapter that a scene names, as its text stands in the checkout."""
    name = request.path_params["name"]
    if name not in {scene.chapter for scene in scenes().values()} or not (file := BOOK / f"{name}.md").is_file():
        raise HTTPException(404)
    return FileResponse(file, media_type="text/plain", headers=SAFE)


def _app(host: str, page: Handler, routes: list[Route]) -> Starlette:
    """An application with the page, its files and these addresses."""

    async def file(request: Request) -> Response:
        return file_response(request.path_params["name"])

    async def home(request: Request) -> Response:
        return RedirectResponse(PAGE)

    everywhere = [Route("/", home), Route(PAGE, page), Route(FILES, file)]
    return Starlette(
        routes=everywhere + routes,
        middleware=[Middleware(http.HostGuard, names=[host], flag="--host")],
        exception_handlers=http.HANDLERS,
    )


async def _json(request: Request, kind: Any) -> Any:
    """The body."""
    body = await http.read_json(request, LONGEST_BODY)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body cannot be read: {error}") from error


def run(recordings: list[Path], overrides: dict[str, Any], host: str, port: int, browser: bool) -> None:
    """Show recordings, or without any a playground, until Ctrl-C.

    Raises:
        ValueError: the address, or the engine, cannot be had.
    """
    with listen(host, port) as listener:
        if recordings:
            what = f"showing {', '.join(path.name for path in recordings)}"
            asyncio.run(_serve(replay_app(recordings, host), listener, what, browser))
        else:
            asyncio.run(_play(Playground(overrides), listener, host, browser))


async def _play(playground: Playground, listener: socket.socket, host: str, browser: bool) -> None:
    """Serve the playground while its engine is built, and end both. Raises ValueError where there can be no engine."""
    app = playground_app(playground, host)
    serving = asyncio.create_task(_serve(app, listener, "a playground", browser, playground.subscribers.close))
    building = asyncio.create_task(playground.build({}))
    try:
        await asyncio.wait((serving, building), return_when=asyncio.FIRST_COMPLETED)
        if building.done():
            building.result()
        await serving
    finally:
        serving.cancel()
        await asyncio.gather(serving, building, return_exceptions=True)  # an engine that is half built cannot be ended
        await playground.close()


async def _serve(
    app: Starlette, listener: socket.socket, what: str, browser: bool, at_end: Callable[[], None] = lambda: None
) -> None:
    """Serve until a signal comes; then `at_end` ends the streams, which would hold up the server's end."""
    server = make_server(app)

    def end() -> None:
        server.force_exit = server.should_exit  # a second signal does not wait
        server.should_exit = True
        at_end()

    for sign in ending_signals():
        asyncio.get_running_loop().add_signal_handler(sign, end)
    listener.listen()
    address = address_of(listener) + PAGE
    print(f"{what} at {address} (Ctrl-C ends it)", flush=True)
    if browser:
        await asyncio.to_thread(webbrowser.open, address)
    await server.serve(sockets=[listener])
