"""The engine's only source of randomness: a function of (seed, position, token id), with no state.

So a request samples the same tokens alone or in a batch, after preemption, at every milestone and on any number of ranks.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF  # keeps the low 32 bits; what a negative int64 has above them is cut off, too
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox_4x32_10(counter: list[torch.Tensor], key: list[torch.Tensor]) -> list[torch.Tensor]:
    """Philox-4x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    Returns four int64 tensors of random 32-bit words, from four such `counter` words and two `key` words of one (broadcast) shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # 64-bit products; wrapping keeps all their bits
        c0, c1 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK
        c2, c3 = ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1, c2, c3]


def uniform(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, first_id: int = 0) -> torch.Tensor:
    """Return uniform numbers in the open interval (0, 1), one for each token id of each row.

    Philox makes four words of a counter and a key, so four neighbouring ids share a call: token id `v` takes word `v % 4` of
    counter (v // 4, position, 0, 0). The key is the seed. Adding a half to 23 random bits excludes 0 and 1 in float32.

    Seeds and positions [S] int64 -> [S, V] float32. `first_id`: token id of column 0, a multiple of 4 (a rank's share).
    """
    block = first_id // 4 + torch.arange(-(-vocab_size // 4), device=seeds.device)[None, :]  # [1, V/4]
    seeds, positions = seeds[:, None], positions[:, None]  # [S, 1] each
    zero = torch.zeros_like(block)
    # The first mask is for torch.compile only: without it its code multiplies in 32 bits.
    words = philox_4x32_10([block & _MASK, positions, zero, zero], [seeds & _MASK, (seeds >> 32) & _MASK])
    bits = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]  # four of [S, V/4] -> [S, V]
    return ((bits >> 9).float() + 0.5) * 2.0**-23


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, first_id: int = 0) -> torch.Tensor:
    """Return standard Gumbel noise [S, V]: argmax(log p + noise) is a sample from p (Gumbel-max; Maddison et al. 2014)."""
    return -torch.log(-torch.log(uniform(seeds, positions, vocab_size, first_id)))
