"""Which tokens an answer with a grammar may go on with, after all else that its request asks for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from copy import copy

import numpy as np
import numpy.typing as npt

from folovllm.electives.structured_output.vocabulary import Vocabulary

Bitmask = npt.NDArray[np.int32]  # [ceil(V / 32)]: bit t % 32 of word t // 32 is token t's


class Grammar(ABC):
    """One answer's place in a grammar."""

    @abstractmethod
    def fill(self, lines: Bitmask, drafts: Sequence[int]) -> None:
        """Write the masks of the next token and of those behind n draft tokens over `lines` [at least 1 + n, ceil(V / 32)].

        Nothing is written behind a draft token that the grammar does not allow. Where the answer may end, a mask has the tokens
        that end the model's answers, and elsewhere none of them.
        """

    @abstractmethod
    def accept_token(self, token_id: int) -> bool:
        """Take in a token. False: the grammar does not allow it, or has become too complex to be followed."""

    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        return False

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, one after the other, the grammar allows. The answer stays where it is."""
        ahead = self.copy()
        return next((i for i, token in enumerate(token_ids) if not ahead.accept_token(token)), len(token_ids))

    def forced(self) -> list[int]:
        """The tokens that come next, as far as the grammar leaves no choice: `fill` would allow each of them alone. No ends."""
        return []

    def copy(self) -> Grammar:
        """Another answer at the same place."""
        return copy(self)

    def is_exhausted(self) -> bool:
        """Whether no answer can begin here any more: copies share what the library may spend on a grammar."""
        return False


class ReasoningPrefix(Grammar):
    """The free text before an answer has a grammar: up to a closing text, "</think>" say, wherever tokens cut it.

    New lines in the token that ends it belong to neither. A token that brings anything else behind it is forbidden.

    Attributes:
        behind: the grammar that the answer has from there on, set by `before`.
        has_ended: whether the closing text has come.
    """

    behind: Grammar

    def __init__(self, vocabulary: Vocabulary, closing: bytes) -> None:
        self._bytes_of, self._closing, self._tail = vocabulary.bytes_of, closing, b""
        self.has_ended = False
        # The tokens that bring the end of `closing` and something behind it, by how many bytes of it have come before.
        longer = [(id_, text) for id_, text in vocabulary.bytes_of.items() if closing[-1] in text[:-1]]
        self._enders = [[id_ for id_, text in longer if closing in text]]
        self._enders += ([id_ for id_, text in longer if text.startswith(closing[n:])] for n in range(1, len(closing)))

    def before(self, grammar: Grammar) -> ReasoningPrefix:
        """The same text before a grammar."""
        other = copy(self)
        other.behind = grammar
        return other

    def fill(self, lines: Bitmask, drafts: Sequence[int]) -> None:
        place = self.copy()
        for level, token in enumerate([*drafts, -1]):
            if place.has_ended:
                return place.behind.fill(lines[level:], drafts[level:])
            lines[level] = ~mask_of(place._forbidden(), lines.shape[1])
            place.accept_token(token)

    def accept_token(self, token_id: int) -> bool:
        if self.has_ended:
            return self.behind.accept_token(token_id)
        text = self._with(token_id)
        self._tail, self.has_ended = text[-len(self._closing) :], self._closing in text
        return True

    def copy(self) -> ReasoningPrefix:
        return self.before(self.behind.copy())

    def _forbidden(self) -> list[int]:
        """Tokens that would end the text in the middle."""
        near = {id_ for n, ids in enumerate(self._enders) if self._tail.endswith(self._closing[:n]) for id_ in ids}
        return [id_ for id_ in near if self._with(id_).partition(self._closing)[2].strip(b"\n")]

    def _with(self, token_id: int) -> bytes:
        return self._tail + self._bytes_of.get(token_id, b"")


class GrammarMatcher:
    """One answer's way through its grammar.

    The answer may end where the grammar is complete, and then only ends: by any of `end_ids`. `min_tokens` holds as far as the
    grammar has something else to offer. Where it has not, ends are repeated until there are enough: they are no text.

    Attributes:
        is_over: the answer may only end.
        is_broken: nothing leads to an answer of this grammar any more, and all that counts was taken in.
        limit: how many of the tokens that the step samples may count; None: all of them. Set by `finish`.
    """

    def __init__(
        self,
        grammar: Grammar,
        end_ids: Sequence[int],
        *,
        model_end: int | None = None,
        min_tokens: int = 0,
        allowed_ids: Collection[int] | None = None,
    ) -> None:
        """`model_end`: one of `end_ids`, by default the first, that is in the masks of a complete grammar, and never text.

        `allowed_ids`: the only tokens that the request wants at all.
        """
        self._grammar, self._end_ids, self._allowed_ids = grammar, end_ids, allowed_ids
        self._model_end = end_ids[0] if model_end is None else model_end
        self._num_missing = min_tokens  # tokens that must come before the answer may end
        self._ends: Bitmask | None = None  # their masks, once they were needed
        self._allowed: Bitmask | None = None
        self.is_over = self.is_broken = False
        self.limit: int | None = None

    @property
    def grammar(self) -> Grammar | None:
        """What fills the masks that `finish` starts from; None where the answer only ends."""
        return None if self.is_over or self.is_broken else self._grammar

    def finish(self, lines: Bitmask) -> None:
        """From the masks of the grammar, if there is one, to those of all the request asks for, in place: [1 + n, ceil(V / 32)].

        Where no answer of this grammar can come any more, a mask has the ends alone; and what is sampled with it, and behind it,
        must not count (`limit`). The step that samples it sets `is_broken`: tokens before these may be on their way.
        """
        if self._ends is None:
            self._ends = mask_of(self._end_ids, lines.shape[1])
            self._allowed = None if self._allowed_ids is None else mask_of(self._allowed_ids, lines.shape[1])
        self.limit = None
        if self.grammar is None:
            lines[:] = self._ends
            return
        for level, words in enumerate(lines):
            if is_complete := bool(words[self._model_end // 32] >> self._model_end % 32 & 1):
                words |= self._ends  # the request's own ends may be text to the grammar
            if self._allowed is not None:
                words &= self._allowed
            if self._num_missing > level:
                words &= ~self._ends
            if not words.any():
                words[:] = self._ends
                if not is_complete:
                    self.limit = level
                    return

    def accept_token(self, token_id: int) -> bool:
        """Take in a token that was sampled. False: it does not count, for the answer is broken."""
        self._num_missing -= 1
        if token_id in self._end_ids and self._grammar.is_accepting():
            self.is_over = True
        elif self.grammar is not None:
            self.is_broken = not self._grammar.accept_token(token_id)
            if isinstance(self._grammar, ReasoningPrefix) and self._grammar.has_ended:
                self._grammar = self._grammar.behind
        return not self.is_broken

    def num_allowed(self, drafted: Sequence[int]) -> int:
        """How many of these tokens, from the first on, the grammar allows. An end is no draft token: nothing is behind it."""
        first_end = next((i for i, token in enumerate(drafted) if token in self._end_ids), len(drafted))
        return self._grammar.num_allowed(drafted[:first_end]) if self.grammar is not None else 0

    def forced(self) -> list[int]:
        """The tokens that come next, as far as there is no choice."""
        return self._grammar.forced() if self.grammar is not None and self._allowed_ids is None else []

    def copy(self) -> GrammarMatcher:
        """The matcher of another answer at the same place."""
        other = copy(self)
        other._grammar = self._grammar.copy()
        return other


def mask_of(ids: Collection[int], width: int) -> Bitmask:
    """The mask [width] of these tokens."""
    words, at = np.zeros(width, np.int32), np.fromiter(ids, np.int64, len(ids))
    np.bitwise_or.at(words.view(np.uint32), at // 32, np.uint32(1) << (at % 32).astype(np.uint32))
    return words
