"""The owner of all grammar matchers of an engine: it makes them, feeds them, and asks them for bitmasks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from folovllm.electives.structured_output import guidance
from folovllm.electives.structured_output.choice import ChoiceGrammar
from folovllm.electives.structured_output.grammar_matcher import Grammar, GrammarMatcher, ReasoningPrefix
from folovllm.electives.structured_output.guidance import GuidanceGrammar
from folovllm.electives.structured_output.params import StructuredOutputsParams
from folovllm.electives.structured_output.vocabulary import Vocabulary, read_vocabulary
from folovllm.request import Sequence
from folovllm.sample.sampling_row import mask_width
from folovllm.step.bitmasks import TokenBitmasks
from folovllm.step.schedule import SchedulerOutput

logger = logging.getLogger("folovllm")
MOST_GRAMMARS = 16  # that are kept: a large grammar takes up to 75 MB
MOST_TOKENIZERS = 4  # of the library, that are kept: a model with ends of its own has one


class Place(NamedTuple):
    """Where an answer is that a step samples, with its draft tokens: it gets a mask for the next token, and one behind each draft."""

    seq: Sequence
    matcher: GrammarMatcher
    line: int  # of the first mask
    drafts: list[int]


@contextmanager
def alone(seq: Sequence, matcher: GrammarMatcher) -> Iterator[None]:
    """Log an exception of one answer's matcher, which is broken then: that answer ends, and no other one."""
    try:
        yield
    except Exception as error:
        logger.error("the grammar of request %s failed", seq.request_id, exc_info=error)
        matcher.is_broken = True


