"""All answers of an engine that must have a form: who they are, how far each has come, what each may go on with."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from folovllm.draw_row import mask_of, mask_width
from folovllm.engine.logits_mask import LogitsMask
from folovllm.faults import Faults, require_fault
from folovllm.request import Sequence
from folovllm.step.masks import Masks
from folovllm.step.schedule import SchedulerOutput
from folovllm.structured_output import guidance
from folovllm.structured_output.choice import ChoiceGrammar, Choices
from folovllm.structured_output.grammar_matcher import Bitmask, Grammar, GrammarMatcher, ReasoningPrefix
from folovllm.structured_output.vocabulary import Vocabulary, read_vocabulary
from folovllm.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("folovllm")


MOST_FORMS = 16  # that are kept: a large grammar takes up to 75 MB
MOST_USES = 1000
MOST_TOKENIZERS = 4  # of the library, that are kept: a model with ends of its own has one


@dataclass(slots=True)
class Compiled:
    """A form that requests have asked for, and others may. It takes milliseconds to compile.

    Copies share what the library finds out about the form, and keeps for ever; so it is compiled anew from time to time.
    """

    grammar: Grammar  # at the beginning of an answer
    num_uses: int = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether no answer can begin here any more."""
        return isinstance(self.grammar, guidance.GuidanceGrammar) and self.grammar.is_exhausted()


class Place(NamedTuple):
    """Where an answer is at one of its draws, or at several: there, and behind each of the guesses `ahead`."""

    seq: Sequence
    level: int  # which of its draws
    matcher: GrammarMatcher
    line: int  # of its mask
    ahead: list[int]

    def finish(self, bits: Bitmask) -> int | None:
        """Make its masks what the request asks for. Returns the first draw that nothing leads on from, if there is one."""
        if self.ahead:
            broken = self.matcher.finish_ahead(bits[self.line : self.line + 1 + len(self.ahead)])
            return None if broken is None else self.level + broken
        return None if self.matcher.finish(bits[self.line]) else self.level


def places_behind(seq: Sequence, matcher: GrammarMatcher, guesses: list[int], level: int, line: int) -> list[Place]:
    """The places of an answer that is `level` of its guesses further, where `matcher` is; its first draw has that `line`."""
    ahead = guesses[level:]
    if ahead and matcher.sees_ahead:
        return [Place(seq, level, matcher, line + level, ahead)]
    return [Place(seq, i, at, line + i, []) for i, at in enumerate(matcher.ahead(ahead), level)]


