"""Answers of a server that speaks OpenAI's API, for `folovllm chat --server`. The standard library is enough."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from folovllm.cli.flags import pick
from folovllm.config import EngineConfig
from folovllm.engine.ctrl_c import ctrl_c

CONNECT_SECONDS = 10.0


class ServerError(ValueError):
    """There is no server, or it has ended. The conversation is not to blame."""


class Server:
    """A server's model, as `folovllm.cli.conversation.Chat` talks to it.

    Args:
        url: `http://host:port`, with `/v1` or without.
        api_key: what the server wants to see, if anything.
        fields: of each request, beside the messages: `temperature`, `max_tokens`, ...
        model: one of the server's names; None takes the first.

    Raises:
        ValueError: the address is none, nobody answers there, or it wants another key.
    """

    def __init__(
        self, url: str, api_key: str | None = None, fields: dict[str, Any] | None = None, model: str | None = None
    ) -> None:
        self.url = url if "://" in url else f"http://{url}"
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url} is no address of a server: give one such as http://127.0.0.1:8000")
        self._make = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.name = model or self._first_model()
        self._fields = {**(fields or {}), "model": self.name}

    def _first_model(self) -> str:
        connection = self._connect()
        try:
            response = self._ask(connection, "GET", "/models")
            return str(json.load(response)["data"][0]["id"])
        except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
            raise ServerError(f"what answers at {self.url} is not a server with OpenAI's API") from error
        finally:
            connection.close()

    def stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """The new text of each event, until the answer ends. Ctrl-C closes the connection, and the server ends its work.

        Raises:
            ServerError: the server is not there, or its answer breaks off.
            ValueError: it refuses, and says why.
        """
        connection = self._connect()
        body = json.dumps({**self._fields, "messages": messages, "stream": True})
        with ctrl_c() as interrupted:
            try:
                yield from texts(self._ask(connection, "POST", "/chat/completions", body))
            except ServerError:
                if not interrupted.is_set():
                    raise
            finally:
                connection.close()

    def _connect(self) -> HTTPConnection:
        connection = self._make(self._host, self._port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except OSError as error:
            reason = error.strerror or error
            raise ServerError(f"no server answers at {self.url} ({reason}): start one with folovllm serve") from error
        connection.sock.settimeout(None)  # the first token of a long prompt takes its time
        return connection

    def _ask(self, connection: HTTPConnection, method: str, path: str, body: str | None = None) -> HTTPResponse:
        """The response to a request that was not refused."""
        try:
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
            said = b"" if response.status == 200 else response.read()
        except (OSError, HTTPException) as error:
            raise ServerError(f"the server at {self.url} ended the connection") from error
        if response.status != 200:
            raise refusal(response.status, said)
        return response


def server_of_flags(url: str, api_key: str | None, fields: dict[str, Any], given: dict[str, Any]) -> Server:
    """The server of a command line: `fields` are the sampling flags, `given` all flags.

    Raises:
        ValueError: as `Server`, and for flags that say how an engine is built: the server's was built before.
    """
    local = [*(pick(given, EngineConfig).keys() - {"model", "seed"}), *({"logprobs", "detokenize"} & fields.keys())]
    if local:
        flags = ", ".join("--" + name.replace("_", "-") for name in sorted(local))
        raise ValueError(f"with --server the engine is the server's own: leave out {flags}")
    key = api_key or os.environ.get("FOLOVLLM_API_KEY", "").partition(",")[0]
    return Server(url, key, fields, given["model"])


def hang_up(connection: HTTPConnection) -> None:
    """Wake the thread that reads from the connection. (To close it would not.)"""
    if connection.sock is not None:
        with suppress(OSError):  # it has ended already
            connection.sock.shutdown(socket.SHUT_RDWR)


def texts(response: HTTPResponse) -> Iterator[str]:
    """The text in each server-sent event of a stream, up to its end. An event's data is one line, as servers of this API write it."""
    cut_off = ServerError("the server ended the connection before the answer was over")
    try:
        for line in response:
            if not line.startswith(b"data:"):
                continue
            if (data := line[5:].strip()) == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise ServerError(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""
    except (OSError, HTTPException) as error:
        raise cut_off from error
    raise cut_off


def refusal(status: int, said: bytes) -> ValueError:
    """The error in a response: the client's fault below 500."""
    try:
        message = json.loads(said)["error"]["message"]
    except (KeyError, TypeError, ValueError):
        message = f"the server answered with status {status}"
    return ValueError(message) if status in (400, 413) else ServerError(message)
