"""Models with experts against their Hugging Face twins, on every preset, and on two ranks."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from folovllm import LLM
from folovllm.apps.bench.contenders import random_model
from folovllm.apps.bench.roofline import Weights, experts_read
from folovllm.config import EngineConfig
from folovllm.electives.moe.layers import MoE
from folovllm.engine.build_batch import layer_set
from folovllm.engine.llm_engine import make_engine
from folovllm.engine.setup import set_up
from folovllm.models.registry import PLAIN_LAYERS, build_model
from tests.helpers import Driver, assert_logits_equal, hf_logits, prompts, tiny_checkpoint
from tests.workloads import ARRIVALS, MAX_MODEL_LEN, answered, mixed_requests, serve
from tests.x4.checkpoints import FAMILIES, assert_ranks_have_experts, moe_checkpoint

SMALL = {"block_size": 4, "num_kv_blocks": 40, "max_num_batched_tokens": 20}  # preemption, and prompts in chunks


@pytest.mark.parametrize("experts", ["one by one", "grouped"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_hugging_face(family: str, experts: str) -> None:
    """A whole prompt, and one in pieces; of fewer tokens, in one layer, where the experts run in the grouped kernel."""
    path, layers, ways = moe_checkpoint(family), PLAIN_LAYERS, ([21], [13, 1, 7])
    if experts == "grouped":
        pytest.importorskip("triton", reason="Triton is for Linux only")
        from folovllm.electives.moe.fused import EXPERT_KERNELS

        path, layers, ways = moe_checkpoint(family, 1), layers.having(EXPERT_KERNELS), ([5, 1],)
    (ids,) = prompts([sum(ways[0])])
    reference = hf_logits(path, ids)
    for pieces in ways:
        assert_logits_equal(Driver(path, max_seqs=1, layers=layers).feed(ids, pieces), reference)


@pytest.fixture(scope="module")
def load() -> Any:
    return answered(moe_checkpoint(), mixed_requests("seeded", 6))


@pytest.mark.parametrize("milestone", ["m2", "m6"])
def test_presets_answer_as_transformers(load: Any, milestone: str) -> None:
    fields = {"max_model_len": MAX_MODEL_LEN, "use_tqdm": False} | ({} if milestone == "m2" else SMALL)
    config = EngineConfig(model=str(load.model), milestone=milestone, device="cpu", **fields)
    load.check(serve(make_engine(config), load.requests, ARRIVALS[2]))


@pytest.mark.parametrize(
    ("family", "expert_parallel"),
    [("qwen3_moe", False), ("qwen2_moe", True)],
    ids=["each expert cut", "experts shared out, the shared one cut"],
)
def test_two_ranks_hold_what_one_has(family: str, expert_parallel: bool) -> None:
    assert_ranks_have_experts(moe_checkpoint(family), expert_parallel)


@pytest.mark.parametrize(("family", "fields", "says"), [
    (None, {"enable_expert_parallel": True, "tensor_parallel_size": 2}, "enable_expert_parallel shares out experts, and this model has none"),
    (None, {"count_experts": True}, "count_experts counts how often experts are asked, and this model has none"),
    ("qwen2_moe", {"enable_expert_parallel": True, "tensor_parallel_size": 4},
     "has 4 query heads, 2 KV heads, 6 experts, shared_expert_intermediate_size 40: sizes that work are 1, 2"),
    ("mixtral", {"tensor_parallel_size": 3}, "has 4 query heads, 2 KV heads, intermediate_size 80: sizes that work are 1, 2, 4"),
], ids=str)  # fmt: skip
def test_what_cannot_be(family: str | None, fields: dict[str, Any], says: str) -> None:
    path = tiny_checkpoint() if family is None else moe_checkpoint(family)
    with pytest.raises(ValueError, match=says):
        LLM(str(path), device="cpu", **fields)


@pytest.mark.parametrize(("change", "says"), [
    (lambda t: t.pop("model.layers.1.mlp.experts.5.up_proj.weight"), "lacks model.layers.1.mlp.experts.5.up_proj.weight"),
    (  # the stack of all experts beside each of them
        lambda t: t.update({"model.layers.0.mlp.experts.down_proj": torch.zeros(8, 72, 48)}),
        "down_proj.weight', for which the model has no place \\(or had it twice\\)",
    ),
], ids=["an expert is missing", "experts are there twice"])  # fmt: skip
def test_a_broken_checkpoint(change: Any, says: str, tmp_path: Path) -> None:
    broken = shutil.copytree(moe_checkpoint(), tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    change(tensors)
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=says):
        LLM(str(broken), device="cpu", milestone="m3")


def test_what_a_step_reads_of_qwen3_30b(tmp_path: Path) -> None:
    """Alone a token reads 8 of 128 experts; 256 tokens read all of them, and that is most of what the step reads."""
    own = {"tokenizer": str(tiny_checkpoint()), "device": "cpu"}
    setup = set_up(EngineConfig(**random_model("qwen3-30b-a3b", tmp_path, own)))
    weights = Weights.of(build_model(setup.hf_config, setup.dtype, "meta", max_model_len=1), setup.dtype)
    assert weights.experts == 48 * 128 * 3 * 2048 * 768
    assert experts_read(128, 8, 1) == pytest.approx(8)
    assert 127.9 < experts_read(128, 8, 256) < 128
    head = setup.vocab_size * 2048
    whole = weights.always + weights.experts + 2 * head  # with the embedding
    assert whole == pytest.approx(30.5e9, rel=0.01)  # as it is called
    assert weights.always + weights.experts / 16 + head == pytest.approx(3.0e9, rel=0.02)


@pytest.mark.parametrize(("device", "kind"), [("cpu", "Experts"), ("cuda", "GroupedExperts")])
def test_compiled_layers_can_be_captured_with_experts(device: str, kind: str) -> None:
    """On a GPU: there torch's path of experts would wait for the device in the middle of a capture."""
    pytest.importorskip("triton")
    setup: Any = SimpleNamespace(config=SimpleNamespace(compile=True, extras={}), device=torch.device(device))
    layers = replace(PLAIN_LAYERS, kernels=layer_set(setup).kernels)
    hf_config = AutoConfig.from_pretrained(moe_checkpoint("qwen3_moe"))
    model = build_model(hf_config, torch.float32, "meta", layers=layers)
    assert type(cast(MoE, model.model.layers[0].mlp).experts).__name__ == kind


