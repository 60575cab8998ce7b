"""What `/`, `/openapi.json` and `/tokenizer_info` say is so."""

from __future__ import annotations

import json
import re
import urllib.request

import pytest
from fastapi.routing import APIRoute
from openapi_spec_validator import validate

from folovllm.apps.inspector.page import STATIC
from folovllm.electives.server.app import CHAT, build_app
from folovllm.electives.server.config import ServerConfig
from folovllm.electives.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.x1.background import PATIENCE, Background


@pytest.fixture
def server(keyed_server: Background) -> Background:
    return keyed_server


def test_the_description(server: Background) -> None:
    """It is OpenAPI, has every address and no other, says where a key is needed, and of each body what is read."""
    status, described = server.ask("/openapi.json", Authorization="")
    validate(described)
    routes = [route for route in build_app(server.engine, ServerConfig()).routes if isinstance(route, APIRoute)]
    real = {(route.path_format, method.lower()) for route in routes for method in route.methods}
    assert status == 200
    assert real == {(path, method) for path, methods in described["paths"].items() for method in methods}
    for path, methods in described["paths"].items():
        ((method, operation),) = methods.items()
        status, _ = server.ask(path.replace("{name}", "little"), {} if method == "post" else None, Authorization="")
        assert (status == 401) == ("security" in operation), path
        assert ("requestBody" in operation) == (method == "post")
    for kind in (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest):
        assert tuple(described["components"]["schemas"][kind.__name__]["properties"]) == kind.__struct_fields__


def test_the_tokenizer(server: Background) -> None:
    """What a client needs to make prompts itself; and no path of the server's machine."""
    info, tokenizer = server.ask("/tokenizer_info")[1], server.engine.tokenizer
    assert info["chat_template"] == tokenizer.chat_template and info["vocab_size"] == len(tokenizer) == 4096
    assert (info["eos_token"], info["pad_token"], info["bos_token"]) == ("<|im_end|>", "<|endoftext|>", None)
    assert info["added_tokens_decoder"]["1"]["content"] == "<|im_start|>" == info["extra_special_tokens"][0]
    assert str(server.engine.setup.path) not in json.dumps(info)


def test_the_page_and_its_policy(server: Background) -> None:
    """The browser is held to what the page needs, and the page names no address but its own."""
    with urllib.request.urlopen(server.url, timeout=PATIENCE) as response:
        text, policy = response.read().decode(), response.headers["Content-Security-Policy"]
        assert response.headers["Content-Type"].startswith("text/html")
    (nonce,) = set(re.findall(r"'nonce-([^']+)'", policy))
    style = (STATIC / "house.css").read_text("utf-8")
    assert text.replace(f' nonce="{nonce}"', "") == CHAT.read_text("utf-8").replace("/* house.css */\n", style)
    assert "default-src 'none'" in policy and "unsafe" not in policy and "connect-src 'self'" in policy
    assert set(re.findall(r"https?://[\w./]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text
