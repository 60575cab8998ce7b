"""Fewer bits on two GPUs: what one GPU answers, but for rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from folovllm import LLM, SamplingParams
from tests.helpers import prompts

PARAMS = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_log_probabilities_of_prompts(quantization: str) -> None:
    """A rank rounds its part of a token's inputs by a scale of its own, so they differ as two roundings do."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    answers: list[torch.Tensor] = []
    ids = prompts([200, 3, 64])
    for ranks in (1, 2):
        fields: dict[str, Any] = {"random_weights": True, "quantization": quantization, "tensor_parallel_size": ranks}
        with LLM("stories-5m", device="cuda", num_kv_blocks=400, max_model_len=512, use_tqdm=False, **fields) as llm:
            outputs = llm.generate(ids, PARAMS)
        rows = [row for output in outputs for row in output.prompt_logprobs or () if row]
        answers.append(torch.tensor([next(iter(row.values())).logprob for row in rows]))
    error = (answers[0] - answers[1]).abs()
    print(f"{quantization}: off by {error.mean():.4f}, at most {error.max():.4f}")
    assert error.mean() < 0.03 and error.max() < 0.3
