"""Several draws of one sequence in a step: which they are, and how many of their tokens count.

A share of a sequence with a draft computes its newest token and k draft tokens, and draws k + 1 tokens: one after each of
them. Noise depends on (seed, position, token id) alone. So each draw is the very one that a step of its own would make,
as long as all draft tokens before it are what was drawn. No draw has to be rejected by chance.
"""

from __future__ import annotations

from collections.abc import Sequence

FEW = 256


def most_draws(max_num_seqs: int) -> int:
    """The most tokens that running sequences sample in a step with drafts: what there is memory for. Where so many run, drafts do not pay."""
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
