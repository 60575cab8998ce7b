"""A server with `--enable-sleep-mode` has vLLM's three addresses; without it, none of them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

pytest.importorskip("folovllm.server.app")
from folovllm.server.config import ServerConfig
from tests.x1.background import PATIENCE, Background


def ask(server: Background, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and body of a response."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            status, said = response.status, response.read()
    except urllib.error.HTTPError as error:
        status, said = error.code, error.read()
    return status, json.loads(said) if said else None


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_a_server_sleeps_and_wakes(transport: str) -> None:
    story = {"prompt": "Once", "max_tokens": 8, "temperature": 0}
    config = ServerConfig(enable_sleep_mode=True)
    with Background(config, transport=transport, max_model_len=256, num_kv_blocks=64, device="cpu") as server:
        status, before = ask(server, "POST", "/v1/completions", story)
        assert status == 200
        assert ask(server, "GET", "/is_sleeping") == (200, {"is_sleeping": False})
        for level in (1, 2):
            assert ask(server, "POST", f"/sleep?level={level}") == (200, None)
            assert ask(server, "GET", "/is_sleeping") == (200, {"is_sleeping": True})
            status, said = ask(server, "POST", "/v1/completions", story)
            assert status == 400
            assert "wake it up first" in said["error"]["message"]
            assert ask(server, "POST", "/wake_up") == (200, None)
            status, after = ask(server, "POST", "/v1/completions", story)
            assert after["choices"] == before["choices"]
        assert ask(server, "POST", "/sleep?level=deep")[0] == 400
        assert ask(server, "POST", "/wake_up")[0] == 400


def test_without_the_flag_there_is_no_such_address() -> None:
    with Background(ServerConfig(), max_model_len=256, num_kv_blocks=64, device="cpu") as server:
        assert ask(server, "POST", "/sleep")[0] == 404
