"""Grammars by llguidance: JSON schemas, regular expressions, context-free grammars.

It walks the tokenizer's tokens as a tree of bytes beside a parser, so that a mask takes microseconds
(https://github.com/guidance-ai/llguidance). This is the one file that knows it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from folovllm.quick_tokenizer import whole
from folovllm.structured.matcher import Matcher, Words
from folovllm.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Between the parts of a document: no more than a model needs to write one nicely, so that it cannot go on for ever.
WHITESPACE = r" |\n {0,16}"

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


def is_installed() -> bool:
    """Whether grammars can be had."""
    return find_spec("llguidance") is not None


def make_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_ids: list[int]) -> Any:
    """The tokenizer as llguidance wants it: about a second's work. Raises ValueError for one that it cannot read."""
    library()
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(whole(tokenizer), vocab_size, end_ids)
    except Exception as error:  # the binding knows no narrower class
        raise ValueError(f"json, regex and grammar cannot be had with this tokenizer: {error}") from error


def source_of(form: StructuredOutputsParams) -> str:
    """The form in llguidance's own notation. Raises ValueError if it cannot be had."""
    matcher = library().LLMatcher
    if form.regex is not None:
        return str(matcher.grammar_from_regex(form.regex))
    if form.grammar is not None:
        from llguidance import grammar_from

        try:
            return str(grammar_from("grammar", form.grammar))
        except ValueError as error:
            raise ValueError(f"structured_outputs holds a grammar that cannot be used: {error}") from error
    pattern = WHITESPACE if form.whitespace_pattern is None else form.whitespace_pattern
    options = {"whitespace_flexible": False} if form.disable_any_whitespace else {"whitespace_pattern": pattern}
    schema = form.schema()
    if schema is True:
        schema = {}
    if schema is False:
        raise ValueError("structured_outputs holds the JSON schema false, under which no document is valid")
    return str(matcher.grammar_from_json_schema(schema, overrides={**options, "lenient": not form.strict}))


def check_form(form: StructuredOutputsParams) -> None:
    """Raise ValueError if this form is none, or holds what cannot be kept."""
    if form.choice is None:
        require_good(form, library().LLMatcher.validate_grammar(source_of(form)))


def require_good(form: StructuredOutputsParams, error: str) -> None:
    """Raise ValueError with the library's `error`, if there is one."""
    if error and not error.startswith("WARNING"):
        kind = "regex" if form.regex is not None else "grammar" if form.grammar is not None else "JSON schema"
        raise ValueError(f"structured_outputs holds a {kind} that cannot be used: {' '.join(error.split())[:500]}")


class GuidanceMatcher:
    """An answer's place in a grammar; a `Matcher`."""

    sees_ahead: ClassVar[bool] = True

    def __init__(self, inner: Any) -> None:
        self.inner = inner  # an LLMatcher

    @classmethod
    def compile(cls, form: StructuredOutputsParams, tokenizer: Any) -> GuidanceMatcher:
        """At the beginning of an answer. Raises ValueError if the form cannot be used."""
        inner = library().LLMatcher(tokenizer, source_of(form), log_level=0)
        require_good(form, inner.get_error())
        return cls(inner)

    def fill(self, words: Words) -> None:
        """As `Matcher`."""
        self.inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    def is_accepting(self) -> bool:
        """As `Matcher`."""
        return bool(self.inner.is_accepting())

    def advance(self, token_id: int) -> bool:
        """As `Matcher`."""
        return bool(self.inner.consume_token(token_id))

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """As `Matcher`."""
        return int(self.inner.validate_tokens(list(token_ids)))

    def forced(self) -> list[int]:
        """As `Matcher`: a text that the grammar forces is cut into tokens as the tokenizer cuts it, and in no other way."""
        return list(self.inner.compute_ff_tokens())

    def copy(self) -> GuidanceMatcher:
        """As `Matcher`."""
        return GuidanceMatcher(self.inner.deep_copy())


def fill_together(places: Collection[tuple[Matcher, int, list[int]]], bits: Words) -> None:
    """Write the masks of matchers to lines of `bits` [n, ceil(V / 32)].

    Each comes with the line of its first mask, and with tokens: behind each of them there is a mask, in the lines that
    follow, up to one that the form does not allow. Only a `GuidanceMatcher` may have tokens.
    """
    is_parallel = sum(1 + len(tokens) for _, _, tokens in places) > FEW
    single: list[tuple[Any, int]] = []
    ahead: list[tuple[Any, int, list[int]]] = []
    for matcher, i, tokens in places:
        if not isinstance(matcher, GuidanceMatcher) or not (is_parallel or tokens):
            matcher.fill(bits[i])
        elif not is_parallel:
            matcher.inner.unsafe_compute_mask_ptr_with_draft_token(bits[i:].ctypes.data, bits[i].nbytes, tokens)
        elif tokens:
            ahead.append((matcher.inner, i, tokens))
        else:
            single.append((matcher.inner, i))
    if single:
        _threads().unsafe_compute_mask_ptr(single, bits.ctypes.data, bits[0].nbytes, len(bits))
    if ahead:
        _threads().unsafe_compute_mask_ptr_with_draft_token(ahead, bits.ctypes.data, bits[0].nbytes, len(bits))


@cache
def _threads() -> Any:
    """Those on which masks are made, for all engines of this process."""
    return library().LLExecutor()
