"""Heads that draft, where the model lies on two GPUs."""

from typing import Any

import pytest
import torch

from folovllm import LLM, SamplingParams

STORIES = ["Once upon a time there was", "The little dog", "Lily and Tom went to the park.", "One day,"]
HEADS = {
    "eagle3": ("stories-5m", {"method": "eagle3", "model": "stories-eagle3"}),
    "mtp": ("stories-hybrid", {"method": "mtp"}),
}


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", HEADS)
def test_the_text_is_as_without(name: str) -> None:
    """Greedy and seeded, in float32; and drafts are accepted, or nothing is shown."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    model, head = HEADS[name]
    params = [SamplingParams(temperature=t, seed=7, max_tokens=80, ignore_eos=True) for t in (0.0, 0.0, 0.8, 1.0)]
    texts = []
    for speculative in (None, head | {"num_speculative_tokens": 3, "adaptive": False}):
        fields: dict[str, Any] = {"dtype": "float32", "tensor_parallel_size": 2, "speculative_config": speculative}
        with LLM(model, device="cuda", max_model_len=256, num_kv_blocks=400, use_tqdm=False, **fields) as llm:
            texts.append([list(output.outputs[0].token_ids) for output in llm.generate(STORIES, params)])
            steps = llm.engine.stats().steps
    assert texts[0] == texts[1]
    assert steps < 50, f"{steps} steps for 80 tokens: hardly a draft was accepted"
