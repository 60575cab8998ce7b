"""Hugging Face's model, one sequence at a time, each with `past_key_values` of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as hf_logging

from folovllm.engine.scheduler import ScheduledSequence, SchedulerOutput
from folovllm.engine.setup import EngineSetup
from folovllm.models.json_files import reading
from folovllm.models.loader import checkpoint_files, require_finite, require_float_weights
from folovllm.request import Sequence
from folovllm.sample.sampler import Sampler, SamplerOutput, SamplingBatch


@contextmanager
def progress_bars(wanted: bool) -> Iterator[None]:
    """Let transformers draw its progress, or not; afterwards all is as before."""
    if wanted or not hf_logging.is_progress_bar_enabled():
        yield
        return
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.enable_progress_bar()


class HFModelRunner:
    """Runs a step through `AutoModelForCausalLM`. A sequence's cache lives as long as the sequence does."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self._sampler = Sampler()
        self._caches: WeakKeyDictionary[Sequence, Any] = WeakKeyDictionary()
        self.model: Any = None

    def load_model(self) -> None:
        """Load the weights, from safetensors only: a pickle could run code."""
        setup = self._setup
        files = checkpoint_files(setup.path)
        if getattr(setup.hf_config, "quantization_config", None) is None:  # else transformers knows what the codes mean
            require_float_weights(files)
        with reading(f"the model in {setup.path}"), progress_bars(setup.config.use_tqdm):
            model, report = AutoModelForCausalLM.from_pretrained(
                setup.path,
                config=setup.hf_config,
                dtype=setup.dtype,
                use_safetensors=True,
                output_loading_info=True,
                trust_remote_code=setup.config.trust_remote_code,
            )
        if report["missing_keys"]:  # transformers would make them up
            raise ValueError(f"the checkpoint in {setup.path} lacks {', '.join(sorted(report['missing_keys'])[:5])}")
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and parameter.dtype.itemsize > 1:
                require_finite(name, parameter.data)
        self.model = model.to(setup.device).eval()

    def initialize_kv_cache(self) -> int:
        """Nothing to allocate: caches grow with their sequences."""
        return 0

    def execute_model(self, output: SchedulerOutput) -> SamplerOutput:
        """Compute the scheduled tokens, sequence by sequence, and draw the next ones."""
        logits = torch.cat([self._forward(item) for item in output.scheduled])  # [S, V]
        seqs = [item.seq for item in output.scheduled]
        return self._sampler(logits, SamplingBatch.from_sequences(seqs, logits.device))

    def _forward(self, item: ScheduledSequence) -> torch.Tensor:
        """Logits [1, V] after the item's last token."""
        if item.seq not in self._caches:
            self._caches[item.seq] = DynamicCache(config=self._setup.hf_config)
        ids = item.seq.token_ids[item.start : item.start + item.num_new_tokens]
        input_ids, cache = torch.from_numpy(ids).long()[None].to(self._setup.device), self._caches[item.seq]  # [1, T]
        result = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return result.logits[:, -1]
