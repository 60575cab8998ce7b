"""FP8 caches for backends that cannot read them: each step decodes the blocks that it reads into a small temporary cache."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch

from folovllm.attention.backends.abstract import AttentionBackend, AttentionConfig, BackendUnavailable
from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.kv_format import FP8, KVScales, decode, encode

FP8_CAPABILITY = (8, 9)  # the first compute capability that converts FP8 numbers


class DecodedCache(AttentionBackend):
    """Wraps a backend in plain torch. The copy costs more time than 8 bits save. The Triton kernels need no copy."""

    reads_fp8 = True

    def __init__(self, inner: AttentionBackend) -> None:
        super().__init__(inner.config)
        self._inner = inner

    def of_layer(self, scales: KVScales, window: int | None = None) -> AttentionBackend:
        backend = copy(self)
        backend.scales, backend._inner = scales, self._inner.of_layer(scales, window)
        return backend

    def plan(self, batch: ForwardBatch) -> None:
        self._inner.plan(batch)

    def store(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Encode `key` and `value` [T, Hkv, D]. The wrapped backend stores the bytes."""
        self._inner.store(*as_bytes(self.scales, key, value, kv_cache), slot_mapping)

    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Return attention over decoded copies of the sequences' blocks, placed end to end: [T, Hq, D] -> [T, Hq, D]."""
        counts = [-(-seq_len // kv_cache.shape[2]) for seq_len in batch.seq_lens_host]
        used = torch.cat([table[:count] for table, count in zip(batch.block_tables, counts, strict=True)])
        blocks = kv_cache.view(torch.uint8)[:, used.long()].view(FP8)  # [2, used, B, Hkv, D]
        parts = [decode(blocks[i], scale, query.dtype) for i, scale in enumerate((self.scales.key, self.scales.value))]
        tables = torch.zeros_like(batch.block_tables)
        here = torch.arange(tables.shape[1], device=tables.device) < torch.tensor(counts, device=tables.device)[:, None]
        tables[here] = torch.arange(len(used), dtype=tables.dtype, device=tables.device)
        return self._inner.forward(query, torch.stack(parts), replace(batch, block_tables=tables))


def as_bytes(
    scales: KVScales, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode new K/V for an FP8 cache. Returns them and the cache as bytes, which any operation can copy."""
    encoded = encode(scales.centred(key), scales.key_factor), encode(value, scales.value_factor)
    return encoded[0].view(torch.uint8), encoded[1].view(torch.uint8), kv_cache.view(torch.uint8)


def check_fp8(backend: type[AttentionBackend], config: AttentionConfig) -> None:
    """Raise `BackendUnavailable` if neither a kernel nor plain torch can read an FP8 cache here."""
    if not backend.reads_fp8 and backend.name not in ("torch_naive", "torch_paged"):
        raise BackendUnavailable(
            f'{backend.name} cannot read a cache in 8 bits: choose "triton" or "torch_paged", or leave kv_cache_dtype out'
        )
    capability = torch.cuda.get_device_capability(config.device) if config.device.type == "cuda" else FP8_CAPABILITY
    if backend.reads_fp8 and capability < FP8_CAPABILITY:
        raise BackendUnavailable(
            f"this GPU (compute capability {capability[0]}.{capability[1]}) has no numbers of 8 bits, which come with 8.9: "
            "leave kv_cache_dtype out"
        )
