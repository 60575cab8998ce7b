"""Several samples of one sequence in a step: which they are, and how many of their tokens count.

A sequence with a draft computes its newest token and k draft tokens, and samples k + 1 tokens: one after each of
them. Noise depends on (seed, position, token id) alone. So each sample is the very one that a step of its own would make,
as long as all draft tokens before it are what was sampled. No sample has to be rejected by chance.
"""

from __future__ import annotations

from collections.abc import Sequence

FEW = 256


def max_samples(max_num_seqs: int) -> int:
    """The most tokens that running sequences sample in a step with drafts: what there is memory for. Where so many run, drafts do not pay."""
    return max(max_num_seqs, FEW)


def accept(sampled: Sequence[int], guesses: Sequence[int]) -> list[int]:
    """The tokens that plain decoding would have sampled: the longest prefix of `sampled` that was guessed, and one more.

    Args:
        sampled: [k + 1]; token i was sampled as if the first i guesses were right.
        guesses: [k].

    Returns:
        1 to k + 1 tokens. The last one was sampled after right guesses alone, so it counts although nobody guessed it.
    """
    right = 0
    while right < len(guesses) and sampled[right] == guesses[right]:
        right += 1
    return list(sampled[: right + 1])
