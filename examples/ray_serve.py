"""Online data parallelism: one engine a GPU, on one machine or many, behind one address, by Ray Serve.

    pip install "folovllm[serve,ray]"
    python examples/ray_serve.py --engines 8
    python examples/ray_serve.py --engines 2 --device cpu
    curl localhost:8000/v1/chat/completions -H "Content-Type: application/json" -d '{"messages": [...], "stream": true}'

Each engine has the whole server of `folovllm serve`; Ray Serve starts them where there is room, starts anew what has died,
and chooses who answers: with `--route conversation` all requests that begin alike go to one engine, whose prefix cache then
has the turns before; with `--route load` whoever has less to do. `X-Engine` in an answer says who it was.

    client -> Ray's proxy -> Front (reads the request, knows the conversation) -> Engine (tokenizes, schedules, computes)

To use several machines, make a Ray cluster of them first (`ray start --head`, and `ray start --address=...` on the others).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import HTTPOptions, RequestRouterConfig
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

BY_SESSION = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
ATTEMPTS = 3  # to find an engine that lives
BEGINNING = 256  # characters, or tokens, of a plain prompt that tell whether two begin alike
AT_ONCE = (
    1024  # requests that an engine holds; its scheduler and its queue know better what to do with them than a router
)


@serve.deployment(max_ongoing_requests=AT_ONCE)
class Engine:
    """An engine with its server, without the socket; Ray has given it a GPU, or none."""

    async def __init__(self, model: str | None, device: str, pieces_per_second: float) -> None:
        from folovllm import AsyncEngine, EngineConfig
        from folovllm.electives.server.app import build_app
        from folovllm.electives.server.config import ServerConfig

        config = EngineConfig(**({"model": model} if model else {}), device=device, use_tqdm=False)
        self.engine = AsyncEngine(config, transport="process" if device == "cuda" else "thread")
        await self.engine.start()
        self.app = build_app(self.engine, ServerConfig())
        self.pause = 1 / pieces_per_second
        self.name = f"{socket.gethostname()}:{os.getpid()}".encode()

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        """The messages of one response, as ASGI has them. Whoever stops reading ends the request.

        Between two pieces of a stream it does not read for a while: a slow reader gets longer pieces, and each one costs
        the same on its way.
        """
        said: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(maxsize=1)
        asked = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return asked.pop() if asked else await asyncio.Future()

        async def run() -> None:
            try:
                await self.app(scope, receive, said.put)
            finally:
                await said.put(None)

        running = asyncio.create_task(run())
        try:
            while (message := await said.get()) is not None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-engine", self.name)]
                yield message
                if message.get("more_body"):
                    await asyncio.sleep(self.pause)
        finally:
            running.cancel()

    async def check_health(self) -> None:
        """Ray asks now and then; an engine that has ended is replaced."""
        self.engine.require_open()


@serve.deployment(max_ongoing_requests=AT_ONCE, ray_actor_options={"num_cpus": 0})
class Front:
    """Reads requests and hands them on. There may be several: they agree on who answers what."""

    def __init__(self, engines: serve.handle.DeploymentHandle) -> None:
        self.engines = engines.options(method_name="answer", stream=True)

    async def __call__(self, request: Request) -> Response:
        """An engine's response, streamed."""
        body = await request.body()
        engines = self.engines.options(session_id=conversation(body))
        for _ in range(ATTEMPTS):
            said = engines.remote(scope_of(request), body)
            try:
                head = await anext(said)
            except RayActorError:
                continue  # it died before it said anything: another one may answer
            response = StreamingResponse(relay(said), head["status"])
            response.raw_headers = head["headers"]
            return response
        return Response(failure(), 503, media_type="application/json")


def scope_of(request: Request) -> dict[str, Any]:
    """What an application needs to know of a request, of things that can be sent."""
    kept = ("type", "asgi", "http_version", "method", "scheme", "path", "query_string", "headers", "client", "server")
    return {name: request.scope[name] for name in kept if name in request.scope} | {"root_path": ""}


async def relay(said: Any) -> AsyncIterator[bytes]:
    """The body, piece by piece. If the engine dies, its stream ends with an error."""
    try:
        async for message in said:
            yield message.get("body", b"")
    except RayActorError:
        yield b"data: " + failure() + b"\n\ndata: [DONE]\n\n"
    finally:
        said.cancel()


def failure() -> bytes:
    """In the words of OpenAI's API."""
    message = "the engine that answered has died; another takes its place: ask again"
    error = {"message": message, "type": "service_unavailable_error", "param": None, "code": "engine_dead"}
    return json.dumps({"error": error}).encode()


def conversation(body: bytes) -> str:
    """What the requests of one conversation have in common: how they begin. Nothing for a request without a prompt."""
    try:
        asked = json.loads(body)
        messages, prompt = asked.get("messages"), asked.get("prompt")
        if messages:
            first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
            beginning = messages[: first + 1]
        else:
            beginning = prompt and prompt[:BEGINNING]
    except (ValueError, AttributeError, KeyError, TypeError):
        return ""  # the engine will say what is wrong with it
    return hashlib.sha256(json.dumps(beginning).encode()).hexdigest() if beginning else ""


def application(
    model: str | None, engines: int, device: str, route: str, fronts: int, pieces_per_second: float
) -> serve.Application:
    """The engines and what stands in front of them."""
    router = RequestRouterConfig(request_router_class=BY_SESSION) if route == "conversation" else RequestRouterConfig()
    needs = {"num_gpus": 1, "num_cpus": 0} if device == "cuda" else {"num_cpus": 1}
    bound = Engine.options(num_replicas=engines, ray_actor_options=needs, request_router_config=router).bind(
        model, device, pieces_per_second
    )
    return Front.options(num_replicas=fronts).bind(bound)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the embedded one if left out")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--engines", type=int, default=1, help="how many, a GPU (or a CPU core) each")
    parser.add_argument("--fronts", type=int, default=1, help="processes that read requests and hand on answers")
    parser.add_argument("--pieces-per-second", type=float, default=25, help="most that a stream is cut into")
    parser.add_argument("--route", default="conversation", choices=["conversation", "load"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    serve.start(http_options=HTTPOptions(host=given.host, port=given.port))
    ways = (given.route, given.fronts, given.pieces_per_second)
    serve.run(application(given.model, given.engines, given.device, *ways))
    print(f"serving {given.engines} engines at http://{given.host}:{given.port}/v1 (Ctrl-C ends them)", flush=True)
    try:
        asyncio.run(asyncio.Event().wait())
    except KeyboardInterrupt:
        serve.shutdown()


if __name__ == "__main__":
    main()
