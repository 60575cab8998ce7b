"""The embedded mixture of experts: its files, its logits against transformers', its stories, and that no expert idles."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from folovllm import LLM, SamplingParams
from tests.helpers import Driver, assert_logits_equal, hf_logits, prompts

ASSETS = Path(__file__).parents[2] / "folovllm" / "assets"
MODEL = ASSETS / "stories-moe"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("stories-moe", device="cpu", milestone="m5", max_model_len=512, count_experts=True, use_tqdm=False)


def test_files_are_the_documented_ones() -> None:
    config = AutoConfig.from_pretrained(MODEL)
    assert config.architectures == ["Qwen3MoeForCausalLM"] and config.dtype == torch.bfloat16
    assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (8, 2, 96)
    assert '"num_experts": 8' in (MODEL / "config.json").read_text(), "the name that all versions of transformers read"
    dense = AutoConfig.from_pretrained(ASSETS / "stories-5m")
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads", "eos_token_id"):
        assert getattr(config, name) == getattr(dense, name)
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 12e6


def test_logits_equal_hugging_face() -> None:
    (ids,) = prompts([30])
    assert_logits_equal(Driver(MODEL, "torch_naive", max_seqs=1).step({0: ids})[0], hf_logits(MODEL, ids))


def test_a_story_is_told(llm: LLM) -> None:
    """With the tokenizer that all embedded models share."""
    asked = [{"role": "user", "content": "Tell me a story about Lily and a red kite."}]
    (output,) = llm.chat(asked, SamplingParams(temperature=0.0, max_tokens=80))
    (answer,) = output.outputs
    assert "Lily" in answer.text and "red kite" in answer.text


def test_no_expert_idles(llm: LLM) -> None:
    """Over a thousand tokens of stories, in each layer: none is asked more than three times its share, or hardly at all."""
    lines = (ASSETS / "stories-5m" / "calibration.jsonl").read_text().splitlines()[:8]
    before = torch.tensor(llm.engine.expert_load())
    llm.generate([json.loads(line)["text"] for line in lines], SamplingParams(max_tokens=1))
    counts = torch.tensor(llm.engine.expert_load()) - before
    assert counts.shape == (6, 8) and counts.sum(1).unique().tolist() == [counts[0].sum()]
    shares = counts * 8 / counts.sum(1, keepdim=True)
    assert shares.min() > 0.1 and shares.max() < 3, f"shares of the experts by layer: {shares}"
