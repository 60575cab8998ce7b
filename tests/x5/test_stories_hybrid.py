"""The embedded hybrid model: its files, its logits against transformers', its stories."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from folovllm import LLM, SamplingParams
from tests.helpers import Driver, assert_logits_equal, hf_logits, prompts

MODEL = Path(__file__).parents[2] / "folovllm" / "assets" / "stories-hybrid"


def test_files_are_the_documented_ones() -> None:
    config = AutoConfig.from_pretrained(MODEL)
    assert config.architectures == ["Qwen3_5ForCausalLM"]
    assert config.layer_types == ["linear_attention", "linear_attention", "full_attention"] * 2
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 12e6


def test_logits_equal_hugging_face() -> None:
    (ids,) = prompts([70])
    assert_logits_equal(Driver(MODEL, "torch_naive", max_seqs=1).step({0: ids})[0], hf_logits(MODEL, ids))


@pytest.mark.parametrize("milestone", ["m5", "m6"])
def test_a_story_is_told(milestone: str) -> None:
    """Twice, the second time from a snapshot: with the tokenizer that all embedded models share."""
    ask = [{"role": "user", "content": "Tell me a story about Lily and a red kite."}]
    fields = {"device": "cpu", "max_model_len": 512, "max_num_seqs": 4, "snapshot_interval": 16, "use_tqdm": False}
    with LLM("stories-hybrid", milestone=milestone, **fields) as llm:
        texts = [llm.chat(ask, SamplingParams(temperature=0.0, max_tokens=80))[0].outputs[0].text for _ in range(2)]
    assert "Lily" in texts[0] and "kite" in texts[0]
    assert texts[0] == texts[1]
