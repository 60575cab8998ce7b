"""Attention by the package flash-attn (Dao, 2023), version 2: the baseline for our own kernels."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import torch

from folovllm.attention.backends.abstract import AttentionBackend, AttentionConfig, BackendUnavailable
from folovllm.kernels.store import store_kvcache
from folovllm.step.forward_batch import ForwardBatch


class FlashAttentionBackend(AttentionBackend):
    """Uses `flash_attn_with_kvcache` for decodes, which splits long sequences, and `flash_attn_varlen_func` for all others."""

    name = "flash_attn"
    supported_block_sizes = (256,)
    supports_cuda_graph = True

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._prefill, self._decode = flash_attn_varlen_func, flash_attn_with_kvcache
        self._query_starts = self._key_starts = torch.empty(0)  # [prefills + 1] int32 each, of the planned step

    @classmethod
    def check_available(cls, config: AttentionConfig) -> None:
        """Raise `BackendUnavailable` without a GPU of compute capability 8.0 or the package, or for sizes that it does not support."""
        is_cuda, dim, size = config.device.type == "cuda", config.head_dim, config.block_size
        is_old = is_cuda and torch.cuda.get_device_capability(config.device) < (8, 0)
        is_half = config.dtype in (torch.float16, torch.bfloat16)
        is_odd = size is not None and not cls.supports_block_size(size)
        rules = (
            (not is_cuda, 'needs a CUDA GPU: choose "torch_paged"'),
            (is_old, 'needs compute capability 8.0 (Ampere) or later: choose "triton"'),
            (find_spec("flash_attn") is None, 'needs a package: pip install flash-attn, or choose "triton"'),
            (not is_half, f"needs float16 or bfloat16, not {str(config.dtype)[6:]}"),
            (dim % 8 or dim > 256, f"needs a head_dim of 8 to 256 in steps of 8, not {dim}"),
            (is_odd, f"needs a block_size that is a multiple of 256, not {size}"),
        )
        for is_wrong, sentence in rules:
            if is_wrong:
                raise BackendUnavailable(f'attention_backend "flash_attn" {sentence}')

    def sliding(self, window: int) -> AttentionBackend:
        return SlidingFlashAttention(self, window)

    def plan(self, batch: ForwardBatch) -> None:
        """Compute where each prefill's queries and keys start. Every decode before them has one query."""
        first = batch.num_decodes
        if first == batch.num_seqs:
            return
        self._query_starts = batch.query_start_loc[first:] - first
        lens = batch.seq_lens[first : batch.num_seqs].cumsum(0, dtype=torch.int32)
        self._key_starts = torch.nn.functional.pad(lens, (1, 0))

    def store(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        store_kvcache(key, value, kv_cache, slot_mapping)

    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Return attention: [T, Hq, D] -> [T, Hq, D]. The two results of a mixed batch are concatenated."""
        k_cache, v_cache = kv_cache.unbind(0)
        n, scale, parts = batch.num_decodes, self.config.scale, []
        if n:
            parts.append(self._decode(
                query[:n, None], k_cache, v_cache, cache_seqlens=batch.seq_lens[:n], block_table=batch.block_tables[:n],
                softmax_scale=scale, causal=True,
            )[:, 0])  # fmt: skip
        if batch.num_seqs > n:
            parts.append(self._prefill(
                query[n:], k_cache, v_cache, cu_seqlens_q=self._query_starts, cu_seqlens_k=self._key_starts,
                max_seqlen_q=batch.max_query_len, max_seqlen_k=batch.max_seq_len,
                block_table=batch.block_tables[n : batch.num_seqs], softmax_scale=scale, causal=True,
            ))  # fmt: skip
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class SlidingFlashAttention(FlashAttentionBackend):
    """`FlashAttentionBackend` for a layer with a window. `whole`, the backend without a window, plans the step."""

    def __init__(self, whole: FlashAttentionBackend, window: int) -> None:
        AttentionBackend.__init__(self, whole.config)
        self._whole = whole
        before = window - 1, 0  # tokens that a token sees on its two sides
        self._prefill, self._decode = (partial(f, window_size=before) for f in (whole._prefill, whole._decode))

    def plan(self, batch: ForwardBatch) -> None:
        self._whole.plan(batch)

    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        self._query_starts, self._key_starts = self._whole._query_starts, self._whole._key_starts
        return super().forward(query, kv_cache, batch)
