"""The edges of HTTP, over bare sockets: each odd request gets its answer, and the next client does not notice."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPResponse
from typing import Any

import pytest
from starlette.testclient import TestClient

from folovllm.electives.server.app import build_app
from folovllm.electives.server.config import ServerConfig
from tests.helpers import tiny_checkpoint
from tests.x1.background import PATIENCE, Background, served

FIELDS = {"prompt": "Once", "max_tokens": 2}
BODY = json.dumps(FIELDS).encode()
LONG = FIELDS | {"max_tokens": 400, "ignore_eos": True}
HOST = "Host: localhost\r\n"
MEGABYTE = 1 << 20


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def server(request: pytest.FixtureRequest, tiny_server: Background) -> Iterator[Background]:
    if request.param == "asyncio":
        yield tiny_server
        return
    config = ServerConfig(max_body_size=50_000, inspector=True)
    yield from served(config, loop=request.param, model=str(tiny_checkpoint()), max_model_len=512)


def get(path: str, headers: str = HOST, method: str = "GET", version: str = "1.1") -> bytes:
    return f"{method} {path} HTTP/{version}\r\n{headers}\r\n".encode("latin-1")


def post(body: bytes | dict[str, Any], headers: str = "", path: str = "/v1/completions", version: str = "1.1") -> bytes:
    """A request whose length is said, unless `headers` say how long it is."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    if "Content-Length" not in headers and "chunked" not in headers:
        headers += f"Content-Length: {len(data)}\r\n"
    if "Content-Type" not in headers:
        headers += "Content-Type: application/json\r\n"
    return get(path, HOST + headers, "POST", version) + data


def chunked(data: bytes, size: int) -> bytes:
    """A request whose body comes in chunks, up to the last one, which is left out."""
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    return post(b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces), "Transfer-Encoding: chunked\r\n")


def connect(server: Background, wire: bytes, buffer: int = 1 << 18) -> socket.socket:
    """A connection on which this was sent, and that takes `buffer` bytes unread."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(PATIENCE)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(wire)
    return connection


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def answer(connection: socket.socket, method: str = "POST") -> tuple[int, bytes]:
    """The next answer on a connection; an interim one is passed over."""
    response = HTTPResponse(connection, method=method)
    response.begin()
    return response.status, response.read()


CHAT = "/v1/chat/completions"
CHUNKS = "Transfer-Encoding: chunked\r\n"
NESTED = b'{"a":' * 900 + b"1" + b"}" * 900
ROWS: dict[str, tuple[bytes, int]] = {
    "HTTP/1.0": (post(FIELDS, version="1.0"), 200),
    "HTTP/1.0 without a Host": (get("/health", "", version="1.0"), 200),
    "two Hosts": (get("/health", HOST + HOST), 403),
    "100-continue": (post(FIELDS, "Expect: 100-continue\r\n"), 200),
    "two lengths": (post(BODY, "Content-Length: 5\r\nContent-Length: 7\r\n"), 400),
    "a length and chunks": (post(BODY, f"Content-Length: {len(BODY)}\r\n{CHUNKS}"), 400),
    "a negative length": (post(BODY, "Content-Length: -5\r\n"), 400),
    "absolute form": (get("http://localhost/health"), 200),
    "HEAD": (get("/v1/models", method="HEAD"), 405),
    "OPTIONS": (get("/v1/completions", method="OPTIONS"), 405),
    "OPTIONS *": (get("*", method="OPTIONS"), 404),
    "an unknown method": (get("/health", method="FROB"), 400),
    "percents": (get("/%68ealth"), 200),
    "percents that are none": (get("/%zz"), 404),
    "percents that are no text": (get("/v1/models/%ed%a0%80%00%ff"), 404),
    "a path in Latin-1": (get("/é"), 400),
    "a NUL": (get("/health", HOST + "X: \0\r\n"), 400),
    "a key in Latin-1": (get("/health", HOST + "Authorization: Bearer é\r\n"), 200),
    "TLS": (bytes.fromhex("16030100a5010000a1"), 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "an upgrade": (post(FIELDS, "Connection: Upgrade\r\nUpgrade: h2c\r\n"), 426),
    "another type": (post(BODY, "Content-Type: text/plain\r\n"), 415),
    "gzip": (post(b"\x1f\x8b", "Content-Encoding: gzip\r\n"), 400),
    "10,000 arrays": (post(b"[" * 10_000 + b"]" * 10_000), 400),
    "deep in a field": (post(b'{"prompt":"x","stop":' + NESTED + b"}"), 400),
    "deep in a message": (post(b'{"messages":[{"role":"user","content":' + NESTED + b"}]}", path=CHAT), 400),
    "a key twice": (post(b'{"prompt":"a","prompt":"b","max_tokens":1}'), 200),
    "many small chunks": (chunked(BODY, 1) + b"0\r\n\r\n", 200),
    "60 kB of headers": (get("/health", HOST + "X: y\r\n" * 10_000), 200),
    "20,000 headers": (get("/health", HOST + "X: y\r\n" * 20_000), 431),
    "a header without end": (get("/health", HOST + "X: ").rstrip() + b"y" * 20 * MEGABYTE, 431),
    "a URL of 1 MB": (get("/" + "y" * MEGABYTE), 431),
    "nonsense without end": (b"\0" * MEGABYTE, 400),
    "lines without end": (b"\r\n" * MEGABYTE, 431),
}


@pytest.mark.parametrize("row", ROWS)
def test_odd_requests(server: Background, row: str, caplog: pytest.LogCaptureFixture) -> None:
    """The status, with a sentence if it is a refusal; nothing is thrown, and an innocent request is answered."""
    wire, status = ROWS[row]
    method = wire.partition(b" ")[0].decode("latin-1")
    with connect(server, wire) as connection:
        got, said = answer(connection, method)
        assert got == status, said
        assert got == 200 or method == "HEAD" or len(json.loads(said)["error"]["message"]) > 10
    with connect(server, post(FIELDS)) as connection:
        assert answer(connection)[0] == 200, "the next client was not answered"
    assert not [record for record in caplog.records if record.exc_info], "nothing is thrown"


BEHIND = {"nonsense": b"\0\r\n\r\n", "a request": get("/health")}  # a stream that runs
UNFINISHED = {"trailer": b"0\r\nX: ", "extension": b"5;", "size": b"x\r\n"}  # bodies: they end in no good chunk


@pytest.mark.parametrize("case", [*BEHIND, *UNFINISHED])
def test_what_comes_before_the_answer_ends_the_connection(
    server: Background, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The request ends, and the next client is answered."""
    with connect(server, post(LONG | {"stream": True}) if case in BEHIND else chunked(BODY, 99)) as connection:
        assert case not in BEHIND or connection.recv(1)
        with suppress(OSError):
            connection.sendall(BEHIND.get(case) or UNFINISHED[case] + b"y" * MEGABYTE)
            read_all(connection)
    server.wait_until_idle()
    assert not [record for record in caplog.records if record.exc_info], "nothing is thrown"
    with connect(server, post(FIELDS)) as connection:
        assert answer(connection)[0] == 200