class StructuredOutputManager:
    """Which tokens each answer with a grammar may go on with. A preempted sequence keeps its matcher.

    `add` is called once a request. A step is then `needs_mask`, `bitmasks` if that was True, `accept_tokens` with what was
    sampled, and `broken`. Where steps overlap, `needs_mask` of a step comes before `accept_tokens` of the one before it, and its
    `bitmasks` behind that. So a matcher keeps its own account of what was sampled: a sequence's tokens may be a step behind.
    Speculative decoding calls `trim` and `forced` before a step. Nobody says when a sequence ends: sequences are held weakly.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._matchers: WeakKeyDictionary[Sequence, GrammarMatcher] = WeakKeyDictionary()
        # By the tokens that end a text, and are never in one: the library's tokenizer, and with the request what was compiled.
        self._library_tokenizer = lru_cache(MOST_TOKENIZERS)(self._make_library_tokenizer)
        self._compiled: dict[tuple[str, tuple[int, ...]], Grammar] = {}  # the one used last is at the end
        self._prefix = lru_cache(MOST_GRAMMARS)(lambda closing: ReasoningPrefix(self._vocabulary, closing))

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
        model_end_ids = tuple(sorted(first.eos_token_ids) or end_ids)
        grammar = self._grammar(asked, model_end_ids)
        if asked.after is not None:
            grammar = self._prefix(asked.after.encode()).before(grammar)
        matcher = GrammarMatcher(
            grammar,
            end_ids,
            model_end=model_end_ids[0],
            min_tokens=params.min_tokens,
            allowed_ids=params.allowed_token_ids,
        )
        for seq in seqs:
            self._matchers[seq] = matcher if seq is first else matcher.copy()

    def needs_mask(self, output: SchedulerOutput, seqs: SequenceOf[Sequence]) -> bool:
        """Whether the step samples for any of these answers. `seqs`: those of the step, in order."""
        return bool(self._matchers) and any(
            scheduled.num_samples and seq in self._matchers
            for scheduled, seq in zip(output.scheduled_seqs, seqs, strict=True)
        )

    def bitmasks(self, output: SchedulerOutput, seqs: SequenceOf[Sequence]) -> TokenBitmasks:
        """What each of these answers may go on with in the step, a mask for each sampled position. All tokens before are taken in.

        An answer that has ended meanwhile is sampled without a mask, and its token is dropped. So are tokens that are sampled
        behind a draft token that the grammar rejects, and those of an answer that cannot satisfy its grammar any more.
        """
        rows: list[int] = []
        places: list[Place] = []
        for scheduled, seq in zip(output.scheduled_seqs, seqs, strict=True):
            matcher = self._matchers.get(seq) if scheduled.num_samples else None
            if matcher is None:
                continue
            if not seq.status.is_finished:
                drafts = scheduled.token_ids[1:].tolist() if scheduled.num_samples > 1 else []
                places.append(Place(seq, matcher, len(rows), drafts))
            rows += [scheduled.row] * scheduled.num_samples
        bits = np.full((len(rows), mask_width(self._vocab_size)), -1, np.int32)
        many = []
        if len(rows) > guidance.FEW:
            many = [(g, p.line, p.drafts) for p in places if isinstance(g := p.matcher.grammar, GuidanceGrammar)]
            guidance.fill_on_threads(many, bits)
        for seq, matcher, line, drafts in places:
            with alone(seq, matcher):
                lines, grammar = bits[line : line + 1 + len(drafts)], matcher.grammar
                if grammar is not None and not (many and isinstance(grammar, GuidanceGrammar)):
                    grammar.fill(lines, drafts)
                matcher.finish(lines)
        return TokenBitmasks(np.array(rows, np.int32), bits)

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

    def accept_tokens(self, seqs: Iterable[Sequence], token_ids: Iterable[list[int]]) -> None:
        """Take in what a step sampled, sequence by sequence, and cut off what does not count. Where nothing counts, give up."""
        if not self._matchers:
            return
        for seq, tokens in zip(seqs, token_ids, strict=True):
            matcher = self._matchers.get(seq) if tokens and not seq.status.is_finished else None
            if matcher is not None:
                num_counted = 0
                with alone(seq, matcher):
                    for token_id in tokens[: matcher.limit]:
                        if not matcher.accept_token(token_id):
                            break
                        num_counted += 1
                matcher.is_broken |= num_counted == 0
                del tokens[num_counted:]

    def broken(self, seqs: Iterable[Sequence]) -> list[Sequence]:
        """Those of the answers that can no longer satisfy their grammar, and have not ended."""
        if not self._matchers:
            return []
        matchers = ((seq, self._matchers.get(seq)) for seq in seqs if not seq.status.is_finished)
        return [seq for seq, matcher in matchers if matcher is not None and matcher.is_broken]

    def prepare(self, model_end_ids: Collection[int]) -> None:
        """Do now what the first answer with a grammar would wait for, if the library is there."""
        if find_spec("llguidance") is None or not model_end_ids:  # of a model without ends, each request brings its own
            return
        try:
            self._library_tokenizer(tuple(sorted(model_end_ids)))
        except ValueError as error:  # requests that ask for one are told the same
            logger.warning("%s", error)

    def _grammar(self, asked: StructuredOutputsParams, end_ids: tuple[int, ...]) -> Grammar:
        """The grammar of a request, compiled or copied from one that was. `end_ids`: tokens that end answers and are no text."""
        grammar = self._compiled.pop(key := (repr(asked), end_ids), None)
        if grammar is None or grammar.is_exhausted():
            if asked.choice is None:
                grammar = GuidanceGrammar.compile(asked, self._library_tokenizer(end_ids))
            else:
                grammar = ChoiceGrammar(self._vocabulary, {text.encode() for text in asked.choice}, end_ids)
        self._compiled[key] = grammar
        if len(self._compiled) > MOST_GRAMMARS:
            del self._compiled[next(iter(self._compiled))]
        return grammar.copy()

    def _make_library_tokenizer(self, end_ids: tuple[int, ...]) -> Any:
        return guidance.make_tokenizer(guidance.tokenizer_json(self._tokenizer), self._vocab_size, end_ids)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return read_vocabulary(self._tokenizer)
