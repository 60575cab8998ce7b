"""What `/openapi.json` says of the JSON that msgspec's types read and write. The rest of the document is FastAPI's."""

from __future__ import annotations

from typing import Any

import msgspec

from folovllm.apps.cli.flags import described_fields
from folovllm.electives.server import protocol, replies
from folovllm.electives.server.errors import ErrorBody
from folovllm.sampling_params import SamplingParams

TYPES = (
    ErrorBody, protocol.CompletionRequest, protocol.ChatRequest, protocol.TokenizeRequest, protocol.DetokenizeRequest,
    replies.CompletionResponse, replies.ChatResponse, replies.ChatChunk, replies.Version, replies.ModelList,
    replies.ModelCard, replies.Tokens, replies.Detokenized, dict[str, Any],
)  # fmt: skip
STRANGERS = (
    "A field that is not listed is refused with its name, unless the server runs with --ignore-unknown-fields, or it is one "
    "that other servers' clients send and that asks for nothing here (`user`, `metadata`, `store`)."
)
EVENTS = (
    "With `stream`: server-sent events, each with this in its `data`; an error may be the last; then `data: [DONE]`."
)
REFERENCES, SCHEMAS = msgspec.json.schema_components(TYPES, ref_template="#/components/schemas/{name}")


def described(sentence: str, kind: Any, streams: Any = None) -> dict[str, Any]:
    """A body of JSON of this type, or events of type `streams`, as a document describes it."""
    types = {"application/json": kind} | ({} if streams is None else {"text/event-stream": streams})
    content = {name: {"schema": REFERENCES[TYPES.index(type_)]} for name, type_ in types.items()}
    return {"description": sentence, "content": content}


def json_route(returns: Any, takes: type | None = None, streams: Any = None) -> dict[str, Any]:
    """The options of a FastAPI route that returns JSON of this type, or events with `streams`, for a body of type `takes`."""
    options: dict[str, Any] = {
        "responses": {
            200: described("The answer." if streams is None else EVENTS, returns, streams),
            "4XX": described("The request cannot be served.", ErrorBody),
            "5XX": described("The server failed, or its engine has ended or sleeps.", ErrorBody),
        }
    }
    if takes is not None:
        options["openapi_extra"] = {"requestBody": {"required": True} | described("", takes)}
    return options


def schemas() -> dict[str, Any]:
    """The schemas of all types, with the sentences of `SamplingParams` at the fields that have its names."""
    for kind in (protocol.CompletionRequest, protocol.ChatRequest):
        schema = SCHEMAS[kind.__name__]
        schema["description"] = f"{kind.__doc__} {STRANGERS}"
        for field, sentence in described_fields(SamplingParams):
            if field.name in schema["properties"]:
                schema["properties"][field.name]["description"] = sentence
    return SCHEMAS
