"""The conversation of a chat request: its messages, as templates want them, and the tools that it offers."""

from __future__ import annotations

import json
from typing import Any

from folovllm.server.errors import ApiError
from folovllm.server.tool_calls import CLOSING, OPENING
from folovllm.structured_output.guidance import WHITESPACE

A_CALL = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": "a JSON object, as text"}}'
ToolChoice = str | dict[str, Any] | None
CHOICES = ("none", "auto", "required")


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


def offered(tools: list[dict[str, Any]] | None, choice: ToolChoice) -> list[dict[str, Any]]:
    """The tools that the model is to know of: none if it may call none. Raises ApiError for what is no tool."""
    for tool in tools or ():
        if tool.get("type") != "function" or not _is_function(tool.get("function")):
            shape = '{"type": "function", "function": {"name": ..., "parameters": {a JSON schema}}}'
            raise ApiError(400, f"each of the tools must be {shape}", "tools")
    named = name_of(choice)
    if choice is not None and named is None and choice not in CHOICES:
        wanted = f'{", ".join(CHOICES)} or {{"type": "function", "function": {{"name": ...}}}}'
        raise ApiError(400, f"tool_choice must be {wanted}, not {choice!r}", "tool_choice")
    if not tools and choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice needs tools", "tool_choice")
    if named is not None and named not in [tool["function"]["name"] for tool in tools or ()]:
        raise ApiError(400, f"tool_choice names {named!r}, which is none of the tools", "tool_choice")
    return [] if choice == "none" else list(tools or ())


def _is_function(said: Any) -> bool:
    named = isinstance(said, dict) and isinstance(said.get("name"), str)
    return named and isinstance(said.get("parameters") or {}, dict)


def name_of(choice: ToolChoice) -> str | None:
    """The one function that must be called, if the choice names one."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def must_call(choice: ToolChoice) -> bool:
    """Whether the answer must be a call."""
    return choice == "required" or name_of(choice) is not None


def call_grammar(
    tools: list[dict[str, Any]], choice: ToolChoice, several: bool, instead: dict[str, Any] | bool | None = None
) -> str:
    """A grammar, in Lark's notation, of an answer that consists of calls.

    Args:
        choice: names the one function that may be called, or allows all.
        several: whether there may be more calls than one; a named function is called once.
        instead: a JSON schema of what may be said in place of a call.
    """
    named = name_of(choice)
    functions = [tool["function"] for tool in tools if named in (None, tool["function"]["name"])]
    lines = ["start: answer | calls" if instead is not None else "start: calls"]
    lines += ['calls: call ("\\n" call)*' if several and named is None else "calls: call"]
    lines += ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        head = f'{OPENING}\n{{"name": {json.dumps(function["name"])}, "arguments": '
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        lines.append(f"call_{i}: {json.dumps(head)} arguments_{i} {json.dumps('}' + chr(10) + CLOSING)}")
        lines.append(f"arguments_{i}: %json {_json(schema, bool(function.get('strict')), is_object=True)}")
    if instead is not None:
        lines.append(f"answer: %json {_json(instead, True)}")
    return "\n".join(lines)


def _json(schema: dict[str, Any] | bool, strict: bool, is_object: bool = False) -> str:
    """A schema with how its documents are written."""
    if isinstance(schema, bool):
        schema = {}
    options = {"lenient": not strict, "whitespace_pattern": WHITESPACE}
    kind = {"type": "object"} if is_object and "type" not in schema else {}
    return json.dumps({**schema, **kind, "x-guidance": options})
