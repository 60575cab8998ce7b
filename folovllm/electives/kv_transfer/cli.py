"""`folovllm route`: the command."""

from __future__ import annotations

import re
import socket
from typing import Annotated

import typer

URL = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:[0-9]{1,5})?(/[^\s?#]*)?", re.ASCII)


def route(
    decode: Annotated[list[str], typer.Option(help="URL of a server with --role decode; several may be given.")],
    prefill: Annotated[
        list[str] | None, typer.Option(help="URL of one with --role prefill: it answers if no other can.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.")] = 8080,
) -> None:
    """Pass requests of OpenAI's API on to servers that answer, and back.

    A decode server has its prompts computed by the prefill server that its --peer names.
    """
    try:
        import uvicorn

        from folovllm.electives.kv_transfer.router import Router
    except ModuleNotFoundError as error:
        raise ValueError(f'{error.name} is not installed: pip install "folovllm[serve]" brings it') from error
    for url in (*decode, *(prefill or ())):
        if not (found := URL.fullmatch(url)) or int((found[2] or ":0")[1:]) > 65535:
            raise ValueError(f"a server's URL begins with http:// and names a host, and perhaps a port, unlike {url!r}")
    if not host:
        raise ValueError("--host is empty: name an address of this machine; 0.0.0.0 is all of them")
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ValueError(f"cannot listen at {host}:{port} ({error}): choose another --port or --host") from error
    print(f"routing at http://{host}:{port}/v1 to {', '.join(decode)} (Ctrl-C ends it)", flush=True)
    app = Router(decode, prefill or []).app
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])


def add_to(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(route)
