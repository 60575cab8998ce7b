"""Every address of the server, what it takes and what it returns; and `/openapi.json`, which describes them. The types of `protocol.py` and `replies.py` describe themselves."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec

import folovllm
from folovllm.cli.flags import described_fields
from folovllm.sampling_params import SamplingParams
from folovllm.server import replies
from folovllm.server.errors import ErrorBody
from folovllm.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

HTML, TEXT, NOTHING = "text/html", "text/plain", ""
BODY = (400, 408, 413, 415, 426)  # what may be wrong with a request that has one


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address, and the method of `Api` that answers. `returns` is a type of JSON, or the media type of what is no JSON."""

    path: str
    handler: str
    does: str
    returns: Any
    takes: type | None = None  # JSON in the body of a POST; a GET has none
    streams: Any = None  # what each event of a stream holds
    errors: tuple[int, ...] = ()
    is_open: bool = False  # to those without a key, too


ENDPOINTS = (
    Endpoint("/", "page", "A page to chat in a browser.", HTML, is_open=True),
    Endpoint("/health", "health", "Whether new requests are taken.", NOTHING, errors=(503,), is_open=True),
    Endpoint("/version", "version", "The version of this server.", replies.Version, is_open=True),
    Endpoint("/openapi.json", "openapi", "This description.", dict[str, Any], is_open=True),
    Endpoint("/metrics", "metrics", "Figures for Prometheus.", TEXT, is_open=True),
    Endpoint("/v1/models", "models", "The model, by all its names.", replies.ModelList),
    Endpoint("/v1/models/{name}", "model", "One of its names.", replies.ModelCard, errors=(404,)),
    Endpoint(
        "/v1/completions", "completions", "Continue prompts.", replies.Answer[replies.CompletionChoice],
        CompletionRequest, streams=replies.Answer[replies.CompletionChoice], errors=(*BODY, 404, 429, 503),
    ),
    Endpoint(
        "/v1/chat/completions", "chat", "Answer a conversation.", replies.Answer[replies.ChatChoice],
        ChatRequest, streams=replies.Answer[replies.ChatDelta], errors=(*BODY, 404, 429, 503),
    ),
    Endpoint("/tokenize", "tokenize", "The ids of a prompt or a conversation.", replies.Tokens, TokenizeRequest, errors=(*BODY, 404, 503)),
    Endpoint("/detokenize", "detokenize", "The text of ids.", replies.Detokenized, DetokenizeRequest, errors=(*BODY, 404, 503)),
    Endpoint("/tokenizer_info", "tokenizer_info", "How texts become ids.", replies.TokenizerInfo),
)  # fmt: skip
STRANGERS = (
    "A field that is not listed is refused with its name, unless the server runs with --ignore-unknown-fields, or it is one "
    "that other servers' clients send and that asks for nothing here (`user`, `metadata`, `store`)."
)
EVENTS = (
    "With `stream`: server-sent events, each with this in its `data`; an error may be the last; then `data: [DONE]`."
)


@cache
def document(needs_key: bool) -> bytes:
    """The description as JSON, after OpenAPI 3.1.0. `needs_key`: the server was started with keys."""
    kinds = dict.fromkeys(
        [ErrorBody, *(kind for each in ENDPOINTS for kind in (each.takes, each.returns, each.streams))]
    )
    named = [kind for kind in kinds if kind is not None and not isinstance(kind, str)]
    references, schemas = msgspec.json.schema_components(named, ref_template="#/components/schemas/{name}")
    refer = {str(kind): reference for kind, reference in zip(named, references, strict=True)}
    for kind in (CompletionRequest, ChatRequest):
        describe(schemas[kind.__name__])
    paths: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for endpoint in ENDPOINTS:
        paths[endpoint.path]["post" if endpoint.takes else "get"] = operation(endpoint, refer, needs_key)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "FoloVLLM",
                "version": folovllm.__version__,
                "description": "OpenAI's API, and a little more.",
            },
            "paths": paths,
            "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        }
    )


def describe(schema: dict[str, Any]) -> None:
    """Add the sentences of `SamplingParams` to the fields that have its names."""
    schema["description"] += " " + STRANGERS
    for field, sentence in described_fields(SamplingParams):
        if field.name in schema["properties"]:
            schema["properties"][field.name]["description"] = sentence


def operation(endpoint: Endpoint, refer: dict[str, Any], needs_key: bool) -> dict[str, Any]:
    """One address with one method."""

    def schema(kind: Any) -> dict[str, Any]:
        return {"schema": refer[str(kind)]}

    returns = endpoint.returns
    content: dict[str, Any] = {returns: {}} if isinstance(returns, str) else {"application/json": schema(returns)}
    good: dict[str, Any] = {"description": endpoint.does}
    if endpoint.streams is not None:
        content["text/event-stream"] = schema(endpoint.streams)
        good["description"] += " " + EVENTS
    if returns != NOTHING:
        good["content"] = content
    errors = sorted({*endpoint.errors, 403, 500} | (set() if endpoint.is_open else {401}))
    described: dict[str, Any] = {"summary": endpoint.does, "responses": {"200": good}}
    for status in errors:
        phrase = HTTPStatus(status).phrase
        described["responses"][str(status)] = {
            "description": phrase,
            "content": {"application/json": schema(ErrorBody)},
        }
    if endpoint.takes:
        described["requestBody"] = {"required": True, "content": {"application/json": schema(endpoint.takes)}}
    if "{name}" in endpoint.path:
        described["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if needs_key and not endpoint.is_open:
        described["security"] = [{"key": []}]
    return described
