"""What `/openapi.json` says of the JSON that msgspec's types read and write. The rest of the document is FastAPI's."""

from __future__ import annotations

from typing import Any

import msgspec

from folovllm.apps.cli.flags import described_fields
from folovllm.electives.server import replies
from folovllm.electives.server.errors import ErrorBody
from folovllm.electives.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from folovllm.sampling_params import SamplingParams

Completion = replies.CompletionResponse[replies.CompletionChoice]
Chat, ChatChunk = replies.CompletionResponse[replies.ChatChoice], replies.CompletionResponse[replies.ChatDelta]
TYPES = (
    ErrorBody, CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest, Completion, Chat, ChatChunk,
    replies.Version, replies.ModelList, replies.ModelCard, replies.Tokens, replies.Detokenized, replies.TokenizerInfo,
)  # fmt: skip
STRANGERS = (
    "A field that is not listed is refused with its name, unless the server runs with --ignore-unknown-fields, or it is one "
    "that other servers' clients send and that asks for nothing here (`user`, `metadata`, `store`)."
)
EVENTS = (
    "With `stream`: server-sent events, each with this in its `data`; an error may be the last; then `data: [DONE]`."
)
REFERENCES, SCHEMAS = msgspec.json.schema_components(TYPES, ref_template="#/components/schemas/{name}")


def content_of(kind: Any, media_type: str = "application/json") -> dict[str, Any]:
    """A body of this type, as a document describes it."""
    return {media_type: {"schema": REFERENCES[TYPES.index(kind)]}}


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request cannot be served.", "content": content_of(ErrorBody)},
    "5XX": {"description": "The server failed, or its engine has ended or sleeps.", "content": content_of(ErrorBody)},
}


def json_route(returns: Any, takes: type | None = None, streams: Any = None) -> dict[str, Any]:
    """The options of a FastAPI route that returns JSON of this type, or events with `streams`, for a body of type `takes`."""
    good: dict[str, Any] = {"description": "The answer.", "content": content_of(returns)}
    if streams is not None:
        good = {"description": EVENTS, "content": good["content"] | content_of(streams, "text/event-stream")}
    options: dict[str, Any] = {"responses": {200: good} | ERRORS}
    if takes is not None:
        options["openapi_extra"] = {"requestBody": {"required": True, "content": content_of(takes)}}
    return options


def schemas() -> dict[str, Any]:
    """The schemas of all types, with the sentences of `SamplingParams` at the fields that have its names."""
    for kind in (CompletionRequest, ChatRequest):
        schema = SCHEMAS[kind.__name__]
        schema["description"] = f"{kind.__doc__} {STRANGERS}"
        for field, sentence in described_fields(SamplingParams):
            if field.name in schema["properties"]:
                schema["properties"][field.name]["description"] = sentence
    return SCHEMAS
