"""Our model over a whole batch at once, with one KV cache that all sequences share."""

from __future__ import annotations

import torch

from folovllm.attention.backends.registry import get_backend
from folovllm.cache import kv_cache_manager
from folovllm.engine.detokenizer import IncrementalDetokenizer
from folovllm.engine.scheduler import ScheduledSequence, SchedulerOutput
from folovllm.engine.setup import EngineSetup
from folovllm.models.llama import LlamaForCausalLM
from folovllm.request import Sequence
from folovllm.sample.sampler import SamplerOutput, SamplingBatch
from folovllm.sampling_params import SamplingParams
from folovllm.worker.input_batch import InputBatch
from folovllm.worker.kv_memory import num_blocks_that_fit
from folovllm.worker.native_model import attention_layers, load_native_model, make_sampler

WARM_UP_TOKENS = 256  # from here on more tokens, or more sequences, change no kernel


class ModelRunner:
    """Runs a step: tensors, model, logits of the last tokens, draw."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self._sampler = make_sampler(setup)
        manager = kv_cache_manager(str(setup.config.kv_cache))
        self._input_batch = InputBatch(manager, setup.block_size, setup.device)
        self._backend = get_backend(setup.backend)(setup.attention)

    def load_model(self) -> None:
        """Build the model and load its weights."""
        self.model = self.load_weights()
        for attention in attention_layers(self.model):
            attention.backend = self._backend

    def load_weights(self) -> LlamaForCausalLM:
        """The model, as its checkpoint has it."""
        return load_native_model(self._setup)

    def initialize_kv_cache(self) -> int:
        """Find out how many blocks fit, and allocate them; returns their number."""
        num_blocks = num_blocks_that_fit(self._setup, self.warmup_model)
        self.allocate_kv_cache(num_blocks)
        if self._setup.device.type == "cuda":
            self.compile_kernels()
        return num_blocks

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """One tensor [L, 2, N, Hkv, B, D] for all layers; a layer sees its part as [2, N, B, Hkv, D].

        K and V of one block and head are contiguous, which is what a kernel reads in one go.
        """
        setup = self._setup
        a, layers = setup.attention, attention_layers(self.model)
        shape = (len(layers), 2, num_blocks, a.num_kv_heads, setup.block_size, a.head_dim)
        try:
            self.kv_cache = torch.empty(shape, dtype=setup.dtype, device=setup.device)
        except RuntimeError as error:
            raise ValueError(f"there is no memory for {num_blocks:,} blocks of KV cache: take fewer") from error
        for attention, part in zip(layers, self.kv_cache.permute(0, 1, 2, 4, 3, 5), strict=True):
            attention.kv_cache = part

    def execute_model(self, output: SchedulerOutput) -> SamplerOutput:
        """Compute the scheduled tokens of all sequences and draw a token for each."""
        batch = self._input_batch.build(output.scheduled)
        self._backend.plan(batch)
        logits = self.model.compute_logits(self.model(batch), batch)  # [S, V]
        seqs = [item.seq for item in output.scheduled]
        return self._sampler(logits, SamplingBatch.from_sequences(seqs, logits.device))

    def warmup_model(self) -> None:
        """Run the largest step there can be, so that the memory it takes is known.

        As many sequences of the greatest length as the token budget holds, all over one small cache, and logits of
        `max_num_seqs` rows with a draw that takes the full path.
        """
        setup = self._setup
        length = min(setup.max_model_len, setup.max_num_batched_tokens)
        self.allocate_kv_cache(-(-length // setup.block_size))
        count = max(1, min(setup.max_num_seqs, setup.max_num_batched_tokens // length))
        with torch.inference_mode():
            batch = self._input_batch.build(dummy_items([length] * count, setup.block_size))
            self._backend.plan(batch)
            hidden = self.model(batch)
            batch.logits_indices = torch.arange(setup.max_num_seqs, device=setup.device) % len(hidden)
            logits = self.model.compute_logits(hidden, batch)
            seqs = [item.seq for item in dummy_items([1] * setup.max_num_seqs, setup.block_size)]
            self._sampler(logits, SamplingBatch.from_sequences(seqs, setup.device))
        self.allocate_kv_cache(0)  # the layers hold on to their parts of it

    def compile_kernels(self) -> None:
        """Run small steps of every kind, so that no kernel is compiled while requests wait.

        Which variant a kernel is launched as may depend on the number of tokens or of decodes, by limits and by powers
        of two; lengths, and how the pages lie, never matter. So: prompts of 1, 2, 4, ... tokens, then as many decodes,
        and some decodes beside a prompt. What they leave in the cache belongs to nobody.
        """
        setup = self._setup
        longest = min(setup.max_model_len, setup.max_num_batched_tokens, WARM_UP_TOKENS)
        most = min(setup.max_num_seqs, WARM_UP_TOKENS)
        batches = [[n] for n in doublings(longest)] + [[1] * n for n in doublings(most)]
        batches += [[*[1] * (n - 1), min(2, longest)] for n in doublings(most)]
        with torch.inference_mode():
            for lengths in batches:
                self.execute_model(SchedulerOutput(dummy_items(lengths, setup.block_size)))


def doublings(limit: int) -> list[int]:
    """1, 2, 4, ... below `limit`, and `limit`."""
    return [1 << i for i in range((limit - 1).bit_length())] + [limit]


def dummy_items(lengths: list[int], block_size: int) -> list[ScheduledSequence]:
    """Made-up sequences that all share the same first blocks, for measuring and warming up."""
    params = SamplingParams(temperature=1.0, top_p=0.9)
    items = []
    for row, length in enumerate(lengths):
        seq = Sequence("warm-up", [0] * length, params, 1, 0, IncrementalDetokenizer(str))
        seq.block_table = list(range(-(-length // block_size)))
        seq.row = row
        items.append(ScheduledSequence(seq, 0, length, draws=True))
    return items
