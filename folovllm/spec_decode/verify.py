"""Several draws of one sequence in a step: which they are, and how many of their tokens count.

A share of a sequence with a draft computes its newest token and k draft tokens, and draws k + 1 tokens: one after each of
them. Noise depends on (seed, position, token id) alone. So each draw is the very one that a step of its own would make,
as long as all draft tokens before it are what was drawn. No draw has to be rejected by chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from folovllm.step.schedule import Share

Ints = npt.NDArray[np.int64]
NO_GUESS = -1
FEW = 256


def most_draws(max_num_seqs: int) -> int:
    """The most tokens that a step with drafts samples: what there is memory for. Where so many run, drafts do not pay."""
    return max(max_num_seqs, FEW)


def accept(drawn: Sequence[int], guesses: Sequence[int]) -> list[int]:
    """The tokens that plain decoding would have drawn: the longest prefix of `drawn` that was guessed, and one more.

    Args:
        drawn: [k + 1]; token i was drawn as if the first i guesses were right.
        guesses: [k].

    Returns:
        1 to k + 1 tokens. The last one was drawn after right guesses alone, so it counts although nobody guessed it.
    """
    right = 0
    while right < len(guesses) and drawn[right] == guesses[right]:
        right += 1
    return list(drawn[: right + 1])


@dataclass(slots=True, frozen=True, eq=False)
class Draws:
    """All draws of a step, R of them: share by share, and of each share in the order of positions."""

    share: Ints  # [R] index of the share
    level: Ints  # [R] which of its share's draws: 0, 1, ...
    token: Ints  # [R] index in the step of the token that it is drawn after
    position: Ints  # [R] of the token to draw, in its sequence
    guess: Ints  # [R] what it must be for the next one to count; NO_GUESS for the last of a share

    @classmethod
    def of_shares(cls, shares: Sequence[Share]) -> Draws:
        """Of shares that bring all their tokens."""
        counts = [(share.num_new_tokens, share.num_draws, share.end) for share in shares]
        num_new_tokens, num_draws, ends = np.array(counts, np.int64).T
        return cls.of(num_new_tokens, num_draws, ends, np.concatenate([share.token_ids for share in shares]))

    @classmethod
    def of(cls, num_new_tokens: Ints, num_draws: Ints, ends: Ints, token_ids: npt.NDArray[np.int32]) -> Draws:
        """Of shares [S] and their tokens [T], end to end."""
        share = np.repeat(np.arange(len(num_draws)), num_draws)
        level = np.arange(len(share)) - (num_draws.cumsum() - num_draws)[share]
        left = (num_draws[share] - 1 - level).astype(np.int64)  # draws of the share that come after it
        token = num_new_tokens.cumsum()[share] - 1 - left
        guess = np.where(left > 0, token_ids[np.minimum(token + 1, len(token_ids) - 1)], NO_GUESS)
        return cls(share, level, token, ends[share] - left, guess)

    def levels(self) -> Iterator[Ints]:
        """The first draws of all shares, then the second ones of those that have two, and so on: indices of draws."""
        for level in range(int(self.level.max(initial=-1)) + 1):
            yield (self.level == level).nonzero()[0]
