"""Which tokens an answer with a grammar may go on with, after all else that its request asks for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from folovllm.electives.structured_output.vocabulary import Vocabulary

Bitmask = npt.NDArray[np.int32]  # [ceil(V / 32)]: bit t % 32 of word t // 32 is token t's


class Grammar(ABC):
    """One answer's place in a grammar.

    Attributes:
        sees_ahead: whether masks behind tokens that may come can be made together, without copies (`fill_bitmasks`).
    """

    sees_ahead: ClassVar[bool] = False

    @abstractmethod
    def fill(self, words: Bitmask) -> None:
        """Write the mask of the tokens that may come next over `words`; of those that end an answer, the model's own."""

    @abstractmethod
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""

    @abstractmethod
    def accept_token(self, token_id: int) -> bool:
        """Take in a token. False: the grammar does not allow it, or has become too complex to be followed."""

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


class ReasoningPrefix:
    """The free text before an answer has a grammar: up to a closing text, "</think>" say, wherever tokens cut it.

    New lines in the token that ends it belong to neither. A token that brings anything else behind it is forbidden.
    """

    def __init__(self, vocabulary: Vocabulary, closing: bytes) -> None:
        self._vocabulary, self._closing, self._tail = vocabulary, closing, b""
        self._enders = enders(vocabulary, closing)

    def accept_token(self, token_id: int) -> bool:
        """Take in a token. Whether the closing text has come."""
        text = self._with(token_id)
        self._tail = text[-len(self._closing) :]
        return self._closing in text

    def forbidden(self) -> list[int]:
        """Tokens that would end the text in the middle."""
        near = {id_ for n, ids in enumerate(self._enders) if self._tail.endswith(self._closing[:n]) for id_ in ids}
        return [id_ for id_ in near if self._with(id_).partition(self._closing)[2].strip(b"\n")]

    def _with(self, token_id: int) -> bytes:
        return self._tail + self._vocabulary.bytes_of.get(token_id, b"")


def enders(vocabulary: Vocabulary, closing: bytes) -> list[list[int]]:
    """The tokens that bring the end of `closing` and something behind it, by how many bytes of it have come before."""
    last = closing[-1]
    longer = [(id_, text) for id_, text in vocabulary.bytes_of.items() if last in text[:-1]]
    whole = [id_ for id_, text in longer if closing in text]
    return [whole, *([id_ for id_, text in longer if text.startswith(closing[n:])] for n in range(1, len(closing)))]


