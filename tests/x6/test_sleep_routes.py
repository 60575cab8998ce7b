"""A server with `--enable-sleep-mode` has vLLM's three addresses. (`tests/x1/test_addresses.py` knows that without it there are none of them.)"""

import http.client
import json

import pytest

pytest.importorskip("folovllm.electives.server.app")
from folovllm.electives.server.config import ServerConfig
from tests.x1.background import PATIENCE, Background

STORY = {"prompt": "Once", "max_tokens": 8, "temperature": 0}


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("transport", ["thread", "process"])
def test_a_server_sleeps_and_wakes(transport: str) -> None:
    config = ServerConfig(enable_sleep_mode=True)
    with Background(config, transport=transport, max_model_len=256, num_kv_blocks=64, device="cpu") as server:

        def post(path: str, body: object = None) -> tuple[int, str]:
            """The status, and the sentence of a refusal."""
            status, said = server.ask(path, body, method="POST")
            return status, said and said["error"]["message"]

        _, before = server.ask("/v1/completions", STORY)
        assert server.ask("/is_sleeping") == (200, {"is_sleeping": False})
        apart, both = ["?tags=weights", "?tags=kv_cache"], ["?tags=kv_cache&tags=weights"]
        for level, parts in ((1, [""]), (2, [""]), (2, apart), (1, both)):
            assert post(f"/sleep?level={level}") == (200, "")
            assert server.ask("/health")[0] == 200
            for tags in parts:
                assert server.ask("/is_sleeping") == (200, {"is_sleeping": True})
                for stream in (False, True):
                    status, said = server.ask("/v1/completions", STORY | {"stream": stream})
                    assert status == 503 and "wake it up first" in said["error"]["message"]
                assert post(f"/wake_up{tags}") == (200, "")
            status, after = server.ask("/v1/completions", STORY)
            assert status == 200 and after["choices"] == before["choices"]
        for path, body, says in (
            ("/sleep?level=deep", None, "level must be 1 or 2"),
            ("/sleep?level=1&level=2", None, "level must be 1 or 2, given once, not '1' and '2'"),
            ("/sleep?level=1&level=1", None, "given once"),
            ("/wake_up?tags=weights&tags=wheels", None, "tags must be among weights, kv_cache"),
            ("/sleep?lvl=2", None, "unknown field 'lvl': this address has level"),
            ("/sleep", {"level": 2}, "takes no body"),
            ("/wake_up?tag=weights", None, "unknown field 'tag': this address has tags"),
            ("/wake_up?tags=wheels", None, "tags must be among weights, kv_cache"),
            ("/wake_up", None, "does not sleep"),
        ):
            status, said = post(path, body)
            assert status == 400 and says in said
        assert server.ask("/is_sleeping") == (200, {"is_sleeping": False})


def test_requests_that_run_keep_it_awake() -> None:
    """What a client is told is for clients: nothing of steps."""
    with Background(ServerConfig(enable_sleep_mode=True), max_model_len=4096) as server:
        running = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        body = json.dumps(STORY | {"max_tokens": 4000, "stream": True, "ignore_eos": True})
        running.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        running.getresponse().read(1)
        status, said = server.ask("/sleep", method="POST")
        assert status == 409 and said["error"]["message"].startswith("requests are being answered: wait")
        running.close()
        server.wait_until_idle()
