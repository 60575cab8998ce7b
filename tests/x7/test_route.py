"""`folovllm route` and both roles of `folovllm serve`, as they are started."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from folovllm.apps.cli import main
from folovllm.electives.kv_transfer.peers import address_of
from folovllm.electives.kv_transfer.router import Router
from tests.x1.background import eventually
from tests.x7.pair import TEXT

pytestmark = pytest.mark.x7
ROOT = Path(__file__).parents[2]
SEEDED: dict[str, Any] = {"model": "stories-5m", "max_tokens": 24, "seed": 3, "temperature": 0.8}


Process = subprocess.Popen[str]


def started(stack: ExitStack, *command: str) -> Process:
    """A command of ours that runs; the stack ends it."""
    line = [sys.executable, "-m", "folovllm", *command]
    environment = os.environ | {"FOLOVLLM_PEER_SECRET": "a secret"}
    process = stack.enter_context(subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment))
    stack.callback(process.kill)
    return process


def url_of(process: Process) -> str:
    """The first address that it prints."""
    return next(found[0] for said in process.stdout or () if (found := re.search(r"http://[\w.:]+", said)))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


FLAGS = {"port": 0, "device": "cpu", "max-model-len": 512, "num-kv-blocks": 96, "block-size": 16}
SERVE = ["serve", "--no-use-tqdm", *(f"--{name}={value}" for name, value in FLAGS.items())]


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_three_processes_answer_as_one_and_survive_the_loss_of_one() -> None:
    with ExitStack() as stack:
        peer = f"127.0.0.1:{free_port()}"
        prefill = started(stack, *SERVE, "--role", "prefill", "--peer", peer, "--engine-process")
        decode = started(stack, *SERVE, "--role", "decode", "--peer", peer)
        whole = url_of(prefill)
        router = started(stack, "route", "--decode", url_of(decode), "--prefill", whole, "--port", str(free_port()))
        one, both = (openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) for url in (whole, url_of(router)))
        eventually(lambda: is_up(str(both.base_url).replace("/v1/", "/health")))
        assert both.models.list().data[0].id == "stories-5m"
        expected = one.completions.create(prompt=TEXT, **SEEDED)
        answer: Any = both.completions.create(prompt=TEXT, **SEEDED)
        assert answer.choices == expected.choices and answer.usage.prompt_tokens_details.cached_tokens == 176
        chat: Any = {"messages": [{"role": "user", "content": TEXT[:300]}], **SEEDED}
        said = one.chat.completions.create(**chat).choices[0].message.content
        parts = both.chat.completions.create(stream=True, **chat)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == said
        with pytest.raises(openai.NotFoundError, match="no model 'other'"):
            both.completions.create(prompt="x", **SEEDED | {"model": "other"})
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            both.completions.create(prompt="x", **SEEDED | {"max_tokens": -1})
        stream = both.completions.create(prompt=TEXT[5:], stream=True, **SEEDED)
        prefill.kill()
        prefill.wait()
        assert len(list(stream)) > 1
        answer = both.completions.create(prompt="And " + TEXT, **SEEDED)  # nobody has computed this
        assert answer.usage.completion_tokens == 24


def is_up(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


class Body(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"\xff as "
        yield b"it is"


def test_the_router_goes_on_to_the_next_server() -> None:
    """One is not there, one dies before it answers; then the server of prompts has it. What it says passes as it is."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if request.url.host == "a":
            raise httpx.ConnectError("refused")
        if request.url.host == "b":
            raise httpx.RemoteProtocolError("it died")
        if (status := request.url.host).isdigit():
            return httpx.Response(int(status), headers={"Content-Length": "5"}, stream=httpx.ByteStream(b""))
        assert (request.url.raw_path, request.content, request.headers["host"]) == (b"/v1/x%20y?z=1", b"body", "name:1")
        return httpx.Response(429, stream=Body(), headers={"Retry-After": "1", "Connection": "close"})

    async def ask(router: Router, path: str = "/v1/x%20y?z=1") -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(router.app), base_url="http://name:1") as client:
            return await client.post(path, content=b"body")

    async def check() -> None:
        router = Router(["http://a", "http://b/"], ["http://c"], httpx.MockTransport(answer))
        for _ in range(2):
            response = await ask(router)
            assert (response.status_code, response.content, response.headers["retry-after"]) == (
                429,
                b"\xff as it is",
                "1",
            )
            assert "connection" not in response.headers
        assert asked[:3] == ["a", "b", "c"] and asked[3] == "c", "who has failed comes last for a while"
        assert [server.num_open for server in router.servers] == [0, 0, 0]
        response = await ask(Router(["http://a", "http://503", "http://999"], [], httpx.MockTransport(answer)))
        assert response.status_code == 503
        message = response.json()["error"]["message"]
        assert "http://a: refused" in message and "http://503: status 503" in message
        assert "http://999: status 999" in message, "HTTP has no such status, so a server of it cannot pass it on"
        response = await ask(Router(["http://304"], [], httpx.MockTransport(answer)))
        assert response.status_code == 304 and "content-length" not in response.headers
        response = await ask(Router(["http://a"], [], httpx.MockTransport(answer)), "/" + "x" * 65530)
        assert response.status_code == 400 and "URL too long" in response.json()["error"]["message"]

    asyncio.run(check())


