"""Checkpoints whose experts are quantized, as their writers lay them out: answers, ranks, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from folovllm import EngineConfig
from folovllm.apps.bench.contenders import random_model
from folovllm.apps.bench.roofline import Weights
from folovllm.electives.moe.experts import Experts, ExpertStack, GroupedExperts
from folovllm.electives.quantization.quantizer.options import QuantizeOptions
from folovllm.electives.quantization.quantizer.run import quantize as quantize_folder
from folovllm.engine.setup import set_up
from folovllm.layers.linear import LinearBase
from folovllm.models.loader import load_native_model
from folovllm.models.registry import build_model
from tests.contract import DEVICE
from tests.helpers import Driver, assert_logits_equal, hf_logits, prompts, tiny_checkpoint
from tests.x2 import quantized
from tests.x2.quantized import Quantize, compressed, packed, quantize, quantize_8, write_quantized
from tests.x4.checkpoints import FAMILIES, assert_ranks_have_experts, wide_checkpoint

E4M3 = torch.float8_e4m3fn
# As Qwen3-30B-A3B-FP8 names what stays plain.
PLAIN = ["lm_head", *(f"model.layers.{i}.{part}" for i in range(2) for part in ("input_layernorm", "mlp.gate"))]
BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": PLAIN}
KINDS: dict[str, tuple[str, Quantize, dict[str, Any]]] = {
    "fp8 blocks": ("qwen3_moe", quantize_8(E4M3, "weight_scale_inv", (16, 16)), BLOCKS),
    "fp8 channel": (
        "mixtral",
        quantize_8(E4M3, "weight_scale", None),
        compressed(8, "float", "float-quantized", "channel", ("lm_head", "re:.*block_sparse_moe.gate")),
    ),
    "int8 packed": (
        "qwen2_moe",
        packed(quantize_8(torch.int8, "weight_scale", None)),
        compressed(8, "int", "pack-quantized", "channel", ("lm_head", "re:.*gate$")),
    ),
    "int4 packed": (
        "qwen3_moe",
        quantize(quantized.to_packed_symmetric, symmetric=True),
        compressed(4, "int", "pack-quantized", "group", ("lm_head", "re:.*mlp.gate$"), group_size=quantized.GROUP),
    ),
    "gptq": ("qwen2_moe", quantize(quantized.to_gptq), quantized.GPTQ),
    "awq": ("mixtral", quantize(quantized.to_awq), quantized.AWQ | {"modules_to_not_convert": ["gate"]}),
}
SIZES = {
    "qwen3_moe": {"moe_intermediate_size": 96},
    "qwen2_moe": {
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "num_heads": 2, "num_kv_heads": 1,
    },
    "mixtral": {"intermediate_size": 96},
}  # fmt: skip


def source(family: str) -> Path:
    """Two layers of 64 columns."""
    fields = {"num_hidden_layers": 2, "hidden_size": 64, **FAMILIES[family], **SIZES[family]}
    return tiny_checkpoint(family, **fields)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A kind -> its checkpoint, and the same model in plain floats; each is made once."""
    made: dict[str, tuple[Path, Path]] = {}

    def write(kind: str) -> tuple[Path, Path]:
        if kind not in made:
            family, quantize, config = KINDS[kind]
            made[kind] = write_quantized(source(family), tmp_path_factory.mktemp("coded"), quantize, config)
        return made[kind]

    return write


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_numbers_that_the_codes_stand_for(kind: str, written: Any) -> None:
    """Transformers has the numbers. A whole prompt, and one in pieces; experts stay codes, and routers floats."""
    coded, floats = written(kind)
    (ids,) = prompts([20])
    driver = Driver(coded, "torch_naive", max_seqs=1)
    assert_logits_equal(driver.feed(ids, [14, 1, 5]), hf_logits(floats, ids))
    mlp: Any = driver.model.model.layers[1].mlp
    assert type(mlp.experts) is Experts and mlp.gate.weight.dtype == torch.float32
    stacks = [module for module in driver.model.modules() if isinstance(module, ExpertStack)]
    assert len(stacks) == 4 and not any(p.is_floating_point() and p.dtype != E4M3 for m in stacks for p in codes(m))


