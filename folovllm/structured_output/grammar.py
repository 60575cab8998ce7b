"""How far an answer has come in its form, and what may come next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from folovllm.structured_output.choice import choice_mask
from folovllm.structured_output.vocabulary import Vocabulary

Bitmask = npt.NDArray[np.int32]  # [ceil(V / 32)]: bit t % 32 of word t // 32 is token t's
NO_TEXT = b"\xff"  # a byte that no text holds: it stands behind all texts that go on from the same beginning
MOST_MASKS = 64  # that are kept of a choice


class Grammar(Protocol):
    """One answer's place in a form.

    Attributes:
        sees_ahead: whether masks behind tokens that may come can be made together, without copies (`fill_bitmasks`).
    """

    sees_ahead: ClassVar[bool]

    def fill(self, words: Bitmask) -> None:
        """Write the mask of the tokens that may come next over `words`; of those that end an answer, the model's own."""

    def is_accepting(self) -> bool:
        """Whether the answer may end here."""

    def accept_token(self, token_id: int) -> bool:
        """Take in a token. False: the form does not allow it, or has become too complex to be followed."""

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, one after the other, the form allows. The answer stays where it is."""

    def forced(self) -> list[int]:
        """The tokens that come next, as far as the form leaves no choice: `fill` would allow each of them alone. No ends."""

    def copy(self) -> Grammar:
        """Another answer at the same place."""


class Choices:
    """The texts that an answer may be, in order, and the masks that answers needed; all answers of a form share them."""

    def __init__(self, vocabulary: Vocabulary, choices: Collection[bytes], end_ids: Sequence[int]) -> None:
        self.vocabulary, self._sorted, self._end_ids = vocabulary, sorted(choices), end_ids
        self._masks: dict[bytes, Bitmask] = {}  # by the answer so far; the newest last

    def begin_with(self, so_far: bytes) -> Sequence[bytes]:
        """Those of the choices that begin with these bytes, found without a look at the others."""
        first = bisect_left(self._sorted, so_far)
        return self._sorted[first : bisect_left(self._sorted, so_far + NO_TEXT, first)]

    def has(self, so_far: bytes) -> bool:
        """Whether this is one of the choices."""
        first = bisect_left(self._sorted, so_far)
        return self._sorted[first : first + 1] == [so_far]

    def can_become(self, so_far: bytes) -> bool:
        """Whether one of the choices begins with these bytes."""
        first = bisect_left(self._sorted, so_far)
        return first < len(self._sorted) and self._sorted[first].startswith(so_far)

    def mask(self, so_far: bytes, width: int) -> Bitmask:
        """The mask [width] of an answer that is `so_far`."""
        if so_far not in self._masks:
            within_reach = {choice[: len(so_far) + self.vocabulary.longest] for choice in self.begin_with(so_far)}
            words = np.zeros(width, np.int32)
            set_bits(words, choice_mask(self.vocabulary.ids_of, within_reach, so_far, self._end_ids))
            self._masks[so_far] = words
            if len(self._masks) > MOST_MASKS:
                del self._masks[next(iter(self._masks))]
        return self._masks[so_far]


class ChoiceGrammar:
    """An answer that must be one of a few texts."""

    sees_ahead: ClassVar[bool] = False

    def __init__(self, choices: Choices, so_far: bytes = b"") -> None:
        self._choices, self._so_far = choices, so_far

    def fill(self, words: Bitmask) -> None:
        """As `Grammar`."""
        words[:] = self._choices.mask(self._so_far, len(words))

    def is_accepting(self) -> bool:
        """As `Grammar`."""
        return self._choices.has(self._so_far)

    def accept_token(self, token_id: int) -> bool:
        """As `Grammar`."""
        self._so_far += self._choices.vocabulary.bytes_of.get(token_id, NO_TEXT)
        return self._choices.can_become(self._so_far)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """As `Grammar`."""
        ahead = self.copy()
        return next((i for i, token in enumerate(token_ids) if not ahead.accept_token(token)), len(token_ids))

    def forced(self) -> list[int]:
        """As `Grammar`: none, for a text may be cut into tokens in several ways."""
        return []

    def copy(self) -> ChoiceGrammar:
        """As `Grammar`."""
        return ChoiceGrammar(self._choices, self._so_far)


def set_bits(words: Bitmask, ids: Collection[int]) -> None:
    """Set the tokens' bits."""
    at = np.fromiter(ids, np.int64, len(ids))
    np.bitwise_or.at(words.view(np.uint32), at // 32, np.uint32(1) << (at % 32).astype(np.uint32))
