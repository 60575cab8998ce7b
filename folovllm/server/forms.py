"""Which form the answer to a request must have: by `response_format`, `structured_outputs`, or tools that must be called."""

from __future__ import annotations

from typing import Any

from folovllm.server.errors import ApiError
from folovllm.server.protocol import ChatRequest, Sampling
from folovllm.server.tools import call_grammar, must_call, offered
from folovllm.structured_outputs import StructuredOutputsParams

FORMATS = (
    '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'
)


def form_of(request: Sampling) -> StructuredOutputsParams | None:
    """The form, or None where the answer is free. Raises ApiError for an unknown form, or for two forms."""
    form = _of_format(request.response_format)
    if request.structured_outputs is not None:
        if form is not None:
            raise ApiError(400, "response_format and structured_outputs: give one of them", "structured_outputs")
        form = made(request.structured_outputs, "structured_outputs")
    if not isinstance(request, ChatRequest) or not (tools := offered(request.tools, request.tool_choice)):
        return form
    several = request.parallel_tool_calls is not False
    if must_call(request.tool_choice):
        return StructuredOutputsParams(grammar=call_grammar(tools, request.tool_choice, several))
    if form is not None and request.response_format is not None:  # a document, or a call
        return StructuredOutputsParams(grammar=call_grammar(tools, request.tool_choice, several, form.schema()))
    return form


def _of_format(given: dict[str, Any] | None) -> StructuredOutputsParams | None:
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    described = given.get("json_schema")
    if kind != "json_schema" or not isinstance(described, dict) or not isinstance(described.get("schema"), dict | bool):
        raise ApiError(400, f"response_format must be {FORMATS}", "response_format")
    strict = described.get("strict")
    return made({"json": described["schema"], "strict": False if strict is None else strict}, "response_format")


def made(fields: dict[str, Any], param: str) -> StructuredOutputsParams:
    """The form that a request describes. Raises ApiError that names `param`."""
    try:
        return StructuredOutputsParams(**fields)
    except TypeError as error:
        raise ApiError(400, f"{param}: unknown field {str(error).split()[-1]}", param) from error
    except ValueError as error:
        raise ApiError(400, str(error), param) from error
