"""Attention whose sums are always split at the same places, whatever else is in the batch.

A kernel for decode divides a long context among programs, whose number depends on the batch; prefill goes through the context in
tiles that depend on the chunk. Here both do the same work: tiles of `QUERIES` tokens over tiles of `CONTEXT` positions, which
are counted from the beginning of the sequence, in groups of `ITEMS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from folovllm.attention.backends.abstract import AttentionBackend, AttentionConfig
from folovllm.attention.backends.torch_naive import reshape_and_cache_kv
from folovllm.step.forward_batch import ForwardBatch

QUERIES = 8  # neighbouring tokens of a sequence
CONTEXT = 64  # positions that are added up at once
ITEMS = 8  # tiles of queries in one call

Tile = tuple[int, int, int, int]  # sequence, index of the first token in the step, its position, number of tokens


def attend_in_tiles(
    query: torch.Tensor,  # [n, Hkv, R, D]
    key: torch.Tensor,  # [n, Hkv, L, D], L a multiple of CONTEXT
    value: torch.Tensor,  # [n, Hkv, L, D], zero where a sequence has no token
    positions: torch.Tensor,  # [n, R]
    scale: float,
) -> torch.Tensor:
    """softmax(scale * Q K^T) V by online softmax over tiles of `CONTEXT` positions, which begin at 0, `CONTEXT`, ...

    A query at position p sees positions 0 to p. Its result is the same, bit by bit, for every `L` above p: a tile that it does not
    see adds exactly nothing. So no tile may be skipped, merged or begun elsewhere for the sake of the batch.

    With m the largest score so far, l the sum of exp(score - m) and acc the sum of exp(score - m) * value, all float32, a tile
    multiplies l and acc by exp(m_before - m), then adds its own part. The weights go to the dtype of `value` for their product.
    The product Q K^T may be taken in the dtype of `query`, whose range it fits (65,504 in float16), and is float32 before `scale`.

    Returns:
        acc / l, [n, Hkv, R, D], in the dtype of `value`.
    """
    largest = torch.full(query.shape[:-1], -torch.inf, device=query.device)  # [n, Hkv, R]
    total = torch.zeros_like(largest)
    result = torch.zeros(query.shape, device=query.device)
    for start in range(0, key.shape[2], CONTEXT):
        tile = slice(start, start + CONTEXT)
        seen = torch.arange(start, start + CONTEXT, device=query.device) <= positions[:, None, :, None]
        scores = (query @ key[:, :, tile].transpose(-1, -2)).float() * scale  # [n, Hkv, R, CONTEXT]
        scores = scores.masked_fill(~seen, -torch.inf)
        before, largest = largest, torch.maximum(largest, scores.amax(-1))
        weights, decay = (scores - largest[..., None]).exp(), (before - largest).exp()
        total = total * decay + weights.sum(-1)
        result = result * decay[..., None] + (weights.to(value.dtype) @ value[:, :, tile]).float()
    return (result / total[..., None]).to(value.dtype)


@dataclass(slots=True, frozen=True)
class Group:
    """`ITEMS` tiles of queries, of any sequences. The last group is filled up with copies of the step's first token."""

    tokens: torch.Tensor  # [n, QUERIES]: their indices in the step
    is_real: torch.Tensor  # [n, QUERIES]: which are no padding
    positions: torch.Tensor  # [n, G * QUERIES]: for each of the query heads that share a KV head
    blocks: torch.Tensor  # [n, L]: where position p of the sequence is in the cache ...
    offsets: torch.Tensor  # [L]: ... and in its block
    is_held: torch.Tensor  # [n, 1, L, 1]: which positions the sequence has


class InvariantBackend(AttentionBackend):
    """Computes each query tile with `attend_in_tiles`. Its result depends on the sequence's own tokens alone."""

    name = "batch_invariant"

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self._groups: list[Group] = []

    def plan(self, batch: ForwardBatch) -> None:
        """Cut the step's tokens into tiles. The host knows all lengths."""
        self._groups = list(groups_of(batch, self.config))

    def store(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        reshape_and_cache_kv(key, value, kv_cache, slot_mapping)

    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        result = torch.zeros_like(query)
        for group in self._groups:
            result[group.tokens[group.is_real]] = self._attend(group, query, kv_cache)[group.is_real]
        return result

    def _attend(self, group: Group, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        """[T, Hq, D] -> [n, QUERIES, Hq, D]."""
        key, value = kv_cache[:, group.blocks, group.offsets].transpose(2, 3)  # [n, Hkv, L, D]
        value = torch.where(group.is_held, value, 0)  # an empty slot may hold NaN, and 0 times NaN is NaN
        q = query[group.tokens].unflatten(2, (key.shape[1], -1)).permute(0, 2, 3, 1, 4)  # [n, Hkv, G, QUERIES, D]
        found = attend_in_tiles(q.flatten(2, 3), key, value, group.positions, self.config.scale)
        return found.view(q.shape).permute(0, 3, 1, 2, 4).flatten(2, 3)


def groups_of(batch: ForwardBatch, config: AttentionConfig) -> Iterator[Group]:
    """Cut a step into tiles, those of similar length together, and yield them in groups."""
    tiles: list[Tile] = []
    first = 0
    for seq, (new, length) in enumerate(zip(batch.query_lens_host, batch.seq_lens_host, strict=True)):
        tiles += [(seq, first + i, max(0, length - new + i), min(QUERIES, new - i)) for i in range(0, new, QUERIES)]
        first += new
    tiles.sort(key=lambda tile: tile[2])
    for i in range(0, len(tiles), ITEMS):
        group = tiles[i : i + ITEMS]
        yield make_group(group + [(0, 0, 0, 0)] * (ITEMS - len(group)), batch.block_tables, config)


def make_group(tiles: list[Tile], block_tables: torch.Tensor, config: AttentionConfig) -> Group:
    """Return the indices of `ITEMS` tiles, on the device. A tile of no tokens is padding."""
    assert config.block_size is not None
    device, size, width = block_tables.device, config.block_size, block_tables.shape[1]
    length = -(-max(position + count for _, _, position, count in tiles) // CONTEXT) * CONTEXT
    seqs, first, position, count = torch.tensor(tiles, device=device).T
    offset, at = torch.arange(QUERIES, device=device), torch.arange(length, device=device)
    is_real, is_held = offset < count[:, None], at < (position + count)[:, None]
    blocks = block_tables[seqs][:, (at // size).clamp(max=width - 1)].long()
    positions = torch.where(is_real, position[:, None] + offset, 0)
    return Group(
        tokens=torch.where(is_real, first[:, None] + offset, 0),
        is_real=is_real,
        positions=positions.repeat(1, config.num_heads // config.num_kv_heads),
        blocks=torch.where(is_held, blocks, 0),
        offsets=at % size,
        is_held=is_held[:, None, :, None],
    )


def padded_sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    """Causal attention within each sequence, by torch's kernel over padded sequences: [T, Hq, D], two [T, Hkv, D] -> [T, Hq, D]."""
    q, k, v = (pad_sequence(list(x.split(lengths)), batch_first=True).transpose(1, 2) for x in (query, key, value))
    found = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)
    return torch.cat([row[:length] for row, length in zip(found, lengths, strict=True)])
