"""Hugging Face's model, one sequence at a time, with its `past_key_values`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as hf_logging

from folovllm.engine.setup import EngineSetup
from folovllm.models.files import reading
from folovllm.models.loader import checkpoint_files, require_finite, require_float_weights
from folovllm.models.messages import what_is_wrong
from folovllm.models.registry import quantization_hook
from folovllm.sample.logprobs import score_in_pieces
from folovllm.sample.rows import SamplingRows
from folovllm.sample.sampler import Sampler
from folovllm.step.schedule import SchedulerOutput, StepResult, one_each


@contextmanager
def progress_bars(wanted: bool) -> Iterator[None]:
    """A context in which transformers shows its progress bars, if they are wanted, in a terminal."""
    if hidden := hf_logging.is_progress_bar_enabled() and not (wanted and sys.stderr.isatty()):
        hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if hidden:
            hf_logging.enable_progress_bar()


class HFModelRunner:
    """Runs a step through `AutoModelForCausalLM`. The cache of a sequence lives until the next one begins."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self._sampling_rows = SamplingRows(1, setup.vocab_size, setup.device, Sampler())
        self._cache: Any = None
        self.model: Any = None

    def load_model(self) -> None:
        """Load the weights, from safetensors only: a pickle could run code."""
        setup = self._setup
        files, quantization = checkpoint_files(setup.path), quantization_hook(setup.hf_config)
        if quantization is None:  # else transformers decodes the weights
            require_float_weights(files)
        with reading(f"the model in {setup.path}"), progress_bars(setup.config.use_tqdm):
            model, report = AutoModelForCausalLM.from_pretrained(
                setup.path,
                config=setup.hf_config,
                dtype=setup.dtype,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # the report says which are
                output_loading_info=True,
                trust_remote_code=setup.config.trust_remote_code,
            )
        if report["missing_keys"] or report["mismatched_keys"]:  # transformers would make them up
            raise ValueError(what_is_wrong(report, setup.path))
        if quantization is not None:
            quantization.finish_decoded(model, setup.path, setup.dtype)
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and parameter.dtype.itemsize > 1:
                require_finite(name, parameter.data)
        self.model = model.to(setup.device).eval()

    def initialize_kv_cache(self) -> int:
        """Return 0, for there are no blocks: caches grow with their sequences."""
        return 0

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        """Compute the scheduled tokens of the one running sequence and sample the next."""
        (scheduled,) = output.scheduled_seqs
        if scheduled.sampling is not None:  # a new sequence: only its first step brings a SamplingSpec
            self._sampling_rows.set({scheduled.row: scheduled.sampling})
            self._cache = DynamicCache(config=self._setup.hf_config)
        input_ids = torch.from_numpy(scheduled.token_ids).long()[None].to(self._setup.device)  # [1, T]
        scores = {}
        if scheduled.scores is None:
            logits = self._logits(input_ids, 1)[:, -1]  # [1, V]
        else:  # the same tokens in pieces: the logits of a whole prompt would be large
            logits, scores[0] = score_in_pieces(self._logits, input_ids, scheduled.scores, self._setup.vocab_size)
        sampled = self._sampling_rows.sample(logits, [scheduled.row], [scheduled.end], extras=output.extras)
        return one_each(output.scheduled_seqs, sampled.token_ids, sampled.logprobs, scores)

    def _logits(self, input_ids: torch.Tensor, keep: int) -> torch.Tensor:
        """Compute the tokens [1, T], cache their K/V, and return the logits [1, n, V] after the last `keep` (0: all) of them."""
        output = self.model(input_ids=input_ids, past_key_values=self._cache, use_cache=True, logits_to_keep=keep)
        logits: torch.Tensor = output.logits
        return logits
