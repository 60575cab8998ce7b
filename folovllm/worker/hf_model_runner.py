"""Hugging Face's model, one sequence at a time, with `past_key_values` of its own."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, DynamicCache

from folovllm.sample.rows import DrawRows
from folovllm.sample.sampler import Sampler
from folovllm.setup import EngineSetup
from folovllm.step.schedule import SchedulerOutput, StepResult, one_each


class HFModelRunner:
    """Runs a step through `AutoModelForCausalLM`. The cache of a sequence lives until the next one begins."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self._sampler = Sampler()
        self._draws = DrawRows(setup.vocab_size, setup.device)
        self._cache: Any = None
        self.model: Any = None

    def load_model(self) -> None:
        """Load the weights, from safetensors only: a pickle could run code."""
        setup = self._setup
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                setup.path,
                config=setup.hf_config,
                dtype=setup.dtype,
                use_safetensors=True,
                output_loading_info=True,
                trust_remote_code=setup.config.trust_remote_code,
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
            raise ValueError(f"cannot load the model in {setup.path}: {error}") from error
        if report["missing_keys"]:  # transformers would make them up
            raise ValueError(f"the checkpoint in {setup.path} lacks {', '.join(sorted(report['missing_keys'])[:5])}")
        self.model = model.to(setup.device).eval()

    def initialize_kv_cache(self) -> int:
        """Nothing to allocate: caches grow with their sequences."""
        return 0

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        """Compute the scheduled tokens of the one running sequence and draw the next."""
        (share,) = output.shares
        if share.draw is not None:
            self._draws.set({share.row: share.draw})
            self._cache = DynamicCache(config=self._setup.hf_config)
        input_ids = torch.from_numpy(share.token_ids).long()[None].to(self._setup.device)  # [1, T]
        hf_output = self.model(input_ids=input_ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        logits = hf_output.logits[:, -1]  # [1, V]
        drawn = self._sampler(logits, self._draws.batch([share.row], [share.end]))
        result = one_each(output.shares, drawn.token_ids, drawn.logprobs)
        self._draws.note_drawn(output.shares, result)
        return result
