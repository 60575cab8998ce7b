"""Tool calls in the text of an answer, as Qwen and Hermes write them: <tool_call>{"name": ..., "arguments": ...}</tool_call>."""

from __future__ import annotations

import json
import re
import uuid

import msgspec

from folovllm.server.held_back import common_part

OPENING, CLOSING = "<tool_call>", "</tool_call>"
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class Function(msgspec.Struct, omit_defaults=True):
    """The function that is called, or what is new of it."""

    arguments: str
    name: str | None = None


class ToolCall(msgspec.Struct, omit_defaults=True):
    """A call, or in a stream what is new of it: `id`, `type` and the name come once, with the first piece."""

    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: Function | None = None


class ToolCallParser:
    """Cuts text that comes in pieces into content and calls, wherever the pieces are torn.

    The arguments are handed on as the model writes them, as soon as the name is known. Text that turns out to be no call is
    content. Space around calls is dropped.
    """

    def __init__(self, only_one: bool = False) -> None:
        """`only_one`: calls after the first are dropped."""
        self._only_one = only_one
        self.num_calls = 0
        self._pending = ""  # text that may still be either
        self._body: JsonObject | None = None  # the arguments that are being read
        self._is_inside = False  # of a call

    def feed(self, text: str, last: bool = False) -> tuple[str, list[ToolCall]]:
        """What `text` adds to the content, and to the calls. With `last` nothing is held back any more."""
        self._pending += text
        content, calls = "", list[ToolCall]()
        while True:
            before = len(self._pending), self._is_inside, self._body
            if self._is_inside:
                content += self._read_call(calls, last)
            else:
                content += self._read_content(last)
            if before == (len(self._pending), self._is_inside, self._body):
                break
        return content, [call for call in merged(calls) if not (self._only_one and call.index)]

    def _read_content(self, last: bool) -> str:
        """Text up to the next call; space before one is held back, too, for it may not be content."""
        text, tag, rest = self._pending.partition(OPENING)
        if tag:
            self._pending, self._is_inside = rest, True
            return text.rstrip() if not self.num_calls or text.strip() else ""
        held = 0 if last else common_part(text, OPENING)
        shown = text[: len(text) - held]
        if not last:
            shown = shown.rstrip()
        elif self.num_calls and not shown.strip():
            self._pending = ""
            return ""
        self._pending = text[len(shown) :]
        return shown

    def _read_call(self, calls: list[ToolCall], last: bool) -> str:
        """Text inside a call, and what of it is content after all."""
        if self._body is None and (head := HEAD.match(self._pending)):
            self._pending, self._body = self._pending[head.end() :], JsonObject()
            calls.append(self._begin(str(json.loads(head[1]))))
        if self._body is not None and not self._body.is_over:
            length = self._body.read(self._pending)
            if length:
                calls.append(ToolCall(self.num_calls - 1, function=Function(arguments=self._pending[:length])))
                self._pending = self._pending[length:]
        body, tag, rest = self._pending.partition(CLOSING)
        if (self._body is not None and not self._body.is_over) or not (tag or last):
            return ""
        self._pending, self._is_inside = rest, False
        if self._body is not None:
            self._body = None
            return ""
        return self._read_whole(body, tag, calls)

    def _read_whole(self, body: str, tag: str, calls: list[ToolCall]) -> str:
        """A call that is written in another order; or text."""
        try:
            said = json.loads(body)
            name, arguments = said["name"], said.get("arguments", said.get("parameters", {}))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return OPENING + body + tag
        call = self._begin(str(name))
        assert call.function is not None
        call.function.arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append(call)
        return ""

    def _begin(self, name: str) -> ToolCall:
        self.num_calls += 1
        return ToolCall(self.num_calls - 1, f"call_{uuid.uuid4().hex[:24]}", "function", Function("", name))


class JsonObject:
    """Finds the end of a JSON object that comes in pieces, from its first brace on."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False
        self.is_over = False

    def read(self, text: str) -> int:
        """How many characters at the beginning of `text` belong to it."""
        for i, letter in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = letter == "\\"
                self._in_string = letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    self.is_over = True
                    return i + 1
        return len(text)


def merged(pieces: list[ToolCall]) -> list[ToolCall]:
    """Pieces of the same call as one piece."""
    calls: dict[int | None, ToolCall] = {}
    for piece in pieces:
        known = calls.setdefault(piece.index, piece)
        if known is not piece and known.function is not None and piece.function is not None:
            known.function.arguments += piece.function.arguments
    return list(calls.values())
