"""`torch_paged` with a kernel for decodes on a CPU: it reads K and V where they lie."""

from __future__ import annotations

from dataclasses import replace

import torch

from folovllm.attention.backends.abstract import AttentionConfig
from folovllm.attention.backends.torch_paged import TorchPagedBackend
from folovllm.forward_batch import ForwardBatch
from folovllm.kernels.cpu.ops import CpuKernels


class CpuPagedBackend(TorchPagedBackend):
    """Sequences with one new token stand in front of a batch, and are the kernel's; the others are torch's."""

    def __init__(self, config: AttentionConfig, kernels: CpuKernels) -> None:
        super().__init__(config)
        self._kernels = kernels

    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """As `TorchPagedBackend`."""
        n = batch.num_decodes
        if n == 0 or batch.is_padded:  # in a padded step some have none
            return super().forward(query, kv_cache, batch)
        decoded = self._kernels.decode(query[:n], kv_cache, batch, self.config.scale)
        if n == batch.num_seqs:
            return decoded
        others = replace(
            batch, block_tables=batch.block_tables[n:], query_lens_host=batch.query_lens_host[n:],
            seq_lens_host=batch.seq_lens_host[n:],
        )  # fmt: skip
        return torch.cat((decoded, super().forward(query[n:], kv_cache, others)))
