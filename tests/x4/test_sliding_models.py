"""Models with sliding windows against their Hugging Face twins: prompts longer than the window, on every backend and preset."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from folovllm.apps.bench.roofline import tokens_read
from folovllm.config import EngineConfig
from folovllm.electives.quantization.quantizer.whole import logits_of
from folovllm.engine.llm_engine import make_engine
from folovllm.layers.layer_set import LayerSet
from folovllm.models.registry import build_model
from folovllm.sampling_params import SamplingParams
from tests import contract
from tests.helpers import Driver, assert_as_accurate, assert_logits_equal, hf_logits, prompts, tiny_checkpoint
from tests.workloads import MAX_MODEL_LEN, Request, Workload, answered, mixed_requests, serve

WINDOW = 12  # crosses blocks of 4 and of 16
SLIDES = {"sliding_window": WINDOW, "use_sliding_window": True}
FAMILIES = {
    "gemma3_text": {},  # sliding, full, sliding (tests.helpers)
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"sliding_window": WINDOW},
    "qwen2": {**SLIDES, "max_window_layers": 1},  # full, sliding, sliding
    "qwen3": {**SLIDES, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}


def checkpoint(family: str) -> Path:
    """A random model of three layers, some of which slide."""
    return tiny_checkpoint(family, **FAMILIES[family])


@pytest.mark.parametrize(("family", "backend"), [
    *((family, "torch_naive") for family in FAMILIES), ("gemma3_text", "torch_cat"),
])  # fmt: skip
def test_logits_equal_hugging_face(family: str, backend: str) -> None:
    """A prompt of three windows and a half, whole and in pieces, single tokens among them."""
    path, (ids,) = checkpoint(family), prompts([42])
    reference = hf_logits(path, ids)
    for pieces in ([42], [5, 1, 19, 1, 1, 15]):
        assert_logits_equal(Driver(path, backend, block_size=4, max_seqs=1).feed(ids, pieces), reference)


SMALL = {"block_size": 4, "num_kv_blocks": 40, "max_num_batched_tokens": 20}  # preemption, and prompts in chunks


@cache
def seeded(family: str) -> Workload:
    return answered(checkpoint(family), mixed_requests("seeded", 5))


@pytest.mark.parametrize(
    ("family", "milestone", "pool"),
    [("gemma3_text", "m2", {}), ("gemma3_text", "m6", SMALL), ("mistral", "m6", SMALL)],
    ids=str,
)
def test_presets_answer_as_transformers(family: str, milestone: str, pool: dict[str, int]) -> None:
    load = seeded(family)
    fields: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "device": "cpu", "use_tqdm": False, **pool}
    load.check(serve(make_engine(EngineConfig(model=str(load.model), milestone=milestone, **fields)), load.requests))


@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_kernels_answer_as_transformers(family: str) -> None:
    """M6 over kernels, all layers fused: decodes that store on the way, chunks, preemption."""
    layers = 2 if family == "gemma3_text" else 1  # one that slides; Gemma's second does not
    path = tiny_checkpoint(family, **FAMILIES[family], num_hidden_layers=layers, num_heads=2, num_kv_heads=1)
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    load = answered(path, [Request(prompt, greedy) for prompt in prompts([17, 3])])
    fields: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 12, "block_size": 4, "max_model_len": 24}
    fields |= {"attention_backend": "triton", "dtype": "float32", "device": contract.DEVICE, "use_tqdm": False}
    load.check(serve(make_engine(EngineConfig(model=str(path), milestone="m6", **fields)), load.requests))


@pytest.mark.parametrize("backend", ["torch_paged", pytest.param("triton", marks=pytest.mark.gpu)])
def test_gemma_in_bfloat16(backend: str) -> None:
    """Norms multiply in float32, so that it is as accurate as transformers' model in the same dtype."""
    path, (ids,) = checkpoint("gemma3_text"), prompts([42])
    device = "cuda" if backend == "triton" else "cpu"
    layers = LayerSet()
    if backend == "triton":
        from folovllm.models.fused_layer import skinny_layers

        layers = skinny_layers(32)
    driver = Driver(path, backend, max_seqs=1, dtype=torch.bfloat16, device=device, layers=layers)
    truth = hf_logits(path, ids)
    assert_as_accurate(driver.step({0: ids})[0], hf_logits(path, ids, torch.bfloat16), truth)


@pytest.mark.parametrize("name", ["attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"])
def test_what_gemma_may_have_and_we_have_not(name: str) -> None:
    config = AutoConfig.from_pretrained(checkpoint("gemma3_text"))
    setattr(config, name, 30.0 if name.endswith("softcapping") else True)
    with pytest.raises(ValueError, match=f"{name} is not supported"):
        build_model(config, torch.float32, "meta")


def test_the_roofline_counts_what_a_window_reads() -> None:
    """Decodes at lengths 8 and 9 read all of that without a window, and 4 tokens each with one of 4."""
    assert tokens_read(7, 3, None) == 8 + 9
    assert tokens_read(7, 3, 4) == 4 + 4
    assert tokens_read(2, 4, 4) == 3 + 4 + 4


def test_whole_sequences_without_a_cache() -> None:
    """As perplexity is measured and codes are calibrated."""
    path, texts = checkpoint("mistral"), prompts([42, 42])
    model = Driver(path, "torch_naive", max_seqs=1).model
    for logits, ids in zip(logits_of(model, torch.tensor(texts)), texts, strict=True):
        assert_logits_equal(logits, hf_logits(path, ids))


def test_queries_of_gemma_are_rounded_once() -> None:
    """Weights in float32 meet numbers that are not rounded yet: else the norm would lose half a bit."""
    pytest.importorskip("triton", reason="Triton is for Linux only")
    from folovllm.kernels.qk_norm_rope import Preparation, qk_norm_rope_store

    weight = (1 + 0.3 * torch.randn(64)).to(contract.DEVICE)
    x = torch.randn(32, 2, 64).to(contract.DEVICE, torch.float16)
    still = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), 1).to(contract.DEVICE)  # position 0: no angle
    where = torch.zeros(32, dtype=torch.int64, device=contract.DEVICE)
    cache = torch.zeros(2, 1, 16, 2, 64, dtype=x.dtype, device=contract.DEVICE)
    found = qk_norm_rope_store(x, x, x, where, cache, where - 1, Preparation(still, weight, weight, 1e-6))
    exact = torch.nn.functional.rms_norm(x.double(), (64,), weight.double(), 1e-6)
    assert ((found - exact) / exact).abs().max() < 1.01 * 2**-11, "half of the last bit"
