"""Tool calls in the text of an answer, as Qwen and Hermes write them: <tool_call>{"name": ..., "arguments": ...}</tool_call>."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Generator
from typing import Annotated, Any, TypeVar

import msgspec

from folovllm.electives.server.reasoning import common_part

OPENING, CLOSING = "<tool_call>", "</tool_call>"
HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{', re.DOTALL)
SPACE, NO_CALL = re.compile(r"\s*"), re.compile(r"[^{<]*")
Name = Annotated[str, msgspec.Meta(min_length=1)]
T = TypeVar("T")


class WrittenCall(msgspec.Struct):
    """A call as the model writes it. Arguments may be an object, or the text of one."""

    name: Name
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"{}")


class ToolCallParser:
    """Cuts text that comes in pieces into content and calls, wherever the pieces are torn.

    Between two tags stands a call, or several. Their arguments are JSON objects, handed on as the model writes them. In a stream
    they are handed on as soon as the name is known: arguments that turn out to be no JSON have been delivered by then. In a whole
    answer (`is_whole`) such a call is content, as all text is that turns out to be no call, also behind a call within its tags.
    Space around calls is dropped.

    Each character is looked at once: what is kept of the text between two pieces is shorter than a tag.
    """

    def __init__(self, only_one: bool = False, is_whole: bool = False) -> None:
        """`only_one`: calls after the first are dropped. `is_whole`: the text comes in one piece."""
        self._only_one, self._is_whole, self._is_last = only_one, is_whole, False
        self.num_calls = 0
        self._text, self._at = "", 0  # what was not read begins at `_at`
        self._held: list[str] = []  # text that was read and may still be content, up to a tag
        self._has_called = False  # since the opening tag; and no content came behind the closing one
        self._content, self._calls = list[str](), list[dict[str, Any]]()  # what the piece adds
        self._reading = self._read()

    def feed(self, text: str, last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """What `text` adds to the content, and to the calls, as OpenAI's API has them. With `last` nothing is held back any more.

        In a stream `id`, `type` and the name come once, with a call's first piece.
        """
        self._text, self._at, self._is_last = self._text[self._at :] + text, 0, last
        self._content, self._calls = [], []
        next(self._reading, None)
        calls = [call for call in self._calls if not (self._only_one and call["index"])]
        for call in calls if self._is_whole else ():
            del call["index"]
        return "".join(self._content), calls

    def _read(self) -> Generator[None]:
        """Read to the end of the text; each `yield` waits for more of it. Space before a tag is held back, for it may not be content."""
        while True:
            tag = self._text.find(OPENING, self._at)
            tail = self._text[max(self._at, len(self._text) - len(OPENING)) :]
            end = tag if tag >= 0 else len(self._text) - (0 if self._is_last else common_part(tail, OPENING))
            text, self._at = self._text[self._at : end], end
            if self._keep(text):
                self._has_called = False
            if tag >= 0:
                self._at += len(OPENING)
                self._held.append(OPENING)
                yield from self._read_calls()
            elif not self._is_last:
                yield
            else:
                self._content += [] if self._has_called else self._held
                return

    def _read_calls(self) -> Generator[None]:
        """Read up to the closing tag. Behind a call all else but space is content; without one the opening tag is, too."""
        self._has_called = False
        while True:
            passed = (NO_CALL if self._has_called else SPACE).match(self._text, self._at)
            assert passed is not None
            self._at = passed.end()
            self._keep(passed[0])
            rest = self._text[self._at : self._at + len(CLOSING)]
            is_torn = rest != CLOSING and CLOSING.startswith(rest)
            if rest.startswith("{"):
                yield from self._read_object()
                if not self._has_called:
                    return
            elif is_torn and not self._is_last:
                yield
            elif not self._has_called:
                self._give_up()
                return
            elif is_torn or rest == CLOSING:
                self._at += len(rest)
                self._held = []
                return
            else:
                self._at += 1
                self._keep("<")

    def _read_object(self) -> Generator[None]:
        """Read an object: a call that begins in the usual order as it comes, any other up to its end. What is no call is content."""
        object_, body = JsonObject(), list[str]()
        yield from self._take(object_, (0, 2), body.append)
        head = HEAD.fullmatch("".join(body)) if object_.depth == 2 and not self._is_whole else None
        if head is not None and (name := decoded(head[1], Name)) is not None:
            self._begin(name, "{")
            yield from self._take(object_, (1,), self._add)
            yield from self._take(object_, (0,), lambda behind: None)
            return
        if object_.depth:
            yield from self._take(object_, (0,), body.append)
        if object_.depth == 0 and (call := call_in("".join(body))) is not None:
            self._begin(*call)
        else:
            self._give_up(*body)

    def _take(self, object_: JsonObject, depths: tuple[int, ...], hand_on: Callable[[str], object]) -> Generator[None]:
        """Hand on the text up to where the object is as deep as one of these, breaks off, or ends."""
        while True:
            start, self._at = self._at, object_.read(self._text, self._at, depths)
            hand_on(self._text[start : self._at])
            if object_.depth in depths or object_.is_broken or self._is_last:
                return
            yield

    def _keep(self, text: str) -> bool:
        """Add text to the content, but hold space at its end back. Returns whether there is more than that."""
        if words := text.rstrip():
            self._give_up(words)
        self._held.append(text[len(words) :])
        return bool(words)

    def _give_up(self, *texts: str) -> None:
        """What was held is content, and so are these texts behind it."""
        self._content += [*self._held, *texts]
        self._held = []

    def _begin(self, name: str, arguments: str) -> None:
        self._held, self._has_called = [], True
        call = {"index": self.num_calls, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        self._calls.append(call | {"function": {"arguments": arguments, "name": name}})
        self.num_calls += 1

    def _add(self, arguments: str) -> None:
        """To the arguments of the newest call."""
        if self._calls:
            self._calls[-1]["function"]["arguments"] += arguments
        elif arguments:
            self._calls.append({"index": self.num_calls - 1, "function": {"arguments": arguments}})


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


def decoded(text: str, kind: type[T]) -> T | None:
    """The value in a JSON text; None if it is no JSON, or of another type."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None


def call_in(text: str) -> tuple[str, str] | None:
    """The name and the arguments of a call in JSON, None if it is none."""
    if (call := decoded(text, WrittenCall)) is None:
        return None
    arguments = bytes(call.arguments or call.parameters).decode()
    if arguments.startswith('"'):
        arguments = decoded(arguments, str) or ""
    return None if decoded(arguments, dict) is None else (call.name, arguments)
