"""Answers that must be one of a few texts: which tokens may come next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from functools import lru_cache

from folovllm.electives.structured_output.grammar_matcher import Bitmask, Grammar, mask_of
from folovllm.electives.structured_output.vocabulary import Vocabulary

NO_TEXT = b"\xff"  # a byte that no text holds: it stands behind all texts that go on from the same beginning
MOST_MASKS = 64  # that are kept of a choice


def choice_mask(
    vocabulary: Mapping[bytes, Sequence[int]], choices: Collection[bytes], so_far: bytes, end_ids: Sequence[int]
) -> list[int]:
    """The tokens with which an answer that is `so_far` may go on if it must become one of `choices`.

    A token may come if `so_far` and its bytes together begin one of the choices, or are all of it; a token without bytes never
    may. How a choice is cut into tokens is left to the model: "yes" may come as "yes", as "y" and "es", or letter by letter.
    Where `so_far` is one of the choices the answer may end, beside going on where a longer choice begins with it.

    A vocabulary has 150,000 tokens and a choice a few bytes: so look up what each choice can go on with, and do not try
    every token.

    Args:
        vocabulary: token ids by the bytes that they stand for; several tokens may have the same.
        choices: what the answer may be, none of them empty.
        so_far: the bytes of the answer; they begin one of the choices.
        end_ids: tokens that end an answer.

    Returns:
        Their ids, ascending, each once.
    """
    allowed = set(end_ids) if so_far in choices else set()
    for choice in choices:
        if choice.startswith(so_far):
            rest = choice[len(so_far) :]
            for length in range(1, len(rest) + 1):
                allowed.update(vocabulary.get(rest[:length], ()))
    return sorted(allowed)


class ChoiceGrammar(Grammar):
    """An answer that must be one of a few texts. It forces no tokens: a text may be cut into tokens in several ways.

    Its copies share the texts, and the masks that answers needed.
    """

    def __init__(self, vocabulary: Vocabulary, choices: Collection[bytes], end_ids: Sequence[int]) -> None:
        self._vocabulary, self._choices, self._end_ids = vocabulary, sorted(choices), end_ids
        self._mask = lru_cache(MOST_MASKS)(self._make_mask)
        self._so_far = b""

    def fill(self, lines: Bitmask, drafts: Sequence[int]) -> None:
        place = self.copy()
        for words, token in zip(lines, [*drafts, None], strict=False):
            words[:] = self._mask(place._so_far, len(words))
            if token is None or not place.accept_token(token):
                break

    def is_accepting(self) -> bool:
        return self._so_far in self._begin_with(self._so_far)[:1]

    def accept_token(self, token_id: int) -> bool:
        self._so_far += self._vocabulary.bytes_of.get(token_id, NO_TEXT)
        return bool(self._begin_with(self._so_far))

    def copy(self) -> ChoiceGrammar:
        return copy(self)

    def _begin_with(self, so_far: bytes) -> Sequence[bytes]:
        """Those of the choices that begin with these bytes, the shortest first; found without a look at the others."""
        first = bisect_left(self._choices, so_far)
        return self._choices[first : bisect_left(self._choices, so_far + NO_TEXT, first)]

    def _make_mask(self, so_far: bytes, width: int) -> Bitmask:
        """The mask [width] of an answer that is `so_far`. A token that ends an answer is no text of it."""
        within_reach = {choice[: len(so_far) + self._vocabulary.longest] for choice in self._begin_with(so_far)}
        allowed = choice_mask(self._vocabulary.ids_of, within_reach, so_far, self._end_ids)
        return mask_of(allowed if so_far in within_reach else {*allowed} - {*self._end_ids}, width)
