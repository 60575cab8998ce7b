"""What a server with `--role` does beside its engine. `folovllm.plugins` names `role`."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from folovllm.electives.kv_transfer.decode import PrefillClient
from folovllm.electives.kv_transfer.prefill import Engine, PrefillServer
from folovllm.request import Request

SECRET = "FOLOVLLM_PEER_SECRET"
LOCAL = "localhost", "127.0.0.1", "::1"  # only this machine can reach them
Bring = Callable[[Request], Awaitable[None]]


@asynccontextmanager
async def role(engine: Engine, name: str, peer: str, seconds: float) -> AsyncIterator[Bring | None]:
    """Run a role beside an engine: "prefill" computes prompts for others, who connect at `peer`; "decode" has them computed there.

    Yields:
        What a request waits for before it is queued; None: nothing.

    Raises:
        ValueError: the address is none, or another than this machine's own without a secret; or the engine's K/V cannot travel.
    """
    (host, port), secret = address_of(peer), os.environ.get(SECRET, "").encode()
    if name == "prefill" and not secret and host not in LOCAL:
        raise ValueError(f"whoever reaches {peer} could read prompts: set {SECRET} to a secret, or give 127.0.0.1:PORT")
    side: PrefillServer | PrefillClient
    if name == "prefill":
        side, bring = PrefillServer(engine, secret), None
        print(f"computing prompts for peers at {host}:{await side.start(host, port)}", flush=True)
    else:
        side = PrefillClient(engine, host, port, secret, seconds)
        await side.start()
        bring = side.bring
    try:
        yield bring
    finally:
        await side.close()


def address_of(peer: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT"; a host with colons stands in brackets. Raises ValueError for another form."""
    host, colon, port = peer.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not re.fullmatch(r"[\w.:%-]+", host) or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError(f"peer must be HOST:PORT, not {peer!r}")
    return host, int(port)
