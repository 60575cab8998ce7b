"""Messages of a conversation, as clients send them."""

from __future__ import annotations

import json
from typing import Any

from folovllm.server.errors import ApiError

A_CALL = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": "a JSON object, as text"}}'


def checked(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is text, as a text or in parts, as templates want it."""
    if not isinstance(message.get("role"), str):
        raise ApiError(400, 'each message needs a role: {"role": "user", "content": "..."}', "messages")
    for name in ("function_call", "audio"):
        if message.get(name):
            raise ApiError(400, f"{name} in a message is not supported by this server: leave it out", "messages")
    content = message.get("content")
    if not isinstance(content, str | list | None):
        raise ApiError(400, "the content of a message must be a text, or a list of text parts", "messages")
    told = {name: value for name, value in message.items() if name != "tool_calls"}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise ApiError(400, f"tool_calls in a message must be a list of {A_CALL}", "messages")
        told["tool_calls"] = [_checked_call(call) for call in calls]
    if content is None and message["role"] != "assistant":
        raise ApiError(
            400, f"a message of {message['role']!r} needs content: a text, or a list of text parts", "messages"
        )
    return {**told, "content": "" if content is None else content}


def _checked_call(call: Any) -> dict[str, Any]:
    """A call whose arguments are an object: templates write it their own way."""
    try:
        function = call["function"]
        arguments = function.get("arguments") or {}
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(function["name"], str) or not isinstance(arguments, dict):
            raise TypeError("not a call")
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
        raise ApiError(400, f"each of the tool_calls in a message must be {A_CALL}", "messages") from error
    return {**call, "function": {**function, "arguments": arguments}}
