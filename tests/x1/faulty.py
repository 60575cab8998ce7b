"""Faults on demand: the `cache_salt` of a request says where it fails, and how.

`{"cache_salt": "fault|engine|StructuredOutputManager.add|KeyError"}` makes the engine's call of `StructuredOutputManager.add` raise a KeyError for this request alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import folovllm.engine.llm_engine as llm_engine
import folovllm.engine.scheduler as scheduler
import folovllm.server.async_engine as async_engine
import folovllm.server.messages as messages
import folovllm.server.stream as stream
import folovllm.structured_output.guidance as guidance
from folovllm.engine.detokenizer import IncrementalDetokenizer
from folovllm.engine.detokenizer_stream import StreamDetokenizer
from folovllm.engine.input_processor import InputProcessor
from folovllm.engine.output_processor import RequestState
from folovllm.server.metrics import Counters
from folovllm.structured_output.grammar_matcher import GrammarMatcher
from folovllm.structured_output.manager import StructuredOutputManager


class PanicException(BaseException):
    """As a library in Rust raises it: no `Exception`."""


ERRORS = {kind.__name__: kind for kind in (RuntimeError, KeyError, MemoryError, AssertionError, PanicException)}
Patch = Callable[[Any, str, Any], None]
Call = tuple[str, str | None]  # the side on which it is made, and the salt of the request that it is made for
ADDING: list[Call] = [("", None)]  # last, whose matchers are being made


def side_of(request: Any) -> str:
    """Where a call is made: the server prepares requests without an id."""
    return "engine" if request.request_id else "server"


def fail(name: str, side: str, salt: str | None) -> None:
    """Raise what the salt asks for, if it asks for it here."""
    if salt and salt.startswith("fault|") and salt.split("|")[1:3] == [side, name]:
        raise ERRORS[salt.split("|")[3]]("injected")


def of_request(request: Any) -> Call:
    return side_of(request), request.cache_salt


def marked(thing: Any) -> Call:
    """Of a thing that does not know its request: a grammar, a detokenizer."""
    return getattr(thing, "mark", ADDING[-1])


# name -> (owner, attribute, side and salt of a call)
SITES: dict[str, tuple[Any, str, Callable[..., Call]]] = {
    "InputProcessor.process": (InputProcessor, "process", lambda self, id_, prompt, params, priority, salt: ("engine" if id_ else "server", salt)),
    "InputProcessor.sequences": (InputProcessor, "sequences", lambda self, request: of_request(request)),
    "StructuredOutputManager.add": (StructuredOutputManager, "add", lambda self, seqs: of_request(seqs[0].request)),
    "GrammarMatcher.copy": (GrammarMatcher, "copy", lambda self: marked(self)),
    "GrammarMatcher.finish": (GrammarMatcher, "finish", lambda self, *_: marked(self)),
    "GrammarMatcher.accept_token": (GrammarMatcher, "accept_token", lambda self, *_: marked(self)),
    "GrammarMatcher.forced": (GrammarMatcher, "forced", lambda self: marked(self)),
    "fill_bitmasks": (guidance, "fill_bitmasks", lambda places, bits: next((marked(m) for m, _, _ in places if "|fill_bitmasks|" in (marked(m)[1] or "")), ("", None))),
    "RequestState": (RequestState, "__init__", lambda self, id_, seqs, *_: of_request(seqs[0].request)),
    "RequestState.output": (RequestState, "output", lambda self: of_request(self.seqs[0].request)),
    "deltas": (stream, "new_deltas", lambda request: of_request(request.seqs[0].request)),
    "added": (llm_engine, "added", lambda seq, _: of_request(seq.request)),
    "Scheduler.add": (scheduler.Scheduler, "add", lambda self, seq: of_request(seq.request) if seq.index or seq.params.n == 1 else ("", None)),
    "append": (IncrementalDetokenizer, "append", lambda self, _: marked(self)),
    "advance": (StreamDetokenizer, "advance", lambda self: marked(self)),
    "find_stop": (IncrementalDetokenizer, "find_stop", lambda self, *_: marked(self)),
    "flush": (IncrementalDetokenizer, "flush", lambda self: marked(self)),
    "decode": (messages, "_decode_command", lambda data: ("engine", re.search(rb"fault\|[\w.|]+", data)[0].decode()) if b"|decode|" in data else ("", None)),
    "add_message": (async_engine, "add_message", lambda number, request: of_request(request)),
    "Stream.feed": (stream.Stream, "feed", lambda self, *_: of_request(self.seqs[0].request)),
    "Counters.record_start": (Counters, "record_start", lambda self, stream, _: of_request(stream.seqs[0].request)),
    "Stream.check": (stream, "check_stop_conditions", lambda seq: of_request(seq.request)),
    "with_text": (stream.Stream, "_with_text", lambda self, _: of_request(self.seqs[0].request)),
}  # fmt: skip


def install(patch: Patch = setattr) -> None:
    """Let all these calls fail for requests that ask for it."""
    for name, (owner, attribute, asked) in SITES.items():
        patch(owner, attribute, failing(getattr(owner, attribute), name, asked))
    patch(InputProcessor, "sequences", marking_detokenizers(InputProcessor.sequences))
    patch(StructuredOutputManager, "add", marking_matchers(StructuredOutputManager.add))


def failing(call: Any, name: str, asked: Callable[..., Call]) -> Any:
    def wrapped(*args: Any, **options: Any) -> Any:
        fail(name, *asked(*args))
        return call(*args, **options)

    return wrapped


def marking_detokenizers(sequences: Any) -> Any:
    def wrapped(*args: Any) -> Any:
        seqs = sequences(*args)
        for seq in seqs:
            seq.detokenizer.mark = of_request(seq.request)
        return seqs

    return wrapped


def marking_matchers(add: Any) -> Any:
    def wrapped(self: StructuredOutputManager, seqs: Any) -> None:
        ADDING.append(of_request(seqs[0].request))
        try:
            add(self, seqs)
        finally:
            ADDING.pop()
        for seq in seqs:
            if matcher := self._matchers.get(seq):
                matcher.mark = matcher._grammar.mark = of_request(seq.request)  # type: ignore[attr-defined]

    return wrapped
