"""Our model, one sequence at a time, with a cache that grows by concatenation."""

from __future__ import annotations

from collections.abc import Callable

import torch

from folovllm.attention.backends.torch_cat import GrowingKVCache, TorchCatBackend
from folovllm.engine.setup import EngineSetup
from folovllm.layers.attention import attention_layers
from folovllm.models.llama import LlamaForCausalLM
from folovllm.models.model_config import num_linear_of
from folovllm.plugins import STATE_POOL, load_elective
from folovllm.sample.logprobs import score_hidden
from folovllm.sample.rows import SamplingRows
from folovllm.sample.sampler import Sampler
from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.schedule import SchedulerOutput, StepResult, TokenIds, one_each


class SerialModelRunner:
    """Runs a step through our own layers. One sequence runs at a time, so one cache a layer serves them in turn."""

    def __init__(self, setup: EngineSetup, load: Callable[[], LlamaForCausalLM], sampler: Sampler) -> None:
        self._setup = setup
        self._load = load
        self._sampling_rows = SamplingRows(1, setup.vocab_size, setup.device, sampler)
        self._caches: list[GrowingKVCache] = []

    def load_model(self) -> None:
        """Build the model and load its weights."""
        self.model = self._load()

    def initialize_kv_cache(self) -> int:
        """Give each attention layer an empty cache, and each layer with a state room for one (X5). Returns 0: there are no blocks."""
        if num_linear_of(self._setup.hf_config):
            from folovllm.worker.kv_memory import free_memory  # X5; here, for few models have such layers

            load_elective(STATE_POOL, "linear attention")(self._setup, self.model, free_memory(self._setup.device))
        backend = TorchCatBackend(self._setup.attention)
        for attention in attention_layers(self.model):
            cache = GrowingKVCache()
            attention.bind(backend)
            attention.kv_cache = cache  # type: ignore[assignment]  # this backend's own kind
            self._caches.append(cache)
        return 0

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        """Compute the scheduled tokens of the one running sequence and sample the next."""
        (scheduled,) = output.scheduled_seqs
        if scheduled.sampling is not None:  # a new sequence: only its first step brings a SamplingSpec
            self._sampling_rows.set({scheduled.row: scheduled.sampling})
            for cache in self._caches:
                cache.reset()
        batch = single_sequence_batch(scheduled.token_ids, scheduled.start, self._setup.device)
        hidden = self.model(batch)
        scores = {} if scheduled.scores is None else score_hidden(self.model, output.scheduled_seqs, hidden, batch)
        logits = self.model.compute_logits(hidden, batch)  # [1, V]
        sampled = self._sampling_rows.sample(logits, [scheduled.row], [scheduled.end], extras=output.extras)
        return one_each(output.scheduled_seqs, sampled.token_ids, sampled.logprobs, scores)


def single_sequence_batch(token_ids: TokenIds, start: int, device: torch.device) -> ForwardBatch:
    """Return the batch of one sequence's tokens from position `start` on. It has no slots, because its cache grows at the end."""
    count = len(token_ids)
    end = start + count
    empty = torch.empty(0, dtype=torch.int64, device=device)
    return ForwardBatch(
        input_ids=torch.from_numpy(token_ids).long().to(device),
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
        rows=torch.zeros(1, dtype=torch.int64, device=device),
    )
