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


def replay_app(files: list[Path], host: str) -> Starlette:
    """The page with recordings, which it fetches."""
    return _app(host, {"kind": "files", "recordings": _links(files, files)}, files, [])


def playground_app(playground: Playground, host: str) -> Starlette:
    """The page with an engine of its own, and with scenes to begin with."""

    async def events(request: Request) -> Response:
        subscriber, all_of_them = playground.subscribers.add(), playground.subscribers
        return EventStream(all_of_them.events(subscriber), partial(all_of_them.remove, subscriber))

    async def control(request: Request) -> Response:
        if request.method == "POST":
            await playground.build(await _body(request, dict[str, Any]))
        return JSONResponse(playground.described())

    def calls(method: Callable[..., Awaitable[Any]]) -> Handler:
        """A handler that calls a method; the request's body holds its arguments."""
        kind = _struct_of(method)

        async def handler(request: Request) -> Response:
            answer = await method(**msgspec.structs.asdict(await _body(request, kind)))
            return JSONResponse(answer or playground.described())

        return handler

    async def chapter(request: Request) -> Response:
        """A chapter that a scene names, as its text stands in the checkout."""
        name = request.path_params["name"]
        if name not in {scene.chapter for scene in scenes().values()} or not (file := BOOK / f"{name}.md").is_file():
            raise HTTPException(404)
        return FileResponse(file, media_type="text/plain", headers=SAFE)

    files = [file for scene in scenes().values() for file in scene.files]
    source = {
        "kind": "playground",
        "events": "inspector/events",
        "control": "inspector/playground",
        "live": playground.has_flags,
        "scenes": [scene.described() | {"recordings": _links(scene.files, files)} for scene in scenes().values()],
        "book": "inspector/book/{}.md" if BOOK.is_dir() else None,
    }
    methods: dict[str, Callable[..., Awaitable[Any]]] = {
        "prompts": playground.ask,
        "scene": playground.play,
        "abort": playground.abort,
        "pace": playground.change_pace,
    }
    routes = [Route(f"{CONTROL}/{name}", calls(method), methods=["POST"]) for name, method in methods.items()]
    routes += [Route(f"{PAGE}/events", events), Route(CONTROL, control, methods=["GET", "POST"])]
    return _app(host, source, files, [*routes, Route(f"{PAGE}/book/{{name}}.md", chapter)])


def _app(host: str, source: dict[str, Any], recordings: list[Path], routes: list[Route]) -> Starlette:
    """An application with the page, its files, these recordings and these addresses."""

    async def home(request: Request) -> Response:
        return RedirectResponse(PAGE)

    async def page(request: Request) -> Response:
        return page_response(source)

    async def file(request: Request) -> Response:
        return file_response(request.path_params["name"])

    async def recording(request: Request) -> Response:
        if (number := request.path_params["number"]) >= len(recordings):
            raise HTTPException(404)
        return FileResponse(recordings[number], media_type="application/jsonl", headers=SAFE)

    everywhere = [Route("/", home), Route(PAGE, page), Route(FILES, file)]
    return Starlette(
        routes=[*everywhere, Route(f"{PAGE}/recordings/{{number:int}}", recording), *routes],
        middleware=[Middleware(http.HostGuard, names=[host], flag="--host")],
        exception_handlers=http.HANDLERS,
    )


def _links(shown: list[Path], recordings: list[Path]) -> list[dict[str, str]]:
    """Where the page finds recordings."""
    return [{"name": file.name, "url": f"inspector/recordings/{recordings.index(file)}"} for file in shown]


def _struct_of(method: Callable[..., Any]) -> type[msgspec.Struct]:
    """What the body of a request holds that calls a method: its parameters, within their bounds."""
    kinds, parameters = get_type_hints(method, include_extras=True), inspect.signature(method).parameters.values()
    fields = [(p.name, kinds[p.name], *([] if p.default is p.empty else [p.default])) for p in parameters]
    return msgspec.defstruct(method.__name__, fields, forbid_unknown_fields=True)


async def _body(request: Request, kind: Any) -> Any:
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
        asyncio.run(_serve(recordings, overrides, host, listener, browser))


async def _serve(
    recordings: list[Path], overrides: dict[str, Any], host: str, listener: socket.socket, browser: bool
) -> None:
    """Serve until a signal comes, or a playground's first engine cannot be built."""
    playground = None if recordings else Playground(overrides)
    server = make_server(replay_app(recordings, host) if playground is None else playground_app(playground, host))

    def end() -> None:
        server.force_exit = server.should_exit  # a second signal does not wait
        server.should_exit = True
        if playground is not None:
            playground.subscribers.close()  # streams would hold up the server's end

    for sign in ending_signals():
        asyncio.get_running_loop().add_signal_handler(sign, end)
    listener.listen()
    address, what = address_of(listener) + PAGE, ", ".join(path.name for path in recordings) or "a playground"
    print(f"{what} at {address} (Ctrl-C ends it)", flush=True)
    if browser:
        await asyncio.to_thread(webbrowser.open, address)
    if playground is None:
        return await server.serve(sockets=[listener])
    building = asyncio.create_task(playground.build({}))
    building.add_done_callback(lambda built: end() if built.exception() else None)
    try:
        await server.serve(sockets=[listener])
        await building  # an engine that is half built cannot be ended
    finally:
        await playground.close()
