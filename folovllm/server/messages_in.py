"""Messages of a conversation, as clients send them."""

from __future__ import annotations

import json
from typing import Any

from folovllm.server.errors import ApiError

A_CALL = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": "a JSON object, as text"}}'


def checked(message: dict[str, Any], number: int) -> dict[str, Any]:
    """A message whose content is text, as a text or in parts, as templates want it. Raises ApiError that names its `number`."""
    if problem := _problem(message):
        raise ApiError(400, f"messages[{number}]: {problem}", "messages")
    told = dict(message)
    if calls := told.pop("tool_calls", None):
        told["tool_calls"] = [_with_object(call) for call in calls]
    content = message.get("content")
    return {**told, "content": "" if content is None else content}


def _problem(message: dict[str, Any]) -> str | None:
    """What is wrong with a message, and what to do."""
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls") or []
    if not isinstance(role, str):
        return 'each message needs a role: {"role": "user", "content": "..."}'
    for name in ("function_call", "audio"):
        if message.get(name):
            return f"{name} in a message is not supported by this server: leave it out"
    if not isinstance(content, str | list | None):
        return "the content of a message must be a text, or a list of text parts"
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        return f"tool_calls in a message must be a list of {A_CALL}"
    if content is None and role != "assistant":
        return f"a message of {role!r} needs content: a text, or a list of text parts"
    return None


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return False
    return isinstance(function.get("name"), str) and isinstance(function.get("arguments"), str | dict | None)


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object, which templates write their own way. What is none, as `max_tokens` may cut one, stays text."""
    arguments: Any = call["function"].get("arguments") or {}
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        read = arguments
    return {**call, "function": {**call["function"], "arguments": read if isinstance(read, dict) else arguments}}