class StructuredOutputManager(LogitsMask):
    """The owner of all matchers. A matcher goes with its sequence; what preemption takes is the cache, not the matcher."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, faults: Faults | None = None) -> None:
        """`faults` gets what goes wrong with one answer's matcher."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._faults = faults or Faults()
        self._library_tokenizers: dict[tuple[int, ...], Any] = {}  # by the tokens that end a text, and are never in one
        self._compiled: dict[
            tuple[str, tuple[int, ...]], Compiled
        ] = {}  # by form and such ends; the one that was used last stands at the end
        self._prefix = lru_cache(MOST_FORMS)(lambda closing: ReasoningPrefix(self._vocabulary, closing))
        self._matchers: WeakKeyDictionary[Sequence, GrammarMatcher] = WeakKeyDictionary()
        self._limits: dict[int, int] = {}  # by seq_id: tokens of the step under way that count, where not all may

    def add(self, seqs: SequenceOf[Sequence]) -> None:
        """Make the matchers of a request's answers, if it asks for a form: compiled once, and copied for each answer.

        Raises:
            ValueError: the form is none, cannot be kept, or needs what is not installed.
        """
        first = seqs[0]
        form = first.params.structured_outputs
        if form is None:
            return
        end_ids = sorted({*first.eos_token_ids, *first.params.stop_token_ids})
        if not end_ids:
            raise ValueError("structured_outputs needs a token that ends the answer: give stop_token_ids")
        prefix = None if form.after is None else self._prefix(form.after.encode()).copy()
        model_end_ids = sorted(first.eos_token_ids) or end_ids
        grammar = self._grammar(form, end_ids, model_end_ids)
        params = first.params
        allowed = None if params.allowed_token_ids is None else mask_of(params.allowed_token_ids, self._vocab_size)
        matcher = GrammarMatcher(
            grammar,
            end_ids,
            model_end_ids=model_end_ids,
            min_tokens=params.min_tokens,
            allowed=allowed,
            prefix=prefix,
        )
        for seq in seqs:
            self._matchers[seq] = matcher if seq is first else matcher.copy()

    def _matcher(self, seq: Sequence) -> GrammarMatcher | None:
        """The matcher of an answer. A request that ran into a fault has none any more."""
        return None if seq.request_id in self._faults.of else self._matchers.get(seq)

    def needs_mask(self, output: SchedulerOutput, seqs: SequenceOf[Sequence]) -> bool:
        """Whether the step draws for any of these answers. `seqs`: whose its shares are."""
        if not self._matchers:
            return False
        return any(share.num_draws and seq in self._matchers for share, seq in zip(output.shares, seqs, strict=True))

    def bitmasks(self, output: SchedulerOutput, seqs: SequenceOf[Sequence]) -> Masks:
        """What each of these answers may draw in the step, a mask for each draw. All tokens before are taken in.

        An answer that has ended meanwhile draws what it likes. So do draws behind a guess that its form does not allow,
        which count for nothing; nor does anything drawn where the form cannot be reached any more.
        """
        rows: list[int] = []
        forced: list[tuple[int, int]] = []  # line of the mask, the only token that it allows
        places: list[Place] = []
        for share, seq in zip(output.shares, seqs, strict=True):
            matcher = self._matcher(seq) if share.num_draws else None
            if matcher is None:
                continue
            if not seq.status.is_finished:
                guesses = share.token_ids[1:].tolist() if share.num_draws > 1 else []
                with self._faults.at(seq):
                    own = common(matcher.forced(), guesses) if guesses else []
                    places += places_behind(seq, matcher.behind(own), guesses, len(own), len(rows))
                    forced += [(len(rows) + level, token) for level, token in enumerate(own)]
            rows += [share.row] * share.num_draws
        bits = np.full((len(rows), mask_width(self._vocab_size)), -1, np.int32)
        if forced:
            lines, tokens = np.array(forced).T
            bits[lines] = 0
            bits.view(np.uint32)[lines, tokens // 32] = 1 << tokens % 32
        self._fill(places, bits)
        for p in places:
            with self._faults.at(p.seq):
                if (broken := p.finish(bits)) is not None:
                    self._limits.setdefault(p.seq.seq_id, broken)
            if self._matcher(p.seq) is None:  # a fault, and half a mask perhaps
                bits[p.line : p.line + 1 + len(p.ahead)] = -1
        return Masks(np.array(rows, np.int32), bits)

    def _fill(self, places: list[Place], bits: Bitmask) -> None:
        """Write the masks of the grammars to `bits`. If they cannot be made together, each is made by itself."""
        asked = [(p.seq, (p.matcher.grammar, p.line, p.ahead)) for p in places if p.matcher.grammar]
        try:
            guidance.fill_bitmasks([each for _, each in asked], bits)
        except BaseException as error:
            require_fault(error)  # whose it is, is found out now
            for seq, each in asked:
                with self._faults.at(seq):
                    guidance.fill_bitmasks([each], bits)

    def trim(self, seq: Sequence, draft: list[int]) -> list[int]:
        """The draft tokens, from the first on, that the form of an answer allows; all of them where it has none.

        What may be drawn beside and behind them is found out later, while the device computes (`bitmasks`).
        """
        matcher = self._matcher(seq)
        if matcher is not None:
            with self._faults.at(seq):
                return draft[: matcher.num_allowed(draft)]
        return draft

    def forced(self, seq: Sequence, most: int) -> list[int]:
        """At most so many tokens that come next in an answer because its form leaves no choice."""
        matcher = self._matcher(seq)
        if matcher is not None:
            with self._faults.at(seq):
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
        """Take in what a step drew, share by share, and cut off what does not count. Where nothing counts, give up."""
        if not self._matchers:
            return
        for seq, tokens in zip(seqs, token_ids, strict=True):
            limit = self._limits.pop(seq.seq_id, len(tokens)) if self._limits else len(tokens)
            matcher = self._matcher(seq) if tokens and not seq.status.is_finished else None
            del tokens[limit:]
            if matcher is not None:
                if not tokens:
                    matcher.give_up()
                with self._faults.at(seq):
                    for i, token_id in enumerate(tokens):
                        matcher.accept_token(token_id)
                        if matcher.is_broken:
                            del tokens[i:]
                            break

    def broken(self, seqs: Iterable[Sequence]) -> list[Sequence]:
        """Those of the answers that can no longer come to their form, and have not ended."""
        if not self._matchers:
            return []
        matchers = ((seq, self._matcher(seq)) for seq in seqs if not seq.status.is_finished)
        return [seq for seq, matcher in matchers if matcher is not None and matcher.is_broken]

    def _grammar(self, form: StructuredOutputsParams, end_ids: list[int], model_end_ids: list[int]) -> Grammar:
        key = repr(form), tuple(end_ids if form.kind == "choice" else model_end_ids)
        known = self._compiled.pop(key, None)
        if known is None or known.num_uses == MOST_USES or known.is_exhausted:
            known = Compiled(self._compile(form, key[1]))
        self._compiled[key], known.num_uses = known, known.num_uses + 1
        if len(self._compiled) > MOST_FORMS:
            del self._compiled[next(iter(self._compiled))]
        return known.grammar.copy()

    def _compile(self, form: StructuredOutputsParams, end_ids: tuple[int, ...]) -> Grammar:
        if form.choice is not None:
            return ChoiceGrammar(Choices(self._vocabulary, {text.encode() for text in form.choice}, end_ids))
        return guidance.GuidanceGrammar.compile(form, self._library_tokenizer(end_ids))

    def _library_tokenizer(self, end_ids: tuple[int, ...]) -> Any:
        """The library's, which knows these ends; made once."""
        made = self._library_tokenizers.pop(end_ids, None)
        if made is None:
            made = guidance.make_tokenizer(guidance.tokenizer_json(self._tokenizer), self._vocab_size, end_ids)
        self._library_tokenizers[end_ids] = made
        if len(self._library_tokenizers) > MOST_TOKENIZERS:
            del self._library_tokenizers[next(iter(self._library_tokenizers))]
        return made

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return read_vocabulary(self._tokenizer)


def common(one: list[int], other: list[int]) -> list[int]:
    """The tokens with which both begin."""
    return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