class GrammarMatcher:
    """One answer's way through its grammar.

    The answer may end where the grammar is complete, and then only ends: by any of `end_ids`. `min_tokens` holds as far as the
    grammar has something else to offer. Where it has not, ends are repeated until there are enough: they are no text.
    """

    def __init__(
        self,
        grammar: Grammar,
        end_ids: Collection[int],
        *,
        model_end_ids: Collection[int] = (),
        min_tokens: int = 0,
        allowed: Bitmask | None = None,
        prefix: ReasoningPrefix | None = None,
    ) -> None:
        """`allowed` [ceil(V / 32)]: the only tokens that the request wants at all.

        `model_end_ids`: those of `end_ids` that are never text. Where the grammar is complete, the grammar's mask has them.
        """
        self._grammar, self._end_ids, self._allowed, self._prefix = grammar, end_ids, allowed, prefix
        self._model_end_ids = np.array(model_end_ids, np.int32)
        self._num_missing = min_tokens  # tokens that must come before the answer may end
        self._ends: Bitmask | None = None  # the mask of `end_ids`, once it was needed
        self._forced: list[int] | None = None  # what is known of `forced`
        self.is_over = False  # it may only end
        self.is_broken = False  # nothing leads to an answer of this grammar any more, and all that counts was taken in

    @property
    def grammar(self) -> Grammar | None:
        """Whose mask `finish` starts from; None where the grammar has no say: before it begins, and when it is over."""
        return None if self.is_over or self.is_broken or self._prefix is not None else self._grammar

    def finish(self, words: Bitmask) -> bool:
        """From the mask of the grammar, if there is one, to that of all the request asks for, in place: [ceil(V / 32)].

        Returns whether an answer of this grammar can still come. If not, `words` has the ends alone; and what is sampled with
        them must not count: `is_broken` is set by the step that sampled it, since tokens before it may be on their way.
        """
        if self.is_over or self.is_broken:
            words[:] = self._end_words(words)
            return self.is_over
        if self._prefix is not None:
            words.fill(0)
            set_bits(words, self._prefix.forbidden())
            np.invert(words, out=words)
        elif self._grammar.is_accepting():
            words |= self._end_words(words)
        if self._allowed is not None:
            words &= self._allowed
        if self._num_missing > 0:
            words &= ~self._end_words(words)
        if words.any():
            return True
        words[:] = self._end_words(words)
        return self._prefix is None and self._grammar.is_accepting()

    def _end_words(self, words: Bitmask) -> Bitmask:
        """The mask of the tokens that end an answer, as long as `words`."""
        if self._ends is None:
            self._ends = np.zeros_like(words)
            set_bits(self._ends, self._end_ids)
        return self._ends

    def accept_token(self, token_id: int) -> None:
        """Take in a token that was sampled."""
        self._num_missing -= 1
        self._forced = self._forced[1:] or None if self._forced and self._forced[0] == token_id else None
        if self.is_over or self.is_broken:
            return
        if self._prefix is not None:
            if self._prefix.accept_token(token_id):
                self._prefix = None
        elif token_id in self._end_ids and self._grammar.is_accepting():
            self.is_over = True
        else:
            self.is_broken = not self._grammar.accept_token(token_id)

    def num_allowed(self, drafted: Sequence[int]) -> int:
        """How many of these tokens, from the first on, the grammar allows. An end is no draft token: nothing is behind it."""
        if self.is_over or self.is_broken:
            return 0
        first_end = next((i for i, token in enumerate(drafted) if token in self._end_ids), len(drafted))
        return first_end if self._prefix is not None else self._grammar.num_allowed(drafted[:first_end])

    def forced(self) -> list[int]:
        """The tokens that come next, as far as there is no choice."""
        if self._forced is None:
            self._forced = [] if self.grammar is None or self._allowed is not None else self._grammar.forced()
        return self._forced

    @property
    def sees_ahead(self) -> bool:
        """Whether masks behind draft tokens can be made together, and only the ends of the answer added (`finish_ahead`)."""
        is_plain = self.grammar is not None and self._allowed is None and self._num_missing <= 0
        return is_plain and self._grammar.sees_ahead

    def finish_ahead(self, lines: Bitmask) -> int | None:
        """Add the ends to the masks [n, ceil(V / 32)] of the next token and of those behind draft tokens, in place.

        For a matcher that `sees_ahead`. The grammar is complete where its mask has an end of the model: the request's own ends
        may be text to it. Where no token leads to an answer, the mask gets the ends alone. Returns the first such index, or None.
        """
        ends, own = self._end_words(lines[0]), self._model_end_ids
        lines[(lines[:, own // 32] >> own % 32 & 1).any(axis=1)] |= ends
        nowhere = (np.bitwise_or.reduce(lines, axis=1) == 0).nonzero()[0]
        lines[nowhere] = ends
        return int(nowhere[0]) if len(nowhere) else None

    def ahead(self, drafted: Sequence[int]) -> Iterator[GrammarMatcher]:
        """The matcher itself, and others at the places behind the draft tokens, up to the first that leads nowhere."""
        place = self
        yield place
        for token in drafted:
            place = place.behind([token])
            yield place
            if place.is_broken:
                break

    def behind(self, token_ids: Sequence[int]) -> GrammarMatcher:
        """The matcher itself, or if there are any tokens another one behind them."""
        place = self.copy() if token_ids else self
        for token in token_ids:
            place.accept_token(token)
        return place

    def copy(self) -> GrammarMatcher:
        """The matcher of another answer at the same place."""
        other = copy(self)
        other._grammar, other._prefix = self._grammar.copy(), copy(self._prefix)
        return other


def set_bits(words: Bitmask, ids: Collection[int]) -> None:
    """Set the tokens' bits."""
    at = np.fromiter(ids, np.int64, len(ids))
    np.bitwise_or.at(words.view(np.uint32), at // 32, np.uint32(1) << (at % 32).astype(np.uint32))
