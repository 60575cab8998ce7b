"""How far an answer has come in its form, and what may come next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from folovllm.structured.choice import choice_mask
from folovllm.structured.vocabulary import Vocabulary

Words = npt.NDArray[np.int32]  # [ceil(V / 32)]: bit t % 32 of word t // 32 is token t's


class Matcher(Protocol):
    """One answer's place in a form.

    Attributes:
        sees_ahead: whether masks behind tokens that may come can be made together, without copies (`fill_together`).
    """

    sees_ahead: ClassVar[bool]

    def fill(self, words: Words) -> None:
        """Write the mask of the tokens that may come next over `words`; of those that end an answer, the model's own."""

    def is_accepting(self) -> bool:
        """Whether the answer may end here."""

    def advance(self, token_id: int) -> bool:
        """Take in a token. False: the form does not allow it, or has become too complex to be followed."""

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, one after the other, the form allows. The answer stays where it is."""

    def forced(self) -> list[int]:
        """The tokens that come next, as far as the form leaves no choice: `fill` would allow each of them alone. No ends."""

    def copy(self) -> Matcher:
        """Another answer at the same place."""


class ChoiceMatcher:
    """An answer that must be one of a few texts."""

    sees_ahead: ClassVar[bool] = False

    def __init__(
        self, vocabulary: Vocabulary, choices: Collection[bytes], end_ids: Sequence[int], so_far: bytes = b""
    ) -> None:
        self._vocabulary, self._choices = vocabulary, choices
        self._end_ids, self._so_far = end_ids, so_far

    def fill(self, words: Words) -> None:
        """As `Matcher`."""
        words.fill(0)
        set_bits(words, choice_mask(self._vocabulary.ids_of, self._choices, self._so_far, self._end_ids))

    def is_accepting(self) -> bool:
        """As `Matcher`."""
        return self._so_far in self._choices

    def advance(self, token_id: int) -> bool:
        """As `Matcher`."""
        self._so_far += self._vocabulary.bytes_of.get(token_id, b"\xff")  # no text holds this byte
        return any(choice.startswith(self._so_far) for choice in self._choices)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """As `Matcher`."""
        ahead = self.copy()
        return next((i for i, token in enumerate(token_ids) if not ahead.advance(token)), len(token_ids))

    def forced(self) -> list[int]:
        """As `Matcher`: none, for a text may be cut into tokens in several ways."""
        return []

    def copy(self) -> ChoiceMatcher:
        """As `Matcher`."""
        return ChoiceMatcher(self._vocabulary, self._choices, self._end_ids, self._so_far)


def set_bits(words: Words, ids: Collection[int]) -> None:
    """Set the tokens' bits."""
    at = np.fromiter(ids, np.int64, len(ids))
    np.bitwise_or.at(words.view(np.uint32), at // 32, np.uint32(1) << (at % 32).astype(np.uint32))
