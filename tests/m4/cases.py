"""Shapes, a paged cache full of traps, and attention as the textbook writes it: what the tests of this folder share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of ||out - reference|| / ||reference||


@dataclass
class Paged:
    """K/V of some sequences in shuffled blocks. All that no sequence owns is NaN, and their tables point nowhere."""

    kv_cache: torch.Tensor  # [2, N, B, Hkv, D], a permuted view
    block_tables: torch.Tensor  # [S, max_blocks] int32
    seq_lens: torch.Tensor  # [S] int32

    @classmethod
    def make(
        cls, lens: list[int], block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
    ) -> Paged:
        """Random K/V for sequences of these lengths."""
        blocks = [-(-n // block_size) for n in lens]
        total = sum(blocks) + 2
        physical = torch.randn(2, total, num_kv_heads, block_size, head_dim)
        order, first = torch.randperm(total), 0
        tables = torch.full((len(lens), max(blocks) + 1), 2**30, dtype=torch.int32)
        for i, (n, count) in enumerate(zip(lens, blocks, strict=True)):
            tables[i, :count] = order[first : first + count]
            first += count
            if n % block_size:
                physical[:, order[first - 1], :, n % block_size :] = float("nan")
        physical[:, order[first:]] = float("nan")
        kv_cache = physical.to(DEVICE, dtype).permute(0, 1, 3, 2, 4)
        return cls(kv_cache, tables.to(DEVICE), torch.tensor(lens, dtype=torch.int32, device=DEVICE))

    def attention(self, query: torch.Tensor, query_lens: list[int]) -> torch.Tensor:
        """Causal attention in float64 of the last `query_lens` tokens of each sequence, [T, Hq, D]."""
        out, first, block_size = torch.zeros_like(query, dtype=torch.float64), 0, self.kv_cache.shape[2]
        for table, length, new in zip(self.block_tables, self.seq_lens.tolist(), query_lens, strict=True):
            position = torch.arange(length, device=DEVICE)
            key, value = self.kv_cache[:, table[position // block_size], position % block_size].double()
            q = query[first : first + new].double()
            group = q.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))  # [length, Hq, D]
            scores = torch.einsum("qhd,khd->hqk", q, key) * q.shape[2] ** -0.5
            hidden = position > torch.arange(length - new, length, device=DEVICE)[:, None]
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            if length:
                out[first : first + new] = torch.einsum("hqk,khd->qhd", weights, value)
            first += new
        return out


def starts(lens: list[int]) -> torch.Tensor:
    """Prefix sums from 0, [S+1] int32."""
    return torch.tensor([0, *lens], device=DEVICE).cumsum(0).to(torch.int32)


def assert_close(
    actual: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype | None = None, says: str = ""
) -> None:
    """Within the tolerance of the dtype, no element NaN or infinite. `says` names the input, or what is compared."""
    assert actual.shape == reference.shape, f"the shape is {[*actual.shape]}, and {[*reference.shape]} was to come"
    off = (actual.double() - reference.double()).abs().nan_to_num(torch.inf)
    error = off.norm() / reference.double().norm().clamp(min=1e-30)
    worst = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape)) if off.numel() else ()
    assert error <= TOLERANCE[dtype or actual.dtype], (
        f"{says and says + ': '}worst at {[*worst]} of {[*off.shape]}: {actual[worst]:.6g} came out, and {reference[worst]:.6g} is right; "
        f"{int((off > off.max() / 100).sum())} of {off.numel()} numbers are off, the relative error is {error:.2e}"
    )