@pytest.mark.parametrize("backend", ["torch_naive", "triton"])
def test_a_token_that_is_nan_is_so_alone(backend: str) -> None:
    """Its router chooses nothing of use, perhaps no expert at all; nobody else notices. There may also be no token."""
    moe = cast(MoE, Driver(moe_checkpoint("qwen2_moe"), backend).model.model.layers[0].mlp)
    x = torch.randn(5, 72, generator=torch.Generator().manual_seed(0)).to(moe.experts.downs.weight.device)
    with torch.inference_mode():
        expected = moe(x)
        x[2] = torch.nan
        actual = moe(x)
    assert actual[2].isnan().all() and moe(x[:0]).shape == (0, 72)
    others = [0, 1, 3, 4]
    torch.testing.assert_close(actual[others], expected[others])


@pytest.mark.parametrize(("family", "fields", "says"), [
    ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9 .* between 1 and num_experts, 8"),
    ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
    (
        "mixtral",
        {"num_local_experts": 2**31 - 1},
        "is 2147483647 in the model's configuration, and must be .* at most 4,096",
    ),
    ("mixtral", {"num_local_experts": 0}, "is 0 in the model's configuration, and must be at least 1"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, "layers with experts among layers without are not supported"),
    ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
])  # fmt: skip
def test_configurations_that_make_no_model(family: str, fields: dict[str, Any], says: str) -> None:
    config = AutoConfig.from_pretrained(moe_checkpoint(family))
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=says):
        build_model(config, torch.float32, "meta")
