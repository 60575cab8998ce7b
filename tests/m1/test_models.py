"""Every family against its Hugging Face twin: whole prompts, prompts in pieces, token by token, ragged batches."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from folovllm import LLM, SamplingParams
from folovllm.layers.attention import Attention
from folovllm.layers.rotary_embedding import RotaryEmbedding
from folovllm.models.files import read_json
from folovllm.models.model_config import num_positions, windows_of
from folovllm.models.registry import ARCHITECTURES, build_model
from folovllm.plugins import MODELS
from tests import helpers
from tests.helpers import Driver, assert_logits_equal, assert_tokens_equal, hf_greedy, prompts, tiny_checkpoint

CASES = {  # name: family, Hq, Hkv, D, tied
    "qwen3": ("qwen3", 4, 2, 32, True),
    "qwen3 untied, one head to a KV head": ("qwen3", 5, 5, 64, False),
    "llama": ("llama", 9, 3, 64, True),
    "llama wide heads": ("llama", 5, 1, 128, False),
    "qwen2": ("qwen2", 14, 2, 32, True),
    "qwen2 untied, 4 to 1": ("qwen2", 4, 1, 64, False),
    "mistral": ("mistral", 6, 1, 32, False),
    "phi3": ("phi3", 6, 2, 32, False),
    "mistral tied, wide heads": ("mistral", 3, 3, 128, True),
}
PIECES = [19], [7, 12], [1, 5, 2, 1, 10], [1] * 19  # a prompt whole, in pieces, and token by token


def checkpoint(name: str) -> Path:
    family, heads, kv_heads, head_dim, tied = CASES[name]
    return tiny_checkpoint(family, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, tied=tied)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_hugging_face(name: str) -> None:
    """More tokens than a block holds. `torch_cat` has no blocks: it takes a prompt and then single tokens."""
    path = checkpoint(name)
    (ids,) = prompts([19])
    reference = helpers.hf_logits(path, ids)
    driver = Driver(path, max_seqs=len(PIECES), max_len=32)
    for seq, pieces in enumerate(PIECES):
        assert_logits_equal(driver.feed(ids, pieces, seq), reference)
    assert_logits_equal(Driver(path, "torch_cat", max_seqs=1).feed(ids, [9, *[1] * 10]), reference)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(("family", "overrides"), [
    ("llama", {"rope_parameters": LLAMA3}),
    ("qwen3", {"rope_parameters": YARN}),
    ("qwen3", {"rope_scaling": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.6}}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),  # as trained
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 64}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("mistral", {"sliding_window": 40}),  # longer than the prompt
], ids=str)  # fmt: skip
def test_what_a_config_may_change(family: str, overrides: dict[str, object]) -> None:
    path = tiny_checkpoint(family, **overrides)
    (ids,) = prompts([37])
    assert_logits_equal(Driver(path).feed(ids, [20, 17]), helpers.hf_logits(path, ids))


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
        assert_logits_equal(logits, helpers.hf_logits(path, text))


@pytest.mark.parametrize("family", helpers.FAMILIES)
def test_bfloat16_is_as_accurate_as_hugging_face(family: str) -> None:
    path = tiny_checkpoint(family)
    texts = prompts([40, 40, 40])
    truth, rival = (
        [helpers.hf_logits(path, text, dtype) for text in texts] for dtype in (torch.float32, torch.bfloat16)
    )
    ours = Driver(path, dtype=torch.bfloat16).step(dict(enumerate(texts)))
    helpers.assert_as_accurate(torch.cat(list(ours.values())), torch.cat(rival), torch.cat(truth))


@pytest.mark.gpu
@pytest.mark.parametrize("family", helpers.FAMILIES)
def test_on_a_gpu(family: str) -> None:
    path = tiny_checkpoint(family)
    texts = prompts([1, 37, 20])
    logits = Driver(path, device="cuda").step(dict(enumerate(texts)))
    for seq, text in enumerate(texts):
        assert_logits_equal(logits[seq], helpers.hf_logits(path, text))


class TestRegistry:
    @pytest.mark.parametrize(("family", "change", "says"), [
        ("llama", {"architectures": None}, "none named"),
        ("gemma3_text", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1, and must be above 0"),
    ])  # fmt: skip
    def test_configurations_of_no_model(self, family: str, change: dict[str, Any], says: str) -> None:
        """The default dtype is restored."""
        fields = AutoConfig.from_pretrained(tiny_checkpoint(family)).to_dict() | change
        config = SimpleNamespace(**fields)
        with pytest.raises(ValueError, match=says):
            build_model(config, torch.bfloat16, "meta")
        assert torch.get_default_dtype() == torch.float32

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_weights_are_born_in_their_dtype_on_their_device(self, dtype: torch.dtype) -> None:
        model = build_model(AutoConfig.from_pretrained(tiny_checkpoint("qwen3")), dtype, "meta")
        assert {(p.dtype, p.device.type, p.requires_grad) for p in model.parameters()} == {(dtype, "meta", False)}
        assert sum(isinstance(module, Attention) for module in model.modules()) == 3

    def test_the_table_of_models_names_every_family_and_no_other(self) -> None:
        table = (Path(__file__).parents[2] / "docs/reference/models.md").read_text(encoding="utf-8")
        said = set(re.findall(r"\| `(\w+)` \| yes \|", table))
        assert said == {*ARCHITECTURES, *MODELS}


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 1.0, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 256,
}  # fmt: skip
ONLY_M1 = [  # family, fields, and what the refusal names
    ("gemma2", {"hidden_size": 128, "pad_token_id": None}, "no model for architecture Gemma2ForCausalLM"),
    (
        "qwen3_moe",
        {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
        "layers with experts among layers without",
    ),
    ("llama", {"rope_parameters": LONGROPE}, "RoPE of type 'longrope'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial rotary embedding .of 50% of a head."),
    ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
]


class TestWhatOnlyTransformersHas:
    @pytest.mark.parametrize(("family", "fields", "names"), ONLY_M1, ids=[case[2] for case in ONLY_M1])
    def test_the_refusal_names_it_and_says_who_runs_it(self, family: str, fields: dict[str, Any], names: str) -> None:
        path = tiny_checkpoint(family, **fields)
        with pytest.raises(ValueError, match=f'{names}.*; milestone="m1" runs it, through transformers$'):
            LLM(str(path), milestone="m2", use_tqdm=False)
        (prompt,) = prompts([20])
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        answer = LLM(str(path), milestone="m1", use_tqdm=False).generate([prompt], greedy, use_tqdm=False)[0]
        assert_tokens_equal(answer["token_ids"], *hf_greedy(path, prompt, 8))

    def test_nothing_is_promised_of_what_nobody_knows(self) -> None:
        with pytest.raises(ValueError) as caught:
            build_model(SimpleNamespace(architectures=["X"], model_type="llama"), torch.float32, "cpu")
        assert "m1" not in str(caught.value)
        kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        config = SimpleNamespace(**kind, quantization_config={"bits": 4})
        with pytest.raises(ValueError, match="quantized") as caught:
            build_model(config, torch.float32, "cpu")
        assert "m1" not in str(caught.value), "what transformers would need for it may not be installed"

    def test_beyond_a_sliding_window(self) -> None:
        path, (prompt,) = tiny_checkpoint("mistral", sliding_window=40), prompts([60])
        with pytest.raises(ValueError, match="600 exceeds the model's context of 512"):
            LLM(str(path), milestone="m1", max_model_len=600, use_tqdm=False)
        greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        llm = LLM(str(path), milestone="m1", max_model_len=100, use_tqdm=False)
        answer = llm.generate([prompt], greedy, use_tqdm=False)[0]["token_ids"]
        assert_tokens_equal(answer, *hf_greedy(path, prompt, 20))


class TestPositions:
    """The table of angles is as long as the context that is served, whatever the model allows."""

    @pytest.mark.parametrize(
        "milestone", ["m1", *(pytest.param(m, marks=getattr(pytest.mark, m)) for m in ("m2", "m6"))]
    )
    def test_of_the_engine(self, milestone: str, monkeypatch: pytest.MonkeyPatch) -> None:
        tables: list[torch.Tensor] = []
        keep = RotaryEmbedding.__init__

        def spy(rope: RotaryEmbedding, *given: Any) -> None:
            keep(rope, *given)
            tables.append(rope.cos_sin_cache)

        monkeypatch.setattr(RotaryEmbedding, "__init__", spy)
        path, (prompt,) = tiny_checkpoint("llama"), prompts([60])
        fields = {"milestone": milestone, "model_impl": "native", "max_model_len": 64, "use_tqdm": False}
        llm = LLM(str(path), device="cpu", **fields)
        to_the_end = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        answer = llm.generate([prompt], to_the_end, use_tqdm=False)[0]["token_ids"]
        assert [len(table) for table in tables] == [64]
        assert_tokens_equal(answer, *hf_greedy(path, prompt, 4))


@pytest.mark.parametrize("family", ["gemma3n_text", "qwen2_moe", "phi3"])
def test_the_table_of_fields_knows_what_other_models_state(family: str, tmp_path: Path) -> None:
    """M1 runs them, so that what only they have is no damage."""
    for fields in (AutoConfig.for_model(family).to_dict(), AutoConfig.for_model(family).to_diff_dict()):
        (tmp_path / "config.json").write_text(json.dumps(fields, default=str))
        assert read_json(tmp_path / "config.json")["model_type"] == family


class TestConfigFacts:
    def test_yarn_makes_the_context_longer(self) -> None:
        """Qwen3's model card adds the scaling to a config.json whose `max_position_embeddings` stays at 40,960."""
        qwen3 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        assert num_positions(SimpleNamespace(max_position_embeddings=40960, rope_scaling=qwen3)) == 131072
        assert num_positions(SimpleNamespace(max_position_embeddings=163840, rope_scaling=qwen3)) == 163840
        whole = {"rope_type": "yarn", "factor": 4.0}
        assert num_positions(SimpleNamespace(max_position_embeddings=40960, rope_scaling=whole)) == 40960

    @pytest.mark.parametrize("milestone", ["m1", pytest.param("m2", marks=pytest.mark.m2)])
    def test_a_yarn_checkpoint_may_be_used_beyond_its_first_training(self, milestone: str) -> None:
        yarn = {**YARN, "original_max_position_embeddings": 64}
        path = tiny_checkpoint("qwen3", rope_parameters=yarn, max_position_embeddings=64)
        llm = LLM(str(path), milestone=milestone, max_model_len=100, use_tqdm=False)
        (prompt,) = prompts([80])
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        answer = llm.generate([prompt], greedy, use_tqdm=False)[0]["token_ids"]
        assert_tokens_equal(answer, *hf_greedy(path, prompt, 8))

    def test_which_layers_slide(self) -> None:
        mixed = ["full_attention", "sliding_attention"]
        assert windows_of(SimpleNamespace(num_hidden_layers=2)) == [None, None]
        assert windows_of(SimpleNamespace(num_hidden_layers=2, sliding_window=0)) == [None, None]
        assert windows_of(SimpleNamespace(num_hidden_layers=2, sliding_window=64)) == [64, 64]
        assert windows_of(SimpleNamespace(num_hidden_layers=2, sliding_window=64, layer_types=mixed)) == [None, 64]
        assert windows_of(SimpleNamespace(num_hidden_layers=2, sliding_window=None, layer_types=mixed)) == [None, None]
        with pytest.raises(ValueError, match="layers of type chunked_attention are not supported"):
            windows_of(SimpleNamespace(num_hidden_layers=1, sliding_window=64, layer_types=["chunked_attention"]))
