"""Our model, one sequence at a time, with a cache that grows by concatenation."""

from __future__ import annotations

import torch

from folovllm.attention.backends.registry import get_backend
from folovllm.cache.growing_cache import GrowingKVCache
from folovllm.engine.scheduler import ScheduledSequence, SchedulerOutput
from folovllm.engine.setup import EngineSetup
from folovllm.forward_batch import ForwardBatch
from folovllm.sample.sampler import SamplerOutput, SamplingBatch
from folovllm.worker.native_model import attention_layers, load_native_model, make_sampler


class SerialModelRunner:
    """Runs a step through our own layers. One sequence runs at a time, so one cache a layer serves them in turn."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self._sampler = make_sampler(setup)
        self._caches: list[GrowingKVCache] = []

    def load_model(self) -> None:
        """Build the model and load its weights."""
        self.model = load_native_model(self._setup)

    def initialize_kv_cache(self) -> int:
        """Give each attention layer an empty cache."""
        backend = get_backend("torch_cat")(self._setup.attention)
        for attention in attention_layers(self.model):
            cache = GrowingKVCache()
            attention.backend, attention.kv_cache = backend, cache  # type: ignore[assignment]  # this backend's own kind
            self._caches.append(cache)
        return 0

    def execute_model(self, output: SchedulerOutput) -> SamplerOutput:
        """Compute the scheduled tokens of the one running sequence and draw the next."""
        (item,) = output.scheduled
        if item.start == 0:
            for cache in self._caches:
                cache.reset()
        batch = single_sequence_batch(item, self._setup.device)
        logits = self.model.compute_logits(self.model(batch), batch)  # [1, V]
        return self._sampler(logits, SamplingBatch.from_sequences([item.seq], logits.device))


def single_sequence_batch(item: ScheduledSequence, device: torch.device) -> ForwardBatch:
    """The tensors of one sequence's share; it needs no slots, for its cache grows at the end."""
    start, count = item.start, item.num_new_tokens
    end = start + count
    empty = torch.empty(0, dtype=torch.int64, device=device)
    return ForwardBatch(
        input_ids=torch.from_numpy(item.seq.token_ids[start:end]).long().to(device),
        positions=torch.arange(start, end, device=device),
        slot_mapping=empty,
        query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([end], dtype=torch.int32, device=device),
        block_tables=empty[None].int(),
        logits_indices=torch.tensor([count - 1], device=device),
        num_seqs=1,
        num_decodes=int(count == 1),
        max_query_len=count,
        max_seq_len=end,
        query_lens_host=[count],
        seq_lens_host=[end],
    )