def codes(stack: ExpertStack) -> list[torch.Tensor]:
    """What a stack keeps of weights."""
    return [stack.weight]


@pytest.mark.parametrize("kind", ["fp8 blocks", "int8 packed"])
def test_transformers_reads_the_same_checkpoint_alike(kind: str, written: Any) -> None:
    """In its own way, through the packages that it needs for it. Experts of 4 bits it rounds to their scales' dtype (5.23)."""
    for package in ("compressed_tensors", "accelerate"):
        pytest.importorskip(package, reason=f"transformers needs {package} for this (pip install -e '.[dev]')")
    coded, _ = written(kind)
    (ids,) = prompts([9])
    assert_logits_equal(Driver(coded).step({0: ids})[0], hf_logits(coded, ids))


@pytest.mark.parametrize("kind", ["int8 packed", "gptq"])
def test_the_grouped_kernel_in_the_model(kind: str, written: Any) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux only")
    from folovllm.models.fused import fused_layers

    coded, floats = written(kind)
    (ids,) = prompts([3])
    driver = Driver(coded, "torch_paged", max_seqs=1, device=DEVICE, layers=fused_layers(32))
    assert_logits_equal(driver.step({0: ids})[0], hf_logits(floats, ids))
    mlp: Any = driver.model.model.layers[0].mlp
    assert type(mlp.experts) is GroupedExperts


def test_in_16_bits_on_cpu(written: Any) -> None:
    """Where torch has a kernel for a whole layer of 4 bits, which would not give up single experts."""
    x, answers = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)), []
    for dtype in (torch.bfloat16, torch.float32):
        mlp: Any = Driver(written("gptq")[0], dtype=dtype).model.model.layers[0].mlp
        answers.append(mlp.experts(x.to(dtype), torch.arange(6), torch.tensor([0, 2, 2, 3, 3, 3, 6])).float())
    torch.testing.assert_close(*answers, rtol=2e-2, atol=2e-2 * float(answers[1].abs().max()))


@pytest.mark.parametrize("kind", ["fp8 blocks", "int8 packed", "gptq", "awq"])
def test_ranks_hold_their_parts_of_codes_and_scales(kind: str, tmp_path: Path) -> None:
    """Where each expert is cut, and where experts are shared out."""
    family, quantize, config = KINDS[kind]
    wide = {name: 64 for name in SIZES[family] if name.endswith("intermediate_size")}
    fields = {"num_hidden_layers": 2, "hidden_size": 64, **FAMILIES[family], **SIZES[family], **wide}
    coded, _ = write_quantized(tiny_checkpoint(family, **fields), tmp_path, quantize, config)
    for expert_parallel in (False, True):
        assert_ranks_have_experts(coded, expert_parallel)


CUTS = r"cannot share mlp.experts.0.gate_proj: a rank's part \[48, 64\] would not hold whole blocks of 32 x .*"


