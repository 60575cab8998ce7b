"""The owner of all grammar matchers of an engine: it makes them, feeds them, and asks them for bitmasks."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from copy import copy
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from folovllm.electives.structured_output import guidance
from folovllm.electives.structured_output.choice import ChoiceGrammar, Choices
from folovllm.electives.structured_output.grammar_matcher import (
    Bitmask,
    Grammar,
    GrammarMatcher,
    ReasoningPrefix,
    set_bits,
)
from folovllm.electives.structured_output.params import StructuredOutputsParams
from folovllm.electives.structured_output.vocabulary import Vocabulary, read_vocabulary
from folovllm.request import Sequence
from folovllm.sample.sampling_row import mask_width
from folovllm.step.bitmasks import TokenBitmasks
from folovllm.step.schedule import SchedulerOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("folovllm")
MOST_GRAMMARS = 16  # that are kept: a large grammar takes up to 75 MB
MOST_USES = 1000  # of a compiled grammar: copies share what the library finds out about it, and keeps for ever
MOST_TOKENIZERS = 4  # of the library, that are kept: a model with ends of its own has one


class Place(NamedTuple):
    """Where an answer is at one of its sampled positions, or at several: there, and behind each of the draft tokens `ahead`."""

    seq: Sequence
    level: int  # which of its sampled positions
    matcher: GrammarMatcher
    line: int  # of its mask
    ahead: list[int]

    def finish(self, bits: Bitmask) -> int | None:
        """Make its masks what the request asks for. Returns the first position that nothing leads on from, if there is one."""
        if self.ahead:
            broken = self.matcher.finish_ahead(bits[self.line : self.line + 1 + len(self.ahead)])
            return None if broken is None else self.level + broken
        return None if self.matcher.finish(bits[self.line]) else self.level


def places_behind(seq: Sequence, matcher: GrammarMatcher, drafted: list[int], level: int, line: int) -> list[Place]:
    """The places of an answer that is `level` of its draft tokens further, where `matcher` is; its first mask has that `line`."""
    ahead = drafted[level:]
    if ahead and matcher.sees_ahead:
        return [Place(seq, level, matcher, line + level, ahead)]
    return [Place(seq, i, at, line + i, []) for i, at in enumerate(matcher.ahead(ahead), level)]


def is_of_one(error: BaseException) -> bool:
    """Return whether an exception is one answer's: KeyboardInterrupt is not, a panic of a library in Rust is."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def alone(seq: Sequence, matcher: GrammarMatcher) -> Iterator[None]:
    """Log an exception of one answer's matcher, which is broken then: that answer ends, and no other one."""
    try:
        yield
    except BaseException as error:
        if not is_of_one(error):
            raise
        logger.error("the grammar of request %s failed", seq.request_id, exc_info=error)
        matcher.is_broken = True


