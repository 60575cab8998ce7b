"""The embedded hybrid model: its files, its logits against transformers', its stories."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from folovllm import LLM, SamplingParams
from folovllm.apps.bench.roofline import Rates, roofline_seconds
from folovllm.apps.bench.workload import BenchRequest, Workload
from folovllm.config import EngineConfig
from folovllm.engine.setup import set_up
from tests.helpers import Driver, assert_logits_equal, hf_logits, prompts

MODEL = Path(__file__).parents[2] / "folovllm" / "assets" / "stories-hybrid"


def test_files_are_the_documented_ones() -> None:
    config = AutoConfig.from_pretrained(MODEL)
    assert config.architectures == ["Qwen3_5ForCausalLM"]
    assert config.layer_types == ["linear_attention", "linear_attention", "full_attention"] * 2
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 14e6


def test_logits_equal_hugging_face() -> None:
    (ids,) = prompts([70])
    assert_logits_equal(Driver(MODEL, "torch_naive", max_seqs=1).step({0: ids})[0], hf_logits(MODEL, ids))


def test_a_story_is_told() -> None:
    """Twice, the second time from a snapshot: with the tokenizer that all embedded models share."""
    ask = [{"role": "user", "content": "Tell me a story about Lily and a red kite."}]
    fields = {"device": "cpu", "max_model_len": 512, "max_num_seqs": 4, "snapshot_interval": 16, "use_tqdm": False}
    with LLM("stories-hybrid", **fields) as llm:
        texts = [llm.chat(ask, SamplingParams(temperature=0.0, max_tokens=80))[0].outputs[0].text for _ in range(2)]
    assert "Lily" in texts[0] and "kite" in texts[0]
    assert texts[0] == texts[1]


def test_the_roofline_counts_states() -> None:
    """Two prompts of 10 tokens, answers of 5 and of 3: 4 steps and 6 decodes, counted by hand from the configuration."""
    setup = set_up(EngineConfig(model="stories-hybrid", device="cpu", milestone="m6"))
    linear = (2 * 128 + 128 + 128 + 2 * 4) * 256 + 128 * 256  # queries, keys, values, gate; the rule's two gates; back
    full = 2 * 256 * 256 + 2 * 128 * 256 + 256 * 256  # queries and gates, keys and values; back
    weights = 6 * 3 * 768 * 256 + 4 * linear + 2 * full
    state = 4 * (3 * 384 + 4 * 64 * 32) * 4  # last inputs of the convolution and matrices of four layers, float32
    keys_values = 2 * (2 * 2 * 64 * 4) * (11 + 12 + 13 + 14 + 11 + 12)
    moved = 4 * 4 * (weights + 4096 * 256) + keys_values + 2 * 6 * state
    attended = 2 * (2 * 2 * 10**2) * 4 * 64  # half of all pairs of a prompt, in two layers, for scores and for values
    updated = 20 * 4 * (2 * 4 * 384 + 6 * 4 * 64 * 32)
    computed = 2 * 20 * weights + attended + updated
    workload = Workload("w", [BenchRequest([1] * 10, 5), BenchRequest([2] * 10, 3)])
    found = roofline_seconds(workload, setup, Rates(1e9, 1e10))
    assert found == pytest.approx(moved / 1e9 + computed / 1e10, rel=1e-9)
