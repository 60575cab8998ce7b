"""Our model over a whole batch at once, with one KV cache that all sequences share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from folovllm.attention.backends.abstract import AttentionBackend
from folovllm.engine.setup import EngineSetup
from folovllm.layers.attention import attention_layers
from folovllm.models.llama import LlamaForCausalLM
from folovllm.models.loader import Tensors
from folovllm.models.model_config import num_linear_of
from folovllm.plugins import CALIBRATION, STATE_POOL, load_elective
from folovllm.sample.logprobs import score_prompts
from folovllm.sample.rows import SamplingRows
from folovllm.sample.sampler import Sampler, SamplingBatch
from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.schedule import Logprobs, ScheduledSequence, SchedulerOutput, StepResult, one_each
from folovllm.worker.input_batch import InputBatch, SlotsOf
from folovllm.worker.kv_memory import free_memory, num_blocks_that_fit
from folovllm.worker.runner import StepHook
from folovllm.worker.warm_up import dummy_seqs, small_steps


class ModelRunner:
    """Runs a step: tensors, model, logits of the last tokens, sampling."""

    def __init__(
        self,
        setup: EngineSetup,
        load: Callable[..., LlamaForCausalLM],
        sampler: Sampler,
        slots: SlotsOf,
        backend: AttentionBackend,
        full_logits: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
    ) -> None:
        """`load` builds the model with its weights, or loads other `weights` `into` it; `backend` computes attention, `full_logits` gathers logits of a sharded vocabulary."""
        self._setup = setup
        self._load = load
        self._sampler = sampler
        self._full_logits = full_logits
        self._input_batch = InputBatch(slots, setup.block_size, setup.device)
        self._sampling_rows = SamplingRows(setup.max_num_seqs, setup.vocab_size, setup.device, sampler)
        self.backend = backend

    def load_model(self) -> None:
        """Build the model and load its weights."""
        self.model = self._load()
        self.states: StepHook | None = None  # of a model with linear attention
        if num_linear_of(self._setup.hf_config):
            make_states = load_elective(STATE_POOL, "linear attention")
            self.states = make_states(self._setup, self.model, free_memory(self._setup.device))
        self.bind_backends()

    def load_weights(self, weights: Path | Tensors | None) -> None:
        """Give the model other weights, in place; None: those of the start."""
        self._load(into=self.model, weights=weights)
        self.bind_backends()

    def bind_backends(self) -> None:
        """Give each attention layer its backend, anew if the scales of its cache have changed."""
        for attention in attention_layers(self.model):
            attention.bind(self.backend)

    def initialize_kv_cache(self) -> int:
        """Find out how many blocks fit, and allocate them; returns their number. On a GPU, compile what steps need."""
        num_blocks = self.fit_kv_cache()
        if self._setup.device.type == "cuda":
            self.compile_kernels()
        self.clear_counters()
        return num_blocks

    def clear_counters(self) -> None:
        """Have the model count from 0: tokens of the warm-up do not count."""
        for counts in self.model.counters.values():
            counts.zero_()

    def compile_kernels(self) -> None:
        """Run small steps of every kind, so that no later step has to compile a kernel."""
        with torch.inference_mode():
            for output in small_steps(self._setup):
                self.execute_model(output)

    def fit_kv_cache(self, captured: float = 0.0) -> int:
        """Find out how many blocks fit, and allocate them; returns their number. `captured`: see `num_blocks_that_fit`."""
        if self._setup.config.extras.get("calculate_kv_scales"):
            load_elective(CALIBRATION, "calculate_kv_scales")(self)
        memory = 0 if self.states is None else self.states.num_bytes, self.more_kv_bytes()
        num_blocks = num_blocks_that_fit(self._setup, self.warmup_model, captured, *memory)
        self.allocate_kv_cache(num_blocks)
        return num_blocks

    def more_kv_bytes(self) -> int:
        """Return the bytes of K and V that a token takes in layers beside the model's, such as those of a draft head."""
        return 0

    def allocate_kv_cache(self, num_blocks: int, dtype: torch.dtype | None = None) -> None:
        """Allocate one tensor [L, 2, N, Hkv, B, D] for all layers. A layer sees its part as [2, N, B, Hkv, D].

        K and V of one block and head are contiguous, for the kernels' reads. `dtype` replaces the configured one.
        """
        setup = self._setup
        a, layers = setup.attention, attention_layers(self.model)
        shape = (len(layers), 2, num_blocks, a.num_kv_heads, setup.block_size, a.head_dim)
        try:
            self.kv_cache = torch.empty(shape, dtype=dtype or a.kv_dtype or setup.dtype, device=setup.device)
        except RuntimeError as error:
            raise ValueError(f"there is no memory for {num_blocks:,} blocks of KV cache: take fewer") from error
        for attention, part in zip(layers, self.kv_cache.permute(0, 1, 2, 4, 3, 5), strict=True):
            attention.kv_cache = part

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        """Compute the scheduled tokens of all sequences and sample a token for each."""
        scheduled_seqs = output.scheduled_seqs
        specs = {scheduled.row: scheduled.sampling for scheduled in scheduled_seqs if scheduled.sampling is not None}
        self._sampling_rows.set(specs)
        batch = self._build(scheduled_seqs)
        rows = [scheduled.row for scheduled in scheduled_seqs]
        if output.extras is not None and self.states is not None:
            self.states.load(output.extras, rows)
        hidden = self.forward_hidden(batch)
        logits = self.model.compute_logits(hidden, batch)  # [S, V]
        if output.extras is not None and self.states is not None:
            self.states.save(output.extras, rows)
        scores = {}
        if any(scheduled.scores is not None for scheduled in scheduled_seqs):
            after = partial(self.logits_after, hidden, batch)
            scores = score_prompts(scheduled_seqs, after, self._setup.vocab_size, self._setup.device)
        return self._sample(output, logits, scores)

    def _build(self, scheduled_seqs: Sequence[ScheduledSequence]) -> ForwardBatch:
        """Return the step's tensors."""
        return self._input_batch.build(scheduled_seqs)

    def _sample(self, output: SchedulerOutput, logits: torch.Tensor, scores: dict[int, list[Logprobs]]) -> StepResult:
        """Sample a token for each scheduled sequence from `logits` [S, V]. The result has the prompts' `scores`, too."""
        scheduled_seqs = output.scheduled_seqs
        rows, positions, counts = zip(*[(s.row, s.end, s.num_samples) for s in scheduled_seqs], strict=True)
        sampled = self._sampling_rows.sample(logits, rows, positions, counts, output.extras)
        return one_each(scheduled_seqs, sampled.token_ids, sampled.logprobs, scores)

    def forward(self, batch: ForwardBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the step, cache its K/V, and return the logits after each sequence's last token, [S, V], in `out` if given."""
        return self.model.compute_logits(self.forward_hidden(batch), batch, out)

    def forward_hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """Compute the step, cache its K/V, and return the hidden states of all new tokens, [T, H]."""
        self.backend.plan(batch)
        hidden: torch.Tensor = self.model(batch)
        return hidden

    def logits_after(self, hidden: torch.Tensor, batch: ForwardBatch, at: torch.Tensor) -> torch.Tensor:
        """Return the logits [m, V] after the tokens with the indices `at` [m] in a step, from its hidden states [T, H]."""
        return self._full_logits(self.model.compute_logits(hidden, replace(batch, logits_indices=at)))

    def _max_samples(self) -> int:
        """Return the most tokens that a step samples."""
        return self._setup.max_num_seqs

    def warmup_model(self) -> None:
        """Run the largest possible step, for the memory profile.

        It has as many sequences of the greatest length as the token budget holds, all over one small cache, and samples
        `max_num_seqs` rows with all filters.
        """
        setup, num_samples = self._setup, self._max_samples()
        length = min(setup.max_model_len, setup.max_num_batched_tokens)
        self.allocate_kv_cache(-(-length // setup.block_size))
        count = max(1, min(setup.max_num_seqs, setup.max_num_batched_tokens // length))
        with torch.inference_mode():
            batch = self._input_batch.build(dummy_seqs([length] * count, setup.block_size))
            hidden = self.forward_hidden(batch)
            batch.logits_indices = torch.arange(num_samples, device=setup.device) % len(hidden)
            logits = self._full_logits(self.model.compute_logits(hidden, batch))
            rows = dummy_seqs([1] * num_samples, setup.block_size)
            specs = [scheduled.sampling for scheduled in rows if scheduled.sampling is not None]
            self._sampler(logits, SamplingBatch.from_specs(specs, [1] * len(specs), setup.device))
        self.allocate_kv_cache(0)  # frees the small cache, which the layers refer to