def test_refused_but_still_sending(server: Background, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after a refusal is dropped, so that the client can read it; then the connection is closed."""
    monkeypatch.setattr("folovllm.electives.server.listener.LAST_SECONDS", 0.05)
    with connect(server, b"GET / HTTP/1.1\r\nX: " + b"y" * MEGABYTE) as connection:
        begun = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - begun < PATIENCE:
                connection.sendall(b"y" * 1000)
                time.sleep(0.01)


def test_blank_lines_behind_an_answer(server: Background, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that begin no request keep a connection no longer than a head without end does."""
    monkeypatch.setattr("folovllm.electives.server.listener.HEADER_SECONDS", 0.2)
    with connect(server, get("/health")) as connection:
        said = connection.recv(1 << 16)
        connection.sendall(b"\r\n")
        said += read_all(connection)
    assert said.count(b"HTTP/1.1 ") == 1 and said.startswith(b"HTTP/1.1 200")


OPEN, NAMED = ServerConfig(), ServerConfig(host="gpu-box", allowed_host=["Proxy.example"])
KEYED, ANY = ServerConfig(api_key=["k"]), ServerConfig(allowed_host=["*"])
CORS = ServerConfig(cors_origin=["https://App.example"])
EVERYBODY = ServerConfig(cors_origin=["*"])


@pytest.mark.parametrize(
    ("config", "headers", "status"),
    [
        (OPEN, {"Host": "localhost:8000"}, 200),
        (OPEN, {"Host": socket.gethostname().upper()}, 200),
        (OPEN, {"Host": "192.168.1.7:8000"}, 200),
        (OPEN, {"Host": "[::1]:8000"}, 200),
        (OPEN, {"Host": "evil.example"}, 403),
        (OPEN, {"Host": "127.0.0.1.evil.example"}, 403),
        (OPEN, {"Host": ""}, 403),
        (OPEN, {"Host": "evil.example", "Origin": "http://evil.example"}, 403),
        (OPEN, {"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
        (OPEN, {"Host": "localhost:8000", "Origin": "http://localhost:3000"}, 403),
        (OPEN, {"Host": "localhost:8000", "Origin": "null"}, 403),
        (NAMED, {"Host": "gpu-box"}, 200),
        (NAMED, {"Host": "proxy.example:80"}, 200),
        (NAMED, {"Host": "evil.example"}, 403),
        (ANY, {"Host": "anything.example"}, 200),
        (KEYED, {"Host": "anything.example"}, 200),
        (KEYED, {"Host": "localhost", "Origin": "http://evil.example"}, 403),
        (CORS, {"Host": "localhost", "Origin": "https://app.example"}, 200),
        (CORS, {"Host": "localhost", "Origin": "https://evil.example"}, 403),
        (CORS, {"Host": "evil.example", "Origin": "https://app.example"}, 403),
        (EVERYBODY, {"Host": "localhost", "Origin": "https://anything.example"}, 200),
    ],
)
def test_who_may_ask(server: Background, config: ServerConfig, headers: dict[str, str], status: int) -> None:
    """At all addresses alike; a refusal names the flag that helps."""
    client = TestClient(build_app(server.engine, config))
    for path in ("/", "/version", "/v1/models", "/nowhere"):
        response = client.get(path, headers=headers | {"Authorization": "Bearer k"})
        assert response.status_code == (404 if (status, path) == (200, "/nowhere") else status)
        if status == 403:
            error = response.json()["error"]
            flag = {"unknown_host": "--allowed-host", "other_origin": "--cors-origin"}[error["code"]]
            assert flag in error["message"] and error["type"] == "permission_error"
        elif config.cors_origin:
            assert response.headers["Access-Control-Allow-Origin"] in ("*", headers["Origin"])
