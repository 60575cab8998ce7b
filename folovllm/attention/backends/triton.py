"""Attention by this project's own Triton kernels: prefill like FlashAttention-2 (3 on Hopper), and split-KV decode."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import partial

import torch

from folovllm.attention.backends.abstract import AttentionBackend, AttentionConfig, BackendUnavailable
from folovllm.attention.backends.decoded import as_bytes
from folovllm.kernels.decode import DecodeConfig, SplitKVDecode
from folovllm.kernels.fp8_cache import INTERPRETED
from folovllm.kernels.prefetching_decode import is_supported, prefetching_decode
from folovllm.kernels.prefill import PrefillKernel, config_on, prefill
from folovllm.kernels.prefill_tiles import list_tiles
from folovllm.kernels.qk_norm_rope import Preparation
from folovllm.kernels.store import store_kvcache
from folovllm.kernels.variants import kernel_variant
from folovllm.step.forward_batch import ForwardBatch


def interpreted() -> bool:
    """Return whether Triton's kernels run in its interpreter, on the CPU. Triton decides that when it is first imported."""
    return bool(INTERPRETED)


@dataclass(slots=True)
class Planned:
    """The results of `plan`, which all layers share."""

    tiles: torch.Tensor | None = None  # work list of the prompts in a captured step (`list_tiles`)


class TritonBackend(AttentionBackend):
    """The decode kernel computes the decodes, which come first in a batch; the prefill kernel computes the rest. Any block size."""

    name = "triton"
    supports_cuda_graph = True
    supports_prompt_graph = True
    reads_fp8 = True

    def __init__(self, config: AttentionConfig, own_prefill: PrefillKernel | None = None) -> None:
        """`own_prefill` replaces the prefill kernels."""
        super().__init__(config)
        if config.block_size is None:
            raise ValueError("the triton backend is built for one block size: resolve it first")
        self._window: int | None = None  # of the layer
        self._decode = self._make_decode(config.block_size)
        self._decodes: dict[int | None, SplitKVDecode] = {None: self._decode}  # by window; copies share it
        self._own_prefill = own_prefill
        self.supports_prompt_graph = own_prefill is None  # a learner's kernel need not support padded steps
        wanted = config.long_prompts and own_prefill is None
        self._variant = kernel_variant("prefill", config.device) if wanted else None
        self._tile_m = config_on(config.device, config.head_dim, config.dtype.itemsize).tile_m
        self._planned = Planned()

    @classmethod
    def check_available(cls, config: AttentionConfig) -> None:
        """Raise `BackendUnavailable` without a GPU or the interpreter, for a dtype or a head_dim the kernels lack."""
        is_cuda, is_bfloat16 = config.device.type == "cuda", config.dtype == torch.bfloat16
        is_old = is_cuda and torch.cuda.get_device_capability(config.device) < (8, 0)
        is_odd = config.head_dim < 16 or config.head_dim & (config.head_dim - 1)
        dim, half = config.head_dim, "256 in half precision and 128 in float32"
        rules = (
            (
                not is_cuda and not interpreted(),
                'needs a CUDA GPU, or the interpreter: set TRITON_INTERPRET=1 before Python starts, or choose "torch_paged"',
            ),
            (is_bfloat16 and not is_cuda, "computes bfloat16 wrongly in the interpreter: choose float32 or float16"),
            (is_bfloat16 and is_old, "has no bfloat16 on this GPU (compute capability below 8.0): choose float16"),
            (is_odd, f'needs a head_dim that is a power of two from 16 up, not {dim}: choose "torch_paged"'),
            (config.is_fp8 and dim < 32, f'reads 8 bits from a head_dim of 32 up, not {dim}: choose "torch_paged"'),
            (
                is_cuda and dim * config.dtype.itemsize > 512,
                f"has tiles for a head_dim of up to {half}, not {dim} in {str(config.dtype)[6:]}: choose another dtype, or torch_paged",
            ),
        )
        for is_wrong, sentence in rules:
            if is_wrong:
                raise BackendUnavailable(f'attention_backend "triton" {sentence}')

    def _make_decode(self, block_size: int) -> SplitKVDecode:
        c = self.config
        tiles = DecodeConfig(tile=64) if c.is_fp8 else DecodeConfig()
        shape = c.num_heads, c.num_kv_heads, c.head_dim, block_size
        return SplitKVDecode(c.max_num_seqs, *shape, c.device, tiles, window=self._window)

    def sliding(self, window: int) -> TritonBackend:
        """Return a copy for layers with `window`. Its decodes have a plan of their own."""
        backend = copy(self)
        backend._window = window
        if window not in self._decodes:
            self._decodes[window] = backend._make_decode(self._decode.block_size)
        backend._decode = self._decodes[window]
        return backend

    def plan(self, batch: ForwardBatch) -> None:
        """List the work of the decodes, and in a captured step that of the prompts. All layers share the lists."""
        n, self._planned.tiles = batch.num_decodes, None
        for decode in self._decodes.values() if n else ():
            decode.plan(batch.seq_lens, n)
        if batch.is_padded:
            num_tokens = len(batch.input_ids)
            self._planned.tiles = list_tiles(batch.query_start_loc, batch.seq_lens, num_tokens, n, self._tile_m)

    def store(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        if self.config.is_fp8:
            key, value, kv_cache = as_bytes(self.scales, key, value, kv_cache)
        store_kvcache(key, value, kv_cache, slot_mapping)

    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Return attention: [T, Hq, D] -> [T, Hq, D]. Both kernels write to one result."""
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        scale = self.config.scale
        if batch.num_decodes:
            self._decode(query, kv_cache, batch.block_tables, batch.num_decodes, scale, out, scales=self.scales)
        if batch.num_seqs > batch.num_decodes:
            self._prefill_kernel(len(query), batch.max_query_len)(
                query, kv_cache, batch.query_start_loc, batch.seq_lens, batch.block_tables, batch.max_query_len, scale,
                out, first_seq=batch.num_decodes,
            )  # fmt: skip
        return out

    def _prefill_kernel(self, num_tokens: int, max_query_len: int) -> PrefillKernel:
        """Return the prefill kernel for a step of `num_tokens` tokens. Variants support no windows."""
        if self._planned.tiles is not None or self._window is not None:
            return partial(prefill, tiles=self._planned.tiles, scales=self.scales, window=self._window)
        if self._variant is not None and self._variant.is_supported(self.config, num_tokens, max_query_len):
            return self._variant.launch
        return self._own_prefill or partial(prefill, scales=self.scales)

    def forward_raw(
        self, qkv: torch.Tensor, preparation: Preparation, kv_cache: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return attention of decodes. The decode kernel also normalises, rotates and stores the new tokens."""
        c = self.config
        out = qkv.new_empty(batch.num_seqs, c.num_heads, c.head_dim)
        arguments = qkv, kv_cache, batch.block_tables, batch.num_seqs, c.scale, out, preparation
        if is_supported(self._decode, kv_cache, batch.num_seqs):
            return prefetching_decode(self._decode, *arguments)
        return self._decode(*arguments, self.scales)
