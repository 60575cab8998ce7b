"""The page, the description and the tokenizer: what `/`, `/openapi.json` and `/tokenizer_info` say is so."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

import pytest
from fastapi.routing import APIRoute
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from folovllm.apps.inspector.page import STATIC
from folovllm.electives.server.app import build_app
from folovllm.electives.server.config import ServerConfig
from folovllm.electives.server.pages import PAGE
from folovllm.electives.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.x1.background import PATIENCE, Background, events_in

QUESTION = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
STORY = {"prompt": "Once", "max_tokens": 8}


@pytest.fixture
def server(keyed_server: Background) -> Background:
    return keyed_server


@pytest.fixture
def described(server: Background) -> dict[str, Any]:
    status, said = server.ask("/openapi.json", Authorization="")
    assert status == 200
    return dict(said)


def check(described: dict[str, Any], where: dict[str, Any], value: Any) -> None:
    """That a value is what the description says: objects in answers have what is listed and nothing else."""
    closed = {
        name: {"additionalProperties": False, **schema} for name, schema in described["components"]["schemas"].items()
    }
    schema = {**where, "components": {"schemas": closed}}
    Draft202012Validator(schema).validate(value)


class TestDescription:
    def test_it_is_openapi(self, described: dict[str, Any]) -> None:
        validate(described)

    def test_every_address_is_there_and_no_other(self, server: Background, described: dict[str, Any]) -> None:
        routes = [
            route
            for route in build_app(server.engine, ServerConfig(api_key=["a-key"])).routes
            if isinstance(route, APIRoute)
        ]
        real = {(route.path_format, method.lower()) for route in routes for method in route.methods - {"HEAD"}}
        assert real == {(path, method) for path, methods in described["paths"].items() for method in methods}

    def test_who_needs_a_key(self, server: Background, described: dict[str, Any]) -> None:
        """As it says: with the key asked for exactly where a request without one is refused."""
        for path, methods in described["paths"].items():
            ((method, operation),) = methods.items()
            status, _ = server.ask(path.replace("{name}", "little"), {} if method == "post" else None, Authorization="")
            assert (status == 401) == ("security" in operation), path
        assert "security" not in json.dumps(build_app(server.engine, ServerConfig()).openapi()["paths"])

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/version", None),
            ("/v1/models", None),
            ("/v1/models/little", None),
            ("/v1/models/other", None),
            ("/tokenizer_info", None),
            ("/tokenize", {"prompt": "Once"}),
            ("/tokenize", {"messages": QUESTION["messages"], "return_token_strs": True}),
            ("/detokenize", {"tokens": [5, 6]}),
            ("/detokenize", {"tokens": [-5]}),
            ("/v1/completions", STORY),
            ("/v1/completions", STORY | {"logprobs": 2, "n": 2}),
            ("/v1/completions", STORY | {"model": "other"}),
            ("/v1/completions", STORY | {"temprature": 1}),
            ("/v1/chat/completions", QUESTION),
            ("/v1/chat/completions", QUESTION | {"logprobs": True, "top_logprobs": 2}),
            ("/v1/chat/completions", b"{"),
            ("/v1/chat/completions", QUESTION | {"cache_salt": "x" * 70_000}),
        ],
    )
    def test_answers_are_what_it_says(
        self, server: Background, described: dict[str, Any], path: str, body: Any
    ) -> None:
        status, said = server.ask(path, body)
        place = re.sub(r"^/v1/models/.*", "/v1/models/{name}", path)
        answer = described["paths"][place]["get" if body is None else "post"]["responses"][
            "200" if status == 200 else "4XX"
        ]
        check(described, answer["content"]["application/json"]["schema"], said)

    @pytest.mark.parametrize(
        ("path", "body"),
        [("/v1/completions", STORY | {"logprobs": 1}), ("/v1/chat/completions", QUESTION | {"logprobs": True})],
    )
    def test_events_are_what_it_says(self, server: Background, described: dict[str, Any], path: str, body: Any) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        _, said = server.ask(path, body | {"stream": True, "stream_options": options})
        events = events_in(said)
        where = described["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
        assert said.endswith("\n\ndata: [DONE]\n\n") and len(events) > 4
        for event in events:
            check(described, where, event)

    def test_requests_are_what_is_read(self, described: dict[str, Any]) -> None:
        """Every field of the types, with what it must be; and of a prompt all its forms."""
        schemas = described["components"]["schemas"]
        for kind in (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest):
            assert tuple(schemas[kind.__name__]["properties"]) == kind.__struct_fields__
        assert "greedy" in schemas["ChatRequest"]["properties"]["temperature"]["description"]
        where = {"$ref": "#/components/schemas/CompletionRequest"}
        for prompt in ("x", ["x", "y"], [1, 2], [[1], [2]]):
            check(described, where, {"prompt": prompt})
        for wrong in ({"prompt": [1, "x"]}, {"prompt": 5}, {}, {"prompt": "x", "n": "2"}):
            with pytest.raises(Exception, match=r"is not valid under|is a required property"):
                check(described, where, wrong)
        where = {"$ref": "#/components/schemas/ChatRequest"}
        check(described, where, {"messages": [{"role": "user", "content": "x", "name": "me"}]})
        with pytest.raises(Exception, match="'role' is a required property"):
            check(described, where, {"messages": [{"content": "x"}]})


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
    style = (STATIC / "house.css").read_text("utf-8")
    assert text == PAGE.read_text("utf-8").replace("/* house.css */\n", style)
    assert "default-src 'none'" in policy and "unsafe" not in policy and "connect-src 'self'" in policy
    assert set(re.findall(r"https?://[\w./]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text
