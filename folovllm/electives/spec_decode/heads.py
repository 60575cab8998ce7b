"""The arithmetic of a draft head (EAGLE-3, Li et al., arXiv 2503.01840; MTP, DeepSeek-V3, arXiv 2412.19437).

A head reads pairs: a token, and the target's hidden state of the token before it. After a verify step some hidden states belong
to rejected tokens. All functions do device work of fixed shapes, so that a CUDA graph can capture them.
"""

from __future__ import annotations

import torch


def head_inputs(
    positions: torch.Tensor, hidden: torch.Tensor, sequence: torch.Tensor, before: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the position and the hidden state that go with each token of a step, as a draft head pairs them.

    The target computed some tokens of each sequence, which follow one another. The head pairs each token with the hidden state
    of the token before it. The pair has the position of *that* token, one less than the token's own. The token before a
    sequence's first one is not in this step: an earlier step kept its hidden state. (A sequence's last hidden state has no pair
    in this step, since the token behind it is not known yet.)

    By hand: sequence 0 brings tokens 4, 5 and 6, sequence 1 its token 9. `positions` is [4, 5, 6, 9], `sequence` [0, 0, 0, 1].
    With hidden states a, b, c, d and `before` [x, y], the pairs have positions [3, 4, 5, 8] and hidden states [x, a, b, y].

    Args:
        positions: [T] int64, of the step's tokens. hidden: [T, H], the target's hidden states.
        sequence: [T] int64, ascending: the sequence of each token.
        before: [S, H], the hidden state of the token before each sequence's first one in this step.

    Returns:
        Positions [T] int64 (-1 for a text's very first token, which has no token before it) and hidden states [T, H].
    """
    is_first = torch.ones_like(sequence, dtype=torch.bool)
    is_first[1:] = sequence[1:] != sequence[:-1]
    return positions - 1, torch.where(is_first[:, None], before[sequence], hidden.roll(1, 0))


def chain_places(
    newest: torch.Tensor, block_tables: torch.Tensor, block_size: int, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the position of each pair in a chain of `k` drafts, and the slot of its K and V.

    The newest token of a sequence is token n: sampled, and not computed. The chain's first pair is that token with the hidden
    state of token n - 1, at position n - 1; it drafts token n + 1. Each later pair has the token that was drafted last, one
    position later. Position p is at p % block_size in block `block_tables[p // block_size]`.

    By hand: blocks of 4 tokens, the table [7, 2], newest token 4, three drafts. The pairs have positions 3, 4 and 5, in slots
    7 * 4 + 3 = 31, 2 * 4 + 0 = 8 and 9. They draft tokens 5, 6 and 7.

    A chain may be longer than the text has room for: positions stop at the table's last one, and what is drafted there is
    never used. A sequence of padding has newest token -1. No position is below 0, and its slots are -1, which are skipped.

    Args:
        newest: [S] int64. block_tables: [S, max_blocks] int32, which has blocks for all positions.

    Returns:
        Positions [k, S] int64, and slots [k, S] int64.
    """
    last = block_tables.shape[1] * block_size - 1
    positions = (newest - 1 + torch.arange(k, device=newest.device)[:, None]).clamp(0, last)
    blocks = block_tables[torch.arange(len(newest), device=newest.device), positions // block_size].long()
    return positions, torch.where(newest < 0, -1, blocks * block_size + positions % block_size)


class KeptStates:
    """The hidden states of each row's last tokens, in a ring buffer: those that the next step may need.

    When a verify step computes its hidden states, nobody knows yet which of its tokens are accepted. So the last `depth` states
    of each row are kept, accepted or not. The next step begins with the newest token, n: so token n - 1 was accepted, and all
    tokens after it were rejected. Their states stay until others overwrite them.

    Attributes:
        hidden: [rows + 1, depth, H]; the state of position p is in place p % depth.
        positions: [rows + 1, depth] int64, the position whose state is in each place, -1 for none. The last row is for padding:
            what it holds belongs to no position.
    """

    def __init__(self, num_rows: int, depth: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """`depth`: at least k + 1, the most tokens of a sequence in a verify step."""
        self.hidden = torch.zeros(num_rows + 1, depth, hidden_size, dtype=dtype, device=device)
        self.positions = torch.full((num_rows + 1, depth), -1, dtype=torch.int64, device=device)

    def forget(self, rows: torch.Tensor) -> None:
        """Drop the states of `rows` [n], where other sequences begin."""
        self.positions[rows] = -1

    def keep(self, rows: torch.Tensor, positions: torch.Tensor, ends: torch.Tensor, hidden: torch.Tensor) -> None:
        """Keep the hidden states of each sequence's last `depth` tokens of a step.

        By hand: depth 4; row 2 computed tokens 0 to 5, so `positions` is 0 to 5 and `ends` is 6 for all of them. Tokens 2 to 5
        are kept, in places 2, 3, 0 and 1. Where tokens of a step share a place, the last one must stay; so what is not
        among the last `depth` goes to the padding row, under position -1. Tokens of padding have that row already.

        Args:
            rows: [T] int64, each token's row. positions: [T] int64. hidden: [T, H].
            ends: [T] int64, the length of each token's sequence after the step.
        """
        padding, depth = len(self.hidden) - 1, self.hidden.shape[1]
        is_kept = positions >= ends - depth
        rows, places = torch.where(is_kept, rows, padding), positions % depth
        self.hidden[rows, places] = hidden
        self.positions[rows, places] = torch.where(rows < padding, positions, -1)

    def before(self, rows: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden state of the token before `starts` in each row, and whether it is there.

        By hand: a verify step computed tokens 7, 8, 9 and 10, and one draft was accepted: token 8. So the next step starts at a
        new token 9, and needs the state of token 8. The states of 9 and 10 belong to rejected tokens.

        Nothing is there before a text's first token, or if the token before was found in the prefix cache.

        Args:
            rows: [S] int64. starts: [S] int64, the position of each sequence's first token in the step that begins.

        Returns:
            [S, H], of any value where it is not there, and [S] bool.
        """
        wanted = starts - 1
        places = wanted % self.hidden.shape[1]
        return self.hidden[rows, places], (wanted >= 0) & (self.positions[rows, places] == wanted)