class StructuredOutputManager:
    """Which tokens each answer with a grammar may go on with. A preempted sequence keeps its matcher.

    `add` is called once a request. A step is then `needs_mask`, `bitmasks` if that was True, `accept_tokens` with what was
    sampled, and `broken`. Where steps overlap, `needs_mask` of a step comes before `accept_tokens` of the one before it, and its
    `bitmasks` behind that. So a matcher keeps its own account of what was sampled: a sequence's tokens may be a step behind.
    Speculative decoding calls `trim` and `forced` before a step. Nobody says when a sequence ends: sequences are held weakly.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        # By the tokens that end a text, and are never in one: the library's tokenizer, and with a grammar what was compiled.
        self._library_tokenizer = lru_cache(MOST_TOKENIZERS)(self._make_library_tokenizer)
        # With its uses; the one used last is at the end.
        self._compiled: dict[tuple[str, tuple[int, ...]], tuple[Grammar, int]] = {}
        self._prefix = lru_cache(MOST_GRAMMARS)(lambda closing: ReasoningPrefix(self._vocabulary, closing))
        self._matchers: WeakKeyDictionary[Sequence, GrammarMatcher] = WeakKeyDictionary()
        self._limits: dict[int, int] = {}  # by seq_id: tokens of the step under way that count, where not all may

    def add(self, seqs: SequenceOf[Sequence]) -> None:
        """Make the matchers of a request's answers, if it asks for a grammar: compiled once, and copied for each answer.

        Raises:
            ValueError: the grammar is none, cannot be kept, or needs what is not installed.
        """
        first, params = seqs[0], seqs[0].params
        if (asked := params.structured_outputs) is None:
            return
        end_ids = sorted({*first.eos_token_ids, *params.stop_token_ids})
        if not end_ids:
            raise ValueError("structured_outputs needs a token that ends the answer: give stop_token_ids")
        model_end_ids = sorted(first.eos_token_ids) or end_ids
        allowed = None
        if params.allowed_token_ids is not None:
            set_bits(allowed := np.zeros(mask_width(self._vocab_size), np.int32), params.allowed_token_ids)
        matcher = GrammarMatcher(
            self._grammar(asked, end_ids, model_end_ids),
            end_ids,
            model_end_ids=model_end_ids,
            min_tokens=params.min_tokens,
            allowed=allowed,
            prefix=None if asked.after is None else copy(self._prefix(asked.after.encode())),
        )
        for seq in seqs:
            self._matchers[seq] = matcher if seq is first else matcher.copy()

    def needs_mask(self, output: SchedulerOutput, seqs: SequenceOf[Sequence]) -> bool:
        """Whether the step samples for any of these answers. `seqs`: those of the step, in order."""
        if not self._matchers:
            return False
        return any(
            scheduled.num_samples and seq in self._matchers
            for scheduled, seq in zip(output.scheduled_seqs, seqs, strict=True)
        )

    def bitmasks(self, output: SchedulerOutput, seqs: SequenceOf[Sequence]) -> TokenBitmasks:
        """What each of these answers may go on with in the step, a mask for each sampled position. All tokens before are taken in.

        An answer that has ended meanwhile is sampled without a mask, and its token is dropped. So are tokens that are sampled
        behind a draft token that the grammar rejects, and those of an answer that cannot satisfy its grammar any more.
        """
        rows: list[int] = []
        forced: list[tuple[int, int]] = []  # line of the mask, the only token that it allows
        places: list[Place] = []
        for scheduled, seq in zip(output.scheduled_seqs, seqs, strict=True):
            matcher = self._matchers.get(seq) if scheduled.num_samples else None
            if matcher is None:
                continue
            if not seq.status.is_finished:
                drafted = scheduled.token_ids[1:].tolist() if scheduled.num_samples > 1 else []
                self._limits[seq.seq_id] = 0  # unless its places are found
                with alone(seq, matcher):
                    own = common(matcher.forced(), drafted) if drafted else []
                    places += places_behind(seq, matcher.behind(own), drafted, len(own), len(rows))
                    forced += [(len(rows) + level, token) for level, token in enumerate(own)]
                    del self._limits[seq.seq_id]
            rows += [scheduled.row] * scheduled.num_samples
        bits = np.full((len(rows), mask_width(self._vocab_size)), -1, np.int32)
        if forced:
            lines, tokens = np.array(forced).T
            bits[lines] = 0
            bits.view(np.uint32)[lines, tokens // 32] = 1 << tokens % 32
        self._fill(places, bits)
        for p in places:
            broken: int | None = p.level
            with alone(p.seq, p.matcher):
                broken = p.finish(bits)
            if broken is not None:
                self._limits.setdefault(p.seq.seq_id, broken)
        return TokenBitmasks(np.array(rows, np.int32), bits)

    def _fill(self, places: list[Place], bits: Bitmask) -> None:
        """Write the masks of the grammars to `bits`. If they cannot be made together, each is made by itself."""
        asked = [(p, (p.matcher.grammar, p.line, p.ahead)) for p in places if p.matcher.grammar]
        try:
            guidance.fill_bitmasks([each for _, each in asked], bits)
        except BaseException as error:
            if not is_of_one(error):
                raise
            for p, each in asked:
                with alone(p.seq, p.matcher):
                    guidance.fill_bitmasks([each], bits)

    def trim(self, seq: Sequence, draft: list[int]) -> list[int]:
        """The draft tokens, from the first on, that the grammar of an answer allows; all of them where it has none.

        What may be sampled beside and behind them is found out later, while the device computes (`bitmasks`).
        """
        if (matcher := self._matchers.get(seq)) is not None:
            num_allowed = 0
            with alone(seq, matcher):
                num_allowed = matcher.num_allowed(draft)
            draft = draft[:num_allowed]
        return draft

    def forced(self, seq: Sequence, most: int) -> list[int]:
        """At most so many tokens that come next in an answer because its grammar leaves no choice."""
        if (matcher := self._matchers.get(seq)) is not None:
            with alone(seq, matcher):
                return matcher.forced()[:most]
        return []

    def prepare(self, model_end_ids: Collection[int]) -> None:
        """Do now what the first answer with a grammar would wait for, if the library is there."""
        if not guidance.is_installed() or not model_end_ids:  # of a model without ends, each request brings its own
            return
        try:
            self._library_tokenizer(tuple(sorted(model_end_ids)))
        except ValueError as error:  # requests that ask for one are told the same
            logger.warning("%s", error)

    def accept_tokens(self, seqs: Iterable[Sequence], token_ids: Iterable[list[int]]) -> None:
        """Take in what a step sampled, sequence by sequence, and cut off what does not count. Where nothing counts, give up."""
        if not self._matchers:
            return
        for seq, tokens in zip(seqs, token_ids, strict=True):
            limit = self._limits.pop(seq.seq_id, len(tokens)) if self._limits else len(tokens)
            matcher = self._matchers.get(seq) if tokens and not seq.status.is_finished else None
            del tokens[limit:]
            if matcher is not None:
                if not tokens:
                    matcher.is_broken = True  # all tokens that count were taken in
                for i, token_id in enumerate(tokens):
                    with alone(seq, matcher):
                        matcher.accept_token(token_id)
                    if matcher.is_broken:
                        del tokens[i:]
                        break

    def broken(self, seqs: Iterable[Sequence]) -> list[Sequence]:
        """Those of the answers that can no longer satisfy their grammar, and have not ended."""
        if not self._matchers:
            return []
        matchers = ((seq, self._matchers.get(seq)) for seq in seqs if not seq.status.is_finished)
        return [seq for seq, matcher in matchers if matcher is not None and matcher.is_broken]

    def _grammar(self, asked: StructuredOutputsParams, end_ids: list[int], model_end_ids: list[int]) -> Grammar:
        key = repr(asked), tuple(end_ids if asked.kind == "choice" else model_end_ids)
        grammar, num_uses = self._compiled.pop(key, (None, 0))
        if grammar is None or num_uses == MOST_USES or grammar.is_exhausted():
            grammar, num_uses = self._compile(asked, key[1]), 0
        self._compiled[key] = grammar, num_uses + 1
        if len(self._compiled) > MOST_GRAMMARS:
            del self._compiled[next(iter(self._compiled))]
        return grammar.copy()

    def _compile(self, asked: StructuredOutputsParams, end_ids: tuple[int, ...]) -> Grammar:
        if asked.choice is not None:
            return ChoiceGrammar(Choices(self._vocabulary, {text.encode() for text in asked.choice}, end_ids))
        return guidance.GuidanceGrammar.compile(asked, self._library_tokenizer(end_ids))

    def _make_library_tokenizer(self, end_ids: tuple[int, ...]) -> Any:
        return guidance.make_tokenizer(guidance.tokenizer_json(self._tokenizer), self._vocab_size, end_ids)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return read_vocabulary(self._tokenizer)


def common(one: list[int], other: list[int]) -> list[int]:
    """The tokens with which both begin."""
    return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
