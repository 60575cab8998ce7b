"""Tool calls in the text of an answer, as Qwen and Hermes write them: <tool_call>{"name": ..., "arguments": ...}</tool_call>."""

from __future__ import annotations

import json
import re
import uuid

import msgspec

from folovllm.electives.server.reasoning import common_part
from folovllm.electives.structured_output.params import refuse_constant

OPENING, CLOSING = "<tool_call>", "</tool_call>"
HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{', re.DOTALL)
SPACE, NO_CALL = re.compile(r"\s*"), re.compile(r"[^{<]*")


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

    Between two tags stands a call, or several. Their arguments are JSON objects, handed on as the model writes them. In a stream
    they are handed on as soon as the name is known: arguments that turn out to be no JSON have been delivered by then. In a whole
    answer (`is_whole`) such a call is content, as all text is that turns out to be no call, also behind a call within its tags.
    Space around calls is dropped.

    Each character is looked at once: what is kept of the text between two pieces is shorter than a tag.
    """

    def __init__(self, only_one: bool = False) -> None:
        """`only_one`: calls after the first are dropped."""
        self._only_one = only_one
        self.is_whole = False  # the text comes in one piece
        self.num_calls = 0
        self._text, self._at = "", 0  # what was not read begins at `_at`
        self._step = self._read_content  # reads on; returns whether another step may
        self._held: list[str] = []  # text that was read and may still be content, up to a tag
        self._object, self._body = JsonObject(), list[str]()  # what is being read within tags, and its text
        self._has_called = False  # since the opening tag; and no content came behind the closing one
        self._content, self._calls = list[str](), list[ToolCall]()  # what the piece adds

    def feed(self, text: str, last: bool = False) -> tuple[str, list[ToolCall]]:
        """What `text` adds to the content, and to the calls. With `last` nothing is held back any more."""
        self._text, self._at = self._text[self._at :] + text, 0
        self._content, self._calls = [], []
        while self._step(last):
            pass
        return "".join(self._content), [call for call in self._calls if not (self._only_one and call.index)]

    def _read_content(self, last: bool) -> bool:
        """Text up to the next tag; space before one is held back, too, for it may not be content."""
        tag = self._text.find(OPENING, self._at)
        tail = self._text[max(self._at, len(self._text) - len(OPENING)) :]
        end = tag if tag >= 0 else len(self._text) - (0 if last else common_part(tail, OPENING))
        text, self._at = self._text[self._at : end], end
        if self._keep(text):
            self._has_called = False
        if tag >= 0:
            self._at += len(OPENING)
            self._held.append(OPENING)
            self._step, self._has_called = self._read_between, False
        elif last and not self._has_called:
            self._content += self._held
        return tag >= 0

    def _read_between(self, last: bool) -> bool:
        """Up to the next call or the closing tag. Behind a call all else but space is content; without one the tag is, too."""
        passed = (NO_CALL if self._has_called else SPACE).match(self._text, self._at)
        assert passed is not None
        self._at = passed.end()
        self._keep(passed[0])
        rest = self._text[self._at : self._at + len(CLOSING)]
        if rest.startswith("{"):
            self._object, self._body, self._step = JsonObject(), [], self._read_head
        elif CLOSING.startswith(rest) and rest != CLOSING and (self._has_called or not last):
            return False
        elif not self._has_called:
            self._give_up()
        elif rest == CLOSING:
            self._at += len(CLOSING)
            self._held, self._step = [], self._read_content
        else:
            self._at += 1
            self._keep("<")
        return True

    def _keep(self, text: str) -> bool:
        """Add text to the content, but hold space at its end back. Returns whether there is more than that."""
        if words := text.rstrip():
            self._content += [*self._held, words]
            self._held = []
        self._held.append(text[len(words) :])
        return bool(words)

    def _read_head(self, last: bool) -> bool:
        """An object, as far as it may begin as a call does: up to the first object or list in it."""
        self._body.append(self._take(0, 2))
        if self._object.depth == 1 and not (last or self._object.is_broken):
            return False
        may_begin = self._object.depth == 2 and not self.is_whole
        head = HEAD.fullmatch("".join(self._body)) if may_begin else None
        name = None if head is None else name_in(head[1])
        self._step = self._read_whole if name is None else self._read_arguments
        if name is not None:
            self._begin(name, "{")
        return True

    def _read_whole(self, last: bool) -> bool:
        """An object of a whole answer, or one that is written in another order, up to its end: a call, or text."""
        if self._object.depth:  # else its end was read with its head
            self._body.append(self._take(0))
        call = call_in("".join(self._body)) if self._object.depth == 0 else None
        if call is not None:
            self._begin(*call)
            self._step = self._read_between
        elif not self._object.depth or self._object.is_broken or last:
            self._give_up()
        else:
            return False
        return True

    def _read_arguments(self, last: bool) -> bool:
        """The arguments of a call that has begun."""
        self._add(Function(self._take(1)))
        is_over = self._object.depth == 1 or self._object.is_broken
        if is_over:
            self._step = self._read_rest
        return is_over

    def _read_rest(self, last: bool) -> bool:
        """What an object has behind its arguments."""
        self._take(0)
        is_over = self._object.depth == 0 or self._object.is_broken
        if is_over:
            self._step = self._read_between
        return is_over

    def _take(self, *depths: int) -> str:
        """The text up to where the object is as deep as one of these, or breaks off."""
        start, self._at = self._at, self._object.read(self._text, self._at, depths)
        return self._text[start : self._at]

    def _give_up(self) -> None:
        """What was held is content."""
        self._content += [*self._held, *self._body]
        self._held, self._body = [], []
        self._step = self._read_between if self._has_called else self._read_content

    def _begin(self, name: str, arguments: str) -> None:
        self.num_calls += 1
        self._held, self._body, self._has_called = [], [], True
        self._calls.append(
            ToolCall(self.num_calls - 1, f"call_{uuid.uuid4().hex[:24]}", "function", Function(arguments, name))
        )

    def _add(self, new: Function) -> None:
        """To the arguments of the newest call."""
        if self._calls and (known := self._calls[-1].function) is not None:
            known.arguments += new.arguments
        elif new.arguments:
            self._calls.append(ToolCall(self.num_calls - 1, function=new))


class JsonObject:
    """Follows a JSON object that comes in pieces, from its first brace on."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_broken = False  # by a tag, which no object has outside its strings
        self._in_string = self._is_escaped = False

    def read(self, text: str, start: int, depths: tuple[int, ...]) -> int:
        """Go on at `start`, up to behind the letter with which the depth becomes one of `depths`. Returns where."""
        for i in range(start, len(text)):
            letter = text[i]
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = letter == "\\"
                self._in_string = letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter == "<":
                self.is_broken = True
                return i
            elif letter in "{[}]":
                self.depth += 1 if letter in "{[" else -1
                if self.depth in depths:
                    return i + 1
        return len(text)


def name_in(text: str) -> str | None:
    """The name of a tool, from its JSON (another value than a string as Python writes it); None if `text` is no JSON, or the name is empty or no UTF-8 (half a character)."""
    try:
        name = str(json.loads(text))
        name.encode()
    except ValueError:
        return None
    return name or None


def call_in(text: str) -> tuple[str, str] | None:
    """The name and the arguments of a call in JSON, None if it is none. Arguments may be the text of an object."""
    try:
        call = json.loads(text, parse_constant=refuse_constant)
        name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            is_object = isinstance(json.loads(arguments, parse_constant=refuse_constant), dict)
        else:
            is_object, arguments = isinstance(arguments, dict), arguments_in(text, arguments)
        f"{name}{arguments}".encode()
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (name, arguments) if isinstance(name, str) and name and is_object else None


def arguments_in(text: str, arguments: object) -> str:
    """The arguments as they are written in a call, where they come behind the name; else written anew."""
    if (head := HEAD.match(text)) is None:
        return json.dumps(arguments, allow_nan=False)
    start = head.end() - 1
    return text[start : json.JSONDecoder().raw_decode(text, start)[1]]
