"""Every family against its Hugging Face twin: whole prompts, prompts in pieces, token by token, ragged batches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from folovllm.layers.attention import Attention
from folovllm.model_config import context_limit, head_dim_of
from folovllm.models.registry import ARCHITECTURES, build_model
from tests.helpers import (
    FAMILIES,
    Driver,
    assert_as_accurate,
    assert_cache_matters,
    assert_logits_equal,
    assert_tokens_equal,
    assert_varied,
    hf_greedy,
    hf_logits,
    prompts,
    tiny_checkpoint,
)

CASES = {  # name: family, Hq, Hkv, D, tied
    "qwen3": ("qwen3", 4, 2, 32, True),
    "qwen3 untied, one head to a KV head": ("qwen3", 5, 5, 64, False),
    "qwen3 8 to 1, wide heads": ("qwen3", 8, 1, 128, True),
    "llama": ("llama", 9, 3, 64, True),
    "llama untied, 7 to 1": ("llama", 7, 1, 32, False),
    "llama wide heads": ("llama", 5, 1, 128, False),
    "qwen2": ("qwen2", 14, 2, 32, True),
    "qwen2 untied, 4 to 1": ("qwen2", 4, 1, 64, False),
    "mistral": ("mistral", 6, 1, 32, False),
    "mistral tied, wide heads": ("mistral", 3, 3, 128, True),
}
PIECES = {"whole": [37], "two pieces": [20, 17], "many pieces": [1, 13, 2, 1, 20], "token by token": [1] * 37}


def checkpoint(name: str) -> Path:
    family, heads, kv_heads, head_dim, tied = CASES[name]
    return tiny_checkpoint(family, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, tied=tied)


def feed(driver: Driver, seq: int, token_ids: list[int], pieces: list[int]) -> torch.Tensor:
    """The logits after every token, [n, V], when they come in pieces of the given lengths."""
    start, logits = 0, []
    for length in pieces:
        logits.append(driver.step({seq: token_ids[start : start + length]})[seq])
        start += length
    return torch.cat(logits)


@pytest.mark.parametrize("backend", ["torch_naive", "torch_cat"])
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_hugging_face(name: str, backend: str) -> None:
    path = checkpoint(name)
    (ids,) = prompts([37])
    reference = hf_logits(path, ids)
    for pieces in PIECES.values():
        assert_logits_equal(feed(Driver(path, backend, max_seqs=1), 0, ids, pieces), reference)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 64}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        ("mistral", {"sliding_window": 40}),
    ],
    ids=["llama3 rope", "llama biases", "llama head_dim", "qwen3 bias", "rope_theta 1e6", "window not reached"],
)
def test_what_a_config_may_change(family: str, overrides: dict[str, object]) -> None:
    path = tiny_checkpoint(family, **overrides)
    (ids,) = prompts([37])
    assert_logits_equal(feed(Driver(path), 0, ids, PIECES["two pieces"]), hf_logits(path, ids))


@pytest.mark.parametrize("block_size", [1, 7, 16, 96])
def test_ragged_batch_equals_each_alone(block_size: int) -> None:
    path = checkpoint("qwen3")
    texts = prompts([1, 23, 40, 9])
    driver = Driver(path, block_size=block_size)
    parts = [driver.step({0: texts[0], 1: texts[1][:10], 2: texts[2][:33]})]
    parts.append(driver.step({1: texts[1][10:], 2: texts[2][33:34], 3: texts[3]}))  # a decode between two prompts
    parts.append(driver.step({2: texts[2][34:]}))
    for seq, text in enumerate(texts):
        logits = torch.cat([part[seq] for part in parts if seq in part])
        assert_logits_equal(logits, hf_logits(path, text))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_hugging_face(family: str) -> None:
    path = tiny_checkpoint(family)
    outputs = []
    for prompt in prompts([8, 19, 30]):
        driver, new, output = Driver(path, "torch_cat", max_seqs=1), prompt, []
        for _ in range(24):
            new = [int(driver.step({0: new})[0][-1].argmax())]
            output += new
        assert_tokens_equal(output, *hf_greedy(path, prompt, 24))
        outputs.append(output)
    assert_varied(outputs)


def test_a_damaged_cache_shows() -> None:
    driver = Driver(checkpoint("qwen3"))
    (ids,) = prompts([30])
    driver.step({0: ids[:29]})

    def last() -> torch.Tensor:
        driver.cached[0] = 29
        return driver.step({0: ids[29:]})[0]

    slot = int(driver.slots(0, 12, 13))
    assert_cache_matters(last, lambda: driver.kv_cache[1, 1, slot // 16, slot % 16].zero_())


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_accurate_as_hugging_face(family: str) -> None:
    path = tiny_checkpoint(family)
    texts = prompts([40, 40, 40])
    truth, rival = ([hf_logits(path, text, dtype) for text in texts] for dtype in (torch.float32, torch.bfloat16))
    ours = Driver(path, dtype=torch.bfloat16).step(dict(enumerate(texts)))
    assert_as_accurate(torch.cat(list(ours.values())), torch.cat(rival), torch.cat(truth))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu(family: str) -> None:
    path = tiny_checkpoint(family)
    texts = prompts([1, 37, 20])
    logits = Driver(path, device="cuda").step(dict(enumerate(texts)))
    for seq, text in enumerate(texts):
        assert_logits_equal(logits[seq], hf_logits(path, text))


def test_logits_are_those_of_the_last_tokens() -> None:
    driver = Driver(checkpoint("qwen3"))
    batch = driver.batch({0: [5], 1: [1, 2, 3], 2: [9, 8]})
    with torch.inference_mode():
        hidden = driver.model(batch)
        logits = driver.model.compute_logits(hidden, batch)
        torch.testing.assert_close(logits, driver.model.lm_head(hidden[[0, 3, 5]]))


class TestRegistry:
    def test_unknown_architecture_lists_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match=r"MambaForCausalLM.*LlamaForCausalLM.*Qwen3ForCausalLM"):
            build_model(SimpleNamespace(architectures=["MambaForCausalLM"]), torch.float32, "cpu")

    def test_no_architecture_at_all(self) -> None:
        with pytest.raises(ValueError, match="none named"):
            build_model(SimpleNamespace(architectures=None), torch.float32, "cpu")

    def test_quantized_checkpoints_are_refused(self) -> None:
        config = SimpleNamespace(architectures=["LlamaForCausalLM"], quantization_config={"bits": 4})
        with pytest.raises(ValueError, match="quantized"):
            build_model(config, torch.float32, "cpu")

    def test_another_activation_is_refused_and_the_default_dtype_is_restored(self) -> None:
        config = AutoConfig.from_pretrained(tiny_checkpoint("llama"))
        config.hidden_act = "gelu"
        with pytest.raises(ValueError, match="hidden_act 'gelu'"):
            build_model(config, torch.bfloat16, "cpu")
        assert torch.get_default_dtype() == torch.float32

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_weights_are_born_in_their_dtype_on_their_device(self, dtype: torch.dtype) -> None:
        model = build_model(AutoConfig.from_pretrained(tiny_checkpoint("qwen3")), dtype, "meta")
        assert {(p.dtype, p.device.type, p.requires_grad) for p in model.parameters()} == {(dtype, "meta", False)}
        assert sum(isinstance(module, Attention) for module in model.modules()) == 3

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_every_known_architecture_builds(self, architecture: str) -> None:
        family = architecture.removesuffix("ForCausalLM").lower()
        model = build_model(AutoConfig.from_pretrained(tiny_checkpoint(family)), torch.float32, "meta")
        assert type(model).__name__ == architecture


class TestConfigFacts:
    def test_head_dim_is_the_configs_or_a_share_of_the_hidden_size(self) -> None:
        assert head_dim_of(SimpleNamespace(head_dim=128, hidden_size=64, num_attention_heads=4)) == 128
        assert head_dim_of(SimpleNamespace(head_dim=None, hidden_size=64, num_attention_heads=4)) == 16
        assert head_dim_of(SimpleNamespace(hidden_size=64, num_attention_heads=4)) == 16

    def test_a_sliding_window_bounds_the_context(self) -> None:
        full, slides = ["full_attention"] * 2, ["full_attention", "sliding_attention"]
        assert context_limit(SimpleNamespace(max_position_embeddings=512)) == 512
        assert context_limit(SimpleNamespace(max_position_embeddings=512, sliding_window=None)) == 512
        assert context_limit(SimpleNamespace(max_position_embeddings=512, sliding_window=64)) == 64
        assert context_limit(SimpleNamespace(max_position_embeddings=512, sliding_window=64, layer_types=full)) == 512
        assert context_limit(SimpleNamespace(max_position_embeddings=512, sliding_window=64, layer_types=slides)) == 64
