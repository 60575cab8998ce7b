"""Verification: how many of the tokens that a sequence sampled in one step count.

A sequence with a draft computes its newest token and k draft tokens, and samples k + 1 tokens: one after each of
them. Noise depends on (seed, position, token id) alone. So each sample is the one that a step of its own would make,
as long as all draft tokens before it are accepted. No draft token is rejected by chance.
"""

from __future__ import annotations

from collections.abc import Sequence

FEW = 256


def max_samples(max_num_seqs: int) -> int:
    """Return how many tokens the running sequences may sample in a step with drafts: logits for more have no memory."""
    return max(max_num_seqs, FEW)


def accept(sampled: Sequence[int], draft: Sequence[int]) -> list[int]:
    """Return the tokens that plain decoding would have sampled: the accepted draft tokens, and one more.

    Args:
        sampled: [k + 1]; token i was sampled as if the first i draft tokens were accepted.
        draft: [k]. A draft token is accepted if it equals the sampled token, and all before it were accepted.

    Returns:
        1 to k + 1 tokens. The last one was sampled after accepted tokens alone, so it counts although it was not drafted.
    """
    num_accepted = 0
    while num_accepted < len(draft) and sampled[num_accepted] == draft[num_accepted]:
        num_accepted += 1
    return list(sampled[: num_accepted + 1])
