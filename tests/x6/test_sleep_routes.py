"""A server with `--enable-sleep-mode` has vLLM's three addresses. (`tests/x1/test_addresses.py` knows that without it there are none of them.)"""

from __future__ import annotations

import pytest

pytest.importorskip("folovllm.server.app")
from folovllm.server.config import ServerConfig
from tests.x1.background import Background


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_a_server_sleeps_and_wakes(transport: str) -> None:
    story = {"prompt": "Once", "max_tokens": 8, "temperature": 0}
    config = ServerConfig(enable_sleep_mode=True)
    with Background(config, transport=transport, max_model_len=256, num_kv_blocks=64, device="cpu") as server:
        status, before = server.ask("/v1/completions", story)
        assert status == 200
        assert server.ask("/is_sleeping") == (200, {"is_sleeping": False})
        for level in (1, 2):
            assert server.ask(f"/sleep?level={level}", method="POST") == (200, "")
            assert server.ask("/is_sleeping") == (200, {"is_sleeping": True})
            status, said = server.ask("/v1/completions", story)
            assert status == 400
            assert "wake it up first" in said["error"]["message"]
            assert server.ask("/wake_up", method="POST") == (200, "")
            status, after = server.ask("/v1/completions", story)
            assert after["choices"] == before["choices"]
        assert server.ask("/sleep?level=deep", method="POST")[0] == 400
        assert server.ask("/wake_up", method="POST")[0] == 400
