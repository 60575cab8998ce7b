"""Attention for steps that verify drafts, by this project's own kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from folovllm.attention.backends.abstract import AttentionConfig
from folovllm.attention.backends.triton import TritonBackend
from folovllm.electives.spec_decode.kernels.verify_attention import MOST_TOKENS, SplitKVVerify
from folovllm.kernels.prefill import PrefillKernel
from folovllm.step.forward_batch import ForwardBatch

CAPABILITY = (8, 0)  # from which on a GPU has room for a tile's rows


class TritonVerifyBackend(TritonBackend):
    """A `TritonBackend` that sends sequences with few new tokens, as those with drafts, to a split-KV kernel (`SplitKVVerify`).

    In a captured step with drafts that kernel serves all sequences. A prompt among them is cut into tiles: slower than by the
    prefill kernel, and still faster than a step that is not captured. Layers with a window take the prefill kernel.
    """

    def __init__(self, config: AttentionConfig, most_tokens: int, max_samples: int) -> None:
        """`most_tokens`: of a sequence whose draft is verified; `max_samples`: of a step."""
        super().__init__(config)
        assert config.block_size is not None
        self._verify = SplitKVVerify(
            max_samples, most_tokens, config.num_heads, config.num_kv_heads, config.head_dim, config.block_size, config.device,
            config.dtype.itemsize, config.is_fp8,
        )  # fmt: skip

    def plan(self, batch: ForwardBatch) -> None:
        """Plan the decodes, and the other sequences for the verify kernel if it takes them, else as `TritonBackend`."""
        n, num_tokens = batch.num_decodes, len(batch.input_ids) - batch.num_decodes
        self._verify.num_tiles = 0
        if not self._takes(batch, num_tokens):
            super().plan(batch)
            return
        needs_tiles = len(self._decodes) > 1  # some layers have a window, which the other kernel does not know
        super().plan(batch if needs_tiles else replace(batch, is_padded=False))
        self._verify.plan(batch.query_start_loc[n:], batch.seq_lens[n:], num_tokens)

    def _takes(self, batch: ForwardBatch, num_tokens: int) -> bool:
        num_seqs = batch.num_seqs - batch.num_decodes
        is_short = batch.has_drafts if batch.is_padded else batch.max_query_len <= MOST_TOKENS
        return is_short and 0 < self._verify.tiles_of(num_seqs, num_tokens) <= self._verify.max_tiles

    def _prefill_kernel(self, num_tokens: int, max_query_len: int) -> PrefillKernel:
        if self._verify.num_tiles and self._window is None:
            return partial(self._verify, scales=self.scales)
        return super()._prefill_kernel(num_tokens, max_query_len)


def serves(device: torch.device) -> bool:
    """Return whether the kernel runs on this device: in the interpreter, and on a GPU that is not too old."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= CAPABILITY