@pytest.mark.parametrize("is_answering", [True, False])
def test_a_client_that_leaves_ends_its_request_at_the_server(is_answering: bool) -> None:
    """While the answer comes, or before it begins."""
    ended: list[str] = []

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            while True:
                yield b"more"
                await asyncio.sleep(0.001)

        async def aclose(self) -> None:
            ended.append("answer")

    async def answer(request: httpx.Request) -> httpx.Response:
        try:
            await asyncio.sleep(0 if is_answering else 60)
        except asyncio.CancelledError:
            ended.append("request")
            raise
        return httpx.Response(200, stream=Endless())

    async def check() -> None:
        router, has_body, sent = Router(["http://a"], [], httpx.MockTransport(answer)), asyncio.Event(), [False]

        async def receive() -> dict[str, Any]:
            if not sent[0]:
                sent[0] = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await (has_body.wait() if is_answering else asyncio.sleep(0.05))
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message.get("body"):
                has_body.set()

        scope = {"type": "http", "method": "GET", "query_string": b"", "headers": []}
        scope |= {"path": "/v1/models", "raw_path": b"/v1/models"}
        await asyncio.wait_for(router.app(scope, receive, send), 10)
        assert ended == ["answer" if is_answering else "request"]
        assert router.servers[0].num_open == 0

    asyncio.run(check())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["serve", "--role", "prefill"], "role and peer belong together"),
        (["serve", "--role", "both", "--peer", "a:1"], "role must be one of prefill, decode"),
        (["serve", "--peer-seconds", "0"], "peer_seconds must be above 0"),
        (["serve", "--port", "0", "--role", "prefill", "--peer", "0.0.0.0:1"], "set FOLOVLLM_PEER_SECRET"),
        (["serve", "--port", "0", "--role", "decode", "--peer", "nowhere"], "peer must be HOST:PORT"),
        (["serve", "stories-hybrid", "--port", "0", "--role", "decode", "--peer", "a:1"], "do not travel"),
        (
            ["serve", "--milestone", "m3", "--port", "0", "--role", "decode", "--peer", "a:1"],
            "needs a cache of prefixes",
        ),
        (["route", "--decode", "a:1"], "begins with http://"),
        (["route", "--decode", "http://"], "begins with http:// and names a host"),
        (["route", "--decode", "http://a:65536"], "begins with http:// and names a host"),
        (["route", "--decode", "http://a", "--host", ""], "--host is empty"),
        (["route", "--decode", "http://a", "--port", "65536"], "cannot listen at 127.0.0.1:65536"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_served(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FOLOVLLM_PEER_SECRET", raising=False)
    with pytest.raises(SystemExit):
        main(flags)
    said = capsys.readouterr()
    assert says in " ".join((said.out + said.err).split())


def test_addresses_of_peers() -> None:
    assert address_of("[::1]:80") == ("::1", 80)
    assert address_of("host:0") == ("host", 0)
    for wrong in ("", "host", ":1", "host:", "host:x", "host:65536", "host:-1", "host:²", "a b:1", "host:000001"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            address_of(wrong)