@pytest.mark.parametrize(("said", "fields", "says"), [
    ({"weight_block_size": [32, 16]}, {"tensor_parallel_size": 2}, CUTS + "set enable_expert_parallel, or lower"),
    ({"weight_block_size": [64, 16]}, {}, r"experts with such weights are not supported: blocks of 64 x 16 weights .* do not divide \[96, 64\]"),
    ({"modules_to_not_convert": [*PLAIN, "experts.3"]}, {}, "all experts of a layer must be quantized in one way, or none of them"),
    (quantized.SORTED, {}, r"experts with such weights are not .*: each sorts its inputs in an order .* \(desc_"),
], ids=lambda value: str(value)[:30])  # fmt: skip
def test_what_cannot_be(said: dict[str, Any], fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    """Said by `config.json` alone: no weight is read."""
    coded = shutil.copytree(source("qwen3_moe"), tmp_path / "coded")
    config = json.loads((coded / "config.json").read_text())
    said = said if said is quantized.SORTED else BLOCKS | said
    (coded / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    (coded / "model.safetensors").write_bytes(bytes(1 << 17))
    model = {"model": str(coded), "device": "cpu"}
    with pytest.raises(ValueError, match=says):
        load_native_model(set_up(EngineConfig(**model, **fields)))
    if fields:  # where experts stay whole nothing is cut
        set_up(EngineConfig(**model, **fields, enable_expert_parallel=True))


def test_experts_may_stay_plain(tmp_path: Path) -> None:
    """And everything else is in codes."""
    config = BLOCKS | {"modules_to_not_convert": [*PLAIN, "mlp.experts"]}
    coded, floats = write_quantized(source("qwen3_moe"), tmp_path, KINDS["fp8 blocks"][1], config, ("experts",))
    assert_logits_equal(Driver(coded).step({0: [5, 9, 3]})[0], Driver(floats).step({0: [5, 9, 3]})[0])


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_random_weights(kind: str) -> None:
    fields = {"random_weights": True, "quantization": kind, "use_tqdm": False}
    model = load_native_model(set_up(EngineConfig(model=str(wide_checkpoint(1)), device="cpu", **fields)))
    linears = {name: module for name, module in model.named_modules() if isinstance(module, LinearBase)}
    plain = {name.rpartition(".")[2] for name, linear in linears.items() if "weight" in dict(linear.named_parameters())}
    assert plain >= {"gate", "shared_expert_gate"}
    for name, module in linears.items():
        if not name.endswith("gate"):
            assert 0.015 < module.linear_method.dequantized(module, torch.float32).std() < 0.025, name


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_quantize_writes_experts_in_codes(format: str, tmp_path: Path) -> None:
    """And leaves routers as they were. Transformers has the numbers that the codes stand for."""
    model, options = wide_checkpoint(2), QuantizeOptions(format=format)
    quantize_folder(str(model), options, tmp_path / "coded", device="cpu", use_tqdm=False)
    tensors = load_file(model / "model.safetensors")
    coded = {k: v for file in (tmp_path / "coded").glob("*.safetensors") for k, v in load_file(file).items()}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        prefix = name.removesuffix("weight")
        tensors[name] = quantized.as_other_readers(
            {k.removeprefix(prefix): v for k, v in coded.items() if k.startswith(prefix)}
        )
    floats = shutil.copytree(model, tmp_path / "floats")
    save_file(tensors, floats / "model.safetensors", {"format": "pt"})
    (ids,) = prompts([9])
    assert_logits_equal(Driver(tmp_path / "coded").step({0: ids})[0], hf_logits(floats, ids))
    assert torch.equal(coded["model.layers.0.mlp.gate.weight"], tensors["model.layers.0.mlp.gate.weight"])
    said = json.loads((tmp_path / "coded" / "config.json").read_text())["quantization_config"]
    plain = [f"model.layers.{i}.mlp.{router}" for i in range(2) for router in ("gate", "shared_expert_gate")]
    assert sorted(said.get("ignore") or said["modules_to_not_convert"]) == sorted(["lm_head", *plain])


@pytest.mark.parametrize(("family", "format", "says"), [
    ("qwen2_moe", "gptq", "most experts would see too little of a text: gptq is not for it, choose --format fp8 or int8"),
    ("mixtral", "int8", "have names of their own for experts"),
])  # fmt: skip
def test_what_quantize_refuses(family: str, format: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        quantize_folder(str(source(family)), QuantizeOptions(format=format), tmp_path / "out", use_tqdm=False)


@pytest.mark.parametrize(("kind", "bits"), [("fp8", 8), ("int8", 8), ("int4", 4)])
def test_what_a_step_reads_of_qwen3_30b(kind: str, bits: int, tmp_path: Path) -> None:
    """Codes and their scales; routers are plain."""
    own = {"tokenizer": str(tiny_checkpoint()), "device": "cpu", "quantization": kind}
    config = EngineConfig(**random_model("qwen3-30b-a3b", tmp_path, own))
    model = build_model(set_up(config).hf_config, torch.bfloat16, "meta", max_model_len=1)
    found = Weights.of(model, torch.bfloat16)
    routers = 48 * 128 * 2048
    always = found.always - routers, found.always_bytes - 2 * routers
    for count, size in ((found.experts, found.expert_bytes), always):
        assert count * bits / 8 < size < count * (bits + 0.15) / 8
