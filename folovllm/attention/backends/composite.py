"""A backend of two: "flash_attn,triton" prefills with the first and decodes with the second."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from folovllm.attention.backends.abstract import AttentionBackend, AttentionConfig
from folovllm.forward_batch import ForwardBatch

if TYPE_CHECKING:
    from folovllm.kernels.preparation import Preparation


def decodes_of(batch: ForwardBatch) -> ForwardBatch:
    """Return the batch of the decodes of `batch`, its leading sequences with one new token. Its tensors are slices, not copies."""
    n = batch.num_decodes
    return replace(
        batch, input_ids=batch.input_ids[:n], positions=batch.positions[:n], slot_mapping=batch.slot_mapping[:n],
        query_start_loc=batch.query_start_loc[: n + 1], seq_lens=batch.seq_lens[:n], block_tables=batch.block_tables[:n],
        logits_indices=batch.logits_indices[:n], num_seqs=n, max_query_len=1,
        query_lens_host=batch.query_lens_host[:n], seq_lens_host=batch.seq_lens_host[:n],
    )  # fmt: skip


def prefills_of(batch: ForwardBatch) -> ForwardBatch:
    """Return the batch of the sequences after the decodes. Its tokens count from 0."""
    n = batch.num_decodes
    return replace(
        batch, input_ids=batch.input_ids[n:], positions=batch.positions[n:], slot_mapping=batch.slot_mapping[n:],
        query_start_loc=batch.query_start_loc[n:] - n, seq_lens=batch.seq_lens[n:], block_tables=batch.block_tables[n:],
        logits_indices=batch.logits_indices[n:] - n, num_seqs=batch.num_seqs - n, num_decodes=0,
        query_lens_host=batch.query_lens_host[n:], seq_lens_host=batch.seq_lens_host[n:],
    )  # fmt: skip


@dataclass(slots=True)
class Parts:
    """The two parts of the planned step. A part without sequences is None."""

    prefills: ForwardBatch | None = None
    decodes: ForwardBatch | None = None


class CompositeBackend(AttentionBackend):
    """Splits each batch after its decodes. `compose` makes subclasses with the two backend classes."""

    prefill_class: type[AttentionBackend]
    decode_class: type[AttentionBackend]

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.prefill, self.decode = self.prefill_class(config), self.decode_class(config)
        self._parts = Parts()

    @classmethod
    def check_available(cls, config: AttentionConfig) -> None:
        """Raise `BackendUnavailable` if one of the two backends does."""
        cls.prefill_class.check_available(config)
        cls.decode_class.check_available(config)

    @classmethod
    def supports_block_size(cls, block_size: int) -> bool:
        """Return whether both backends support blocks of `block_size` tokens."""
        return cls.prefill_class.supports_block_size(block_size) and cls.decode_class.supports_block_size(block_size)

    def sliding(self, window: int) -> AttentionBackend:
        backend = copy(self)
        backend.prefill, backend.decode = self.prefill.sliding(window), self.decode.sliding(window)
        return backend

    def plan(self, batch: ForwardBatch) -> None:
        """Split the batch, and let each backend plan its part."""
        parts = self._parts
        parts.decodes = decodes_of(batch) if batch.num_decodes else None
        parts.prefills = prefills_of(batch) if batch.num_seqs > batch.num_decodes else None
        if parts.decodes is not None:
            self.decode.plan(parts.decodes)
        if parts.prefills is not None:
            self.prefill.plan(parts.prefills)

    def store(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write `key` and `value` [T, Hkv, D] to their slots. Both backends read the same layout."""
        self.decode.store(key, value, kv_cache, slot_mapping)

    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Return attention for the planned batch: [T, Hq, D] -> [T, Hq, D]. Only a mixed batch costs a copy."""
        n, parts, results = batch.num_decodes, self._parts, []
        if parts.decodes is not None:
            results.append(self.decode.forward(query[:n], kv_cache, parts.decodes))
        if parts.prefills is not None:
            results.append(self.prefill.forward(query[n:], kv_cache, parts.prefills))
        return results[0] if len(results) == 1 else torch.cat(results)

    def forward_raw(
        self, qkv: torch.Tensor, preparation: Preparation, kv_cache: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor | None:
        """Let the decode backend compute a batch of decodes."""
        return self.decode.forward_raw(qkv, preparation, kv_cache, batch)


def compose(prefill: type[AttentionBackend], decode: type[AttentionBackend]) -> type[AttentionBackend]:
    """Return a backend class that prefills with `prefill` and decodes with `decode`."""
    attributes = {
        "name": f"{prefill.name},{decode.name}",
        "prefill_class": prefill,
        "decode_class": decode,
        "supports_cuda_graph": decode.supports_cuda_graph,  # its graphs hold decodes only
        "__doc__": f"Prefill by {prefill.name}, decode by {decode.name}.",
    }
    return type("CompositeBackend", (CompositeBackend,), attributes)
