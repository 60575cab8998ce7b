"""Grammars by llguidance: JSON schemas, regular expressions, context-free grammars.

It walks the tokenizer's tokens as a tree of bytes beside a parser, so that a mask takes microseconds
(https://github.com/guidance-ai/llguidance). This is the one file that knows it.
"""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from functools import cache
from typing import Any

import numpy as np

from folovllm.electives.structured_output.grammar_matcher import Bitmask, Grammar
from folovllm.electives.structured_output.json_schema import bounded_pattern, bounded_schema
from folovllm.electives.structured_output.params import StructuredOutputsParams

# Between the parts of a document: no more than a model needs to write one nicely, so that it cannot go on for ever.
WHITESPACE = r" |\n {0,16}"

# What the lexer may cost: some 20 ms a mask, and 50 MB for a grammar. The library's own limits are two to five times as far.
LIMITS = {
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
NO_TOKENIZER = "json, regex and grammar cannot be had with this tokenizer"
WALKS, STEPS = 4, 25  # of `check_grammar`: as long as grammars are that grow more ambiguous with each token
BYTE_WALKS, BYTE_STEPS = 24, 120  # of `require_way_on`: some 10 ms
LONGEST_END = 10_000  # choices up to an end, for the first walk: some forms are long
BYTE_SECONDS = 0.25  # of a processor's time, after which walks end: in an ambiguous grammar one takes seconds
STRUCTURE, SPACE = frozenset(b'{}[]:,"0aet'), frozenset(b" \n\t")  # leads through a document, between its parts
RANK = [2 if chr(byte).isalnum() else 3 if byte in b"{[(<|+*\\" else 0 if byte in b'"}])' else 1 for byte in range(512)]
FEW = 16  # masks that are made one after the other: more of them on several threads


def library() -> Any:
    """llguidance. Raises ValueError where it is not installed."""
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise ValueError(
            'json, regex and grammar need llguidance: pip install "folovllm[serve]", or pip install llguidance'
        ) from error
    return llguidance


def tokenizer_json(tokenizer: Any) -> str:
    """A tokenizer of transformers as its library writes it. Raises ValueError for one of another library."""
    try:
        backend = copy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return str(backend.to_str())
    except Exception as error:  # the binding knows no narrower class
        raise ValueError(f"{NO_TOKENIZER}: {error}") from error


def make_tokenizer(written: str, vocab_size: int, end_ids: Sequence[int]) -> Any:
    """The tokenizer that `tokenizer_json` wrote, for llguidance: about a second's work. Raises ValueError for one that it cannot read."""
    tokenizer = library().LLTokenizer
    try:
        return tokenizer(written, n_vocab=vocab_size, eos_token=list(end_ids))
    except Exception as error:  # the binding knows no narrower class
        raise ValueError(f"{NO_TOKENIZER}: {error}") from error


class GuidanceGrammar(Grammar):
    """An answer's place in a grammar of the library."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner  # an LLMatcher

    @classmethod
    def compile(cls, asked: StructuredOutputsParams, tokenizer: Any) -> GuidanceGrammar:
        """At the beginning of an answer, with its first mask. Raises ValueError if the grammar cannot be used, or has no text."""
        source = source_of(asked)
        inner = _matcher(tokenizer, source)
        inner.compute_bitmask()
        require_good(asked, inner.get_error())
        require_way_on(asked, source)
        return cls(inner)

    def fill(self, lines: Bitmask, drafts: Sequence[int]) -> None:
        self.inner.unsafe_compute_mask_ptr_with_draft_token(lines.ctypes.data, lines[0].nbytes, drafts)

    def is_accepting(self) -> bool:
        return bool(self.inner.is_accepting())

    def accept_token(self, token_id: int) -> bool:
        """Take in a token; False if the grammar forbids it. Beyond its limits the library allows any end."""
        return bool(self.inner.consume_token(token_id)) and not self.inner.is_error()

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return int(self.inner.validate_tokens(list(token_ids)))

    def forced(self) -> list[int]:
        """Jump-forward tokens: the tokenizer cuts a text that the grammar forces in one way only."""
        return list(self.inner.compute_ff_tokens())

    def copy(self) -> GuidanceGrammar:
        return GuidanceGrammar(self.inner.deep_copy())

    def is_exhausted(self) -> bool:
        start = self.inner.deep_copy()
        start.compute_bitmask()
        return bool(start.is_error())


def fill_on_threads(places: Iterable[tuple[GuidanceGrammar, int, list[int]]], bits: Bitmask) -> None:
    """Write masks to `bits` [n, ceil(V / 32)]: each grammar's, as its `fill` does, from a line on, with its draft tokens."""
    single, ahead = [], []
    for grammar, line, drafts in places:
        if drafts:
            ahead.append((grammar.inner, line, drafts))
        else:
            single.append((grammar.inner, line))
    where = bits.ctypes.data, bits[0].nbytes, len(bits)
    if single:
        _threads().unsafe_compute_mask_ptr(single, *where)
    if ahead:
        _threads().unsafe_compute_mask_ptr_with_draft_token(ahead, *where)


@cache
def _threads() -> Any:
    """Those on which masks are made, for all engines of this process."""
    return library().LLExecutor()


def source_of(asked: StructuredOutputsParams) -> str:
    """The grammar in llguidance's own notation. Raises ValueError if it cannot be had."""
    compiler = library().LLMatcher
    try:
        if asked.regex is not None:
            return str(compiler.grammar_from_regex(asked.regex))
        if asked.grammar is not None:
            from llguidance.gbnf_to_lark import any_to_lark

            return str(compiler.grammar_from_lark(bounded(any_to_lark(asked.grammar))))
        if (schema := asked.schema()) is False:
            raise ValueError("no document is valid under the schema false")
        space = None if asked.disable_any_whitespace else bounded_pattern(asked.whitespace_pattern or WHITESPACE)
        options = {"whitespace_pattern": space, "lenient": not asked.strict}
        options["whitespace_flexible"] = not asked.disable_any_whitespace
        return str(compiler.grammar_from_json_schema(bounded_schema({} if schema is True else schema, options)))
    except Exception as error:  # the library knows no narrower class
        raise unusable(asked, str(error)) from error


def bounded(grammar: str) -> str:
    """Return a grammar whose JSON schemas (`%json {...}`) are as those of requests: they bound numbers and white space."""
    parts, at = "", 0
    for found in re.finditer(r'"(?:\\.|[^"\\\n])*"|%json\s*(?=\{)', grammar):
        if found[0].startswith("%") and found.start() >= at:  # not within a text, and not within another schema
            try:
                schema, end = json.JSONDecoder().raw_decode(grammar, found.end())
            except (ValueError, RecursionError):  # no JSON: the library says so
                break
            parts += grammar[at : found.end()] + bounded_schema(schema, {}, whitespace_pattern=WHITESPACE)
            at = end
    return parts + grammar[at:]


def _matcher(tokenizer: Any, source: str) -> Any:
    guidance = library()
    return guidance.LLMatcher(tokenizer, source, log_level=0, limits=guidance.LLParserLimits(**LIMITS))


def unusable(asked: StructuredOutputsParams, says: str) -> ValueError:
    """The error of a grammar that cannot be used."""
    kind = asked.kind if asked.kind in ("regex", "grammar") else "JSON schema"
    return ValueError(f"structured_outputs holds a {kind} that cannot be used: {says}")


def require_good(asked: StructuredOutputsParams, error: str) -> None:
    """Raise ValueError with the library's `error`, unless it is empty or a warning."""
    if error.startswith("NoExtension"):
        raise unusable(asked, "no text matches it")
    if error and not error.startswith("WARNING"):
        raise unusable(asked, " ".join(error.split("<backtrace>")[0].split())[:500])


def check_grammar(asked: StructuredOutputsParams, tokenizer: Any) -> None:
    """Raise ValueError if this grammar is none, has no text, or becomes too complex within a few tokens.

    The library finds out what a grammar costs only as an answer goes through it: so a few go, each where chance leads.
    """
    start = GuidanceGrammar.compile(asked, tokenizer).inner
    for seed in range(WALKS):
        place = start.deep_copy()
        walk(place, random.Random(seed), STEPS)
        require_good(asked, place.get_error())


def require_way_on(asked: StructuredOutputsParams, source: str) -> None:
    """Raise ValueError if an answer may come to where nothing follows, or if no answer ends.

    Nothing in the library says so. So walks go through the grammar byte by byte, a while where chance leads, and then look for an
    end. They prefer what leads far through a document in few steps, and every fourth one white space. A regular expression alone
    has an end wherever it goes on, though chance may not find that of ".*END".
    """
    start, deadline = _matcher(_byte_tokenizer(), source), time.process_time() + BYTE_SECONDS
    ended = set[bool | None]()
    for seed in range(BYTE_WALKS):
        chance, place = random.Random(seed), start.deep_copy()
        likely, share = (STRUCTURE, 0.7) if seed % 4 else (SPACE, 0.95)
        walk(place, chance, chance.randrange(BYTE_STEPS) if seed % 3 else 0, likely, share, deadline)
        error = place.get_error()
        if error.startswith("Parser Error") or "too many expressions" in error:
            require_good(asked, error)
        ended.add(finds_end(place, chance, 250 if seed else LONGEST_END, deadline) or asked.regex is not None)
        error = place.get_error()
        if error.startswith("NoExtension") or "ff_tokens" in error:  # nothing follows, or the same for ever
            ended = {False}
            break
    if False in ended and True not in ended:
        says = "an answer may come to where it finds no end: nothing can follow, or a part leads back to itself"
        raise unusable(asked, says)


def walk(
    place: Any, chance: random.Random, steps: int, likely: Collection[int] = (), share: float = 0, end: float = math.inf
) -> None:
    """Move a place so many tokens on. A `share` of them is of `likely` at least, where the grammar allows some of them.

    At `end`, in seconds of the process, the walk ends.
    """
    for _ in range(steps):
        allowed = allowed_at(place)
        if place.is_stopped() or not allowed or time.process_time() > end:
            break
        first = [token for token in allowed if token in likely]
        place.consume_token(chance.choice(first if first and chance.random() < share else allowed))


def finds_end(place: Any, chance: random.Random, steps: int, deadline: float) -> bool | None:
    """Whether a walk from this place on comes to an end of the text within so many choices; None if that cannot be told.

    Mostly it takes what closes before what separates, then letters and digits, and last what opens.
    """
    for _ in range(steps):
        if place.is_error() or time.process_time() > deadline:
            return None
        if place.is_accepting() or place.is_stopped():
            return True
        if forced := place.compute_ff_tokens():
            place.consume_tokens(forced)
        elif allowed := allowed_at(place):
            most = min(map(RANK.__getitem__, allowed)) if chance.random() < 0.9 else max(RANK)
            place.consume_token(chance.choice([byte for byte in allowed if RANK[byte] <= most]))
    return False


def allowed_at(place: Any) -> list[int]:
    """The tokens that may come next."""
    mask = np.frombuffer(place.compute_bitmask(), np.uint8)
    allowed: list[int] = np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()
    return allowed


@cache
def _byte_tokenizer() -> Any:
    """A tokenizer of the library whose tokens 0 to 255 are bytes."""
    return library().LLTokenizer("byte")
