"""Weights in 8 bits: what a checkpoint says of them, where its tensors go, and that the answers are those of its numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from folovllm import EngineConfig
from folovllm.engine.setup import set_up
from folovllm.layers.linear import LinearBase
from folovllm.models.loader import load_model
from folovllm.models.shapes import linear_bytes, linear_shapes
from folovllm.quantization import scaled
from folovllm.quantization.config import linear_methods_of
from folovllm.quantization.scaled import Fp8, Int8, Scaled
from folovllm.setup import EngineSetup
from folovllm.worker.native_model import load_native_model
from tests.contract import DEVICE
from tests.helpers import Driver, assert_logits_equal, hf_logits, prompts, tiny_checkpoint
from tests.workloads import Workload, answered, make_engine, mixed_requests, serve
from tests.x2.quantized import assert_ranks_hold_their_parts, compressed, packed, quantize_8, write_quantized

E4M3 = torch.float8_e4m3fn
BLOCK = (16, 8)
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "modules_to_not_convert": ["lm_head"]}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp8 blocks": (quantize_8(E4M3, "weight_scale_inv", BLOCK), FP8_BLOCKS),
    "fp8 tensor": (
        quantize_8(E4M3, "weight_scale", None, per_tensor=True),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["re:.*lm_head"]},
    ),
    "fp8 channel": (quantize_8(E4M3, "weight_scale", None), compressed(8, "float", "float-quantized", "channel")),
    "int8 channel": (quantize_8(torch.int8, "weight_scale", None), compressed(8, "int", "int-quantized", "channel")),
    "int8 packed": (
        packed(quantize_8(torch.int8, "weight_scale", None)),
        compressed(8, "int", "pack-quantized", "channel"),
    ),
    "int8 groups": (
        quantize_8(torch.int8, "weight_scale", (1, 8)),
        compressed(8, "int", "int-quantized", "group", group_size=8),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_numbers_that_the_codes_stand_for(kind: str, tmp_path: Path) -> None:
    quantize, config = KINDS[kind]
    coded, floats = write_quantized(tiny_checkpoint("qwen3"), tmp_path, quantize, config)
    ours, plain = Driver(coded), Driver(floats)
    for pieces in ({0: prompts([20])[0]}, {0: [8], 1: [2, 5]}):
        expected = plain.step(pieces)
        for seq, logits in ours.step(pieces).items():
            assert_logits_equal(logits, expected[seq])
    linears = [module for module in ours.model.modules() if isinstance(module, LinearBase)]
    assert {linear.weight.dtype for linear in linears} <= {E4M3, torch.int8}, "codes stay codes"


class TestWhatACheckpointSays:
    def linear_method_of(self, said: Any, name: str) -> Any:
        config = AutoConfig.from_pretrained(tiny_checkpoint("qwen3"))
        config.quantization_config = said
        linear_method_of = linear_methods_of(config, {"qkv_proj": ["q_proj", "k_proj", "v_proj"]})
        assert linear_method_of is not None
        return linear_method_of(name)

    def test_by_name(self) -> None:
        assert self.linear_method_of(FP8_BLOCKS, "model.layers.0.self_attn.qkv_proj") == Fp8("weight_scale_inv", BLOCK)
        assert self.linear_method_of(KINDS["int8 channel"][1], "model.layers.0.mlp.down_proj") == Int8()
        said = FP8_BLOCKS | {"modules_to_not_convert": ["model.layers.1", "down_proj"]}
        assert self.linear_method_of(said, "model.layers.0.mlp.down_proj") is None
        assert self.linear_method_of(said, "model.layers.1.mlp.gate_up_proj") is None
        assert self.linear_method_of(said, "model.layers.10.mlp.gate_up_proj") is not None
        said = compressed(8, "int", "int-quantized", "channel", ("lm_head", "re:.*layers\\.0\\.mlp"))
        assert self.linear_method_of(said, "model.layers.0.mlp.down_proj") is None
        assert self.linear_method_of(said, "model.layers.1.mlp.down_proj") == Int8()

    @pytest.mark.parametrize(
        ("said", "says"),
        [
            (
                {"quant_method": "quip"},
                "quantized by 'quip'.*not supported: the known ones are fp8, .*compressed-tensors",
            ),
            ({"bits": 4}, "quantized by None"),
            (compressed(8, "int", "int-quantized", "channel") | {"config_groups": []}, "quantization_config"),
            (compressed(5, "int", "pack-quantized", "group"), "int5 pack-quantized are not supported"),
            *(
                ({"quant_method": "fp8", "weight_block_size": block}, "a block of .* must be two whole numbers")
                for block in ([0, 128], [-128, 128], ["128", "128"], [128.0, 128])
            ),
            (
                {"quant_method": "fp8", "modules_to_not_convert": ["re:["]},
                "cannot read the quantization_config in config.json: .*unterminated",
            ),
            (compressed(8, "int", "int-quantized", "group", group_size=0), "a block of .* must be two whole numbers"),
            ({"quant_method": "fp8", "modules_to_not_convert": [3]}, "cannot read the quantization_config"),
            (
                {"quant_method": "gptq", "bits": 4, "group_size": "128"},
                "group_size is '128', and must be a whole number",
            ),
            ({"quant_method": "gptq", "bits": 4, "group_size": -32}, "group_size is -32, and must be a whole number"),
            *(
                (
                    compressed(4, "int", "pack-quantized", "group", group_size=size),
                    "group_size is .*must be a whole number",
                )
                for size in (0, -32, 128.0, "128", True)
            ),
            (compressed(8, "int", "int-quantized", "channel") | {"format": "marlin-24"}, "int8 marlin-24 are not"),
            (compressed(8, "int", "int-quantized", "attn_head"), "strategy 'attn_head'"),
            (compressed(8, "int", "int-quantized", "channel", symmetric=False), "asymmetric int8"),
        ],
    )
    def test_what_is_unknown_is_refused_by_its_name(self, said: dict[str, Any], says: str) -> None:
        with pytest.raises(ValueError, match=says):
            self.linear_method_of(said, "model.layers.0.mlp.down_proj")

    def test_what_is_merged_here_must_be_of_one_kind(self) -> None:
        said = compressed(8, "int", "int-quantized", "channel", ("re:.*k_proj",))
        with pytest.raises(ValueError, match=r"q_proj, k_proj, v_proj of model.layers.0.self_attn are one layer"):
            self.linear_method_of(said, "model.layers.0.self_attn.qkv_proj")


def test_some_layers_stay_plain(tmp_path: Path) -> None:
    """A part of a layer may, and each name counts for itself."""
    quantize, config = (
        quantize_8(E4M3, "weight_scale", None),
        compressed(
            8,
            "float",
            "float-quantized",
            "channel",
            ("lm_head", "re:.*layers.1.self_attn.*", "model.layers.2.mlp.down_proj"),
        ),
    )
    coded, floats = write_quantized(
        tiny_checkpoint("qwen3"), tmp_path, quantize, config, ("layers.1.self_attn", "layers.2.mlp.down_proj")
    )
    ours, plain = Driver(coded), Driver(floats)
    assert_logits_equal(ours.step({0: [5, 9, 3]})[0], plain.step({0: [5, 9, 3]})[0])
    layers: Any = ours.model.model.layers
    assert layers[1].self_attn.qkv_proj.weight.dtype == layers[2].mlp.down_proj.weight.dtype == torch.float32
    assert layers[1].mlp.gate_up_proj.weight.dtype == layers[2].mlp.gate_up_proj.weight.dtype == E4M3


def altered(folder: Path, **fields: Any) -> Path:
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | fields))
    return folder


class TestRefusals:
    @pytest.fixture
    def coded(self, tmp_path: Path) -> Path:
        return write_quantized(tiny_checkpoint("qwen3"), tmp_path, *KINDS["fp8 blocks"])[0]

    def test_before_a_weight_is_read(self, coded: Path) -> None:
        (coded / "model.safetensors").write_bytes(bytes(10**6))
        altered(coded, quantization_config={"quant_method": "quip"})
        with pytest.raises(ValueError, match="quantized by 'quip'"):
            set_up(EngineConfig(model=str(coded), device="cpu"))

    def test_another_kind_of_codes(self, coded: Path) -> None:
        altered(coded, quantization_config=KINDS["int8 channel"][1])
        with pytest.raises(ValueError, match=r"proj.weight' is stored as F8_E4M3, and config.json makes it I8"):
            Driver(coded)

    def test_codes_that_nothing_speaks_of(self, coded: Path) -> None:
        altered(coded, quantization_config=None)
        with pytest.raises(
            ValueError, match=r"stored as F8_E4M3: quantized weights that config.json does not speak of"
        ):
            Driver(coded)

    def test_codes_that_are_no_number(self, coded: Path) -> None:
        tensors = load_file(coded / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"].view(torch.uint8)[3, 5] = 0xFF
        save_file(tensors, coded / "model.safetensors")
        with pytest.raises(ValueError, match=r"1.mlp.up_proj.weight' holds NaN or infinity"):
            Driver(coded)

    def test_scales_of_another_shape(self, coded: Path) -> None:
        altered(coded, quantization_config=FP8_BLOCKS | {"weight_block_size": [32, 8]})
        with pytest.raises(ValueError, match=r"weight_scale_inv' has shape \[\d+, \d+\], the model expects"):
            Driver(coded)

    def test_ranks_that_would_cut_blocks(self, coded: Path) -> None:
        altered(coded, quantization_config=FP8_BLOCKS | {"weight_block_size": [128, 128]})
        with pytest.raises(ValueError, match=r"cannot share self_attn.q_proj: .* whole blocks of 128 x 128"):
            set_up(EngineConfig(model=str(coded), device="cpu", tensor_parallel_size=2))


class TestAsked:
    def setup(self, **fields: Any) -> EngineSetup:
        return set_up(EngineConfig(device="cpu", **fields))

    def test_a_checkpoint_must_agree(self, tmp_path: Path) -> None:
        coded, floats = (
            str(path) for path in write_quantized(tiny_checkpoint("qwen3"), tmp_path, *KINDS["fp8 blocks"])
        )
        assert self.setup(model=coded, quantization="fp8").hf_config.quantization_config["quant_method"] == "fp8"
        with pytest.raises(ValueError, match="'awq' was asked for, and this checkpoint is quantized by 'fp8'"):
            self.setup(model=coded, quantization="awq")
        with pytest.raises(ValueError, match="'fp8' was asked for, and this checkpoint is not quantized"):
            self.setup(model=floats, quantization="fp8")
        with pytest.raises(ValueError, match="'q' cannot be made up: choose one of fp8, int8"):
            self.setup(model=floats, random_weights=True, quantization="q")

    @pytest.mark.parametrize("kind", ["fp8", "int8"])
    def test_random_weights(self, kind: str) -> None:
        setup = self.setup(model=str(tiny_checkpoint("qwen3")), random_weights=True, quantization=kind, use_tqdm=False)
        model = load_native_model(setup)
        for module in model.modules():
            if isinstance(module, LinearBase):
                assert isinstance(module.linear_method, Scaled) and module.weight.dtype.itemsize == 1
                assert 0.015 < module.linear_method.dequantized(module, torch.float32).std() < 0.025


ALIGNED = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "hidden_size": 32, "intermediate_size": 48}
FP8_WIDE = (quantize_8(E4M3, "weight_scale_inv", (16, 16)), {"quant_method": "fp8", "weight_block_size": [16, 16]})


@pytest.mark.parametrize("kind", ["blocks", "channel"])
def test_the_fused_layers_of_m6_over_kernels(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms fold, for products take their weights along; few tokens, some and many have a kernel each."""
    pytest.importorskip("triton", reason="Triton is for Linux only")
    from folovllm.models.fused_layer import skinny_layers
    from folovllm.quantization.kernels import quant_gemv, quant_matmul

    monkeypatch.setattr(scaled, "on_gpu", lambda x: True)
    monkeypatch.setattr(quant_matmul, "MANY", 6)
    used: list[str] = []
    for module, name in ((quant_gemv, "quant_gemv"), (quant_matmul, "quant_matmul"), (quant_matmul, "unpacked")):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, k=kernel, n=name, **more: used.append(n) or k(*given, **more))
    source = tiny_checkpoint("qwen3", num_hidden_layers=1, **ALIGNED)
    coded, floats = write_quantized(source, tmp_path, *(FP8_WIDE if kind == "blocks" else KINDS["int8 channel"]))
    ours = Driver(coded, "torch_paged", device=DEVICE, layers=skinny_layers(16))
    plain = Driver(floats, "torch_paged", device=DEVICE)
    assert all(layer.folded for layer in ours.model.model.layers)  # type: ignore[union-attr]
    batches: list[dict[int, list[int]]] = [{0: [4], 1: [2]}, {1: prompts([5])[0]}, {2: prompts([6])[0]}]
    for pieces in batches if kind == "blocks" else batches[:2]:
        used.clear()
        expected = plain.step(pieces)
        for seq, logits in ours.step(pieces).items():
            assert_logits_equal(logits, expected[seq])
        tokens = sum(map(len, pieces.values()))
        assert set(used) == {"quant_gemv" if tokens <= 4 else "quant_matmul" if tokens < 6 else "unpacked"}


def test_what_was_folded_into_earlier_weights_is_forgotten(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux only")
    from folovllm.models.fused_layer import skinny_layers

    source = tiny_checkpoint("qwen3", num_hidden_layers=1, **ALIGNED)
    driver = Driver(write_quantized(source, tmp_path, *FP8_WIDE)[0], layers=skinny_layers(16))
    before = driver.model.model.layers[0].self_attn.qkv_proj.columns.clone()  # type: ignore[union-attr]
    assert before.std() > 0.1
    load_model(driver.model, tmp_path / "coded", use_tqdm=False)
    assert torch.equal(driver.model.model.layers[0].self_attn.qkv_proj.columns, before)  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Workload]:
    """A quantized model, and what M1 (transformers' model) answers with the numbers that its codes stand for."""
    coded, floats = write_quantized(tiny_checkpoint("qwen3"), tmp_path_factory.mktemp("served"), *KINDS["fp8 blocks"])
    return coded, answered(floats, mixed_requests(count=6))


@pytest.mark.parametrize("milestone", ["m2", "m6"])
def test_plain_and_fused_layers_answer_alike(milestone: str, served: tuple[Path, Workload]) -> None:
    model, load = served
    load.check(serve(make_engine(model, milestone=milestone), load.requests, "random"))


@pytest.mark.parametrize("kind", ["fp8 blocks", "fp8 tensor", "int8 channel", "int8 packed"])
def test_ranks_hold_their_parts_of_codes_and_scales(kind: str, tmp_path: Path) -> None:
    quantize, config = KINDS[kind]
    if kind == "fp8 blocks":
        quantize, config = quantize_8(E4M3, "weight_scale_inv", (8, 8)), FP8_BLOCKS | {"weight_block_size": [8, 8]}
    coded, _ = write_quantized(tiny_checkpoint("qwen3"), tmp_path, quantize, config)
    assert_ranks_hold_their_parts(coded)


@pytest.mark.parametrize("kind", ["fp8 blocks", "fp8 channel", "int8 packed"])
def test_transformers_reads_the_same_checkpoint_alike(kind: str, tmp_path: Path) -> None:
    """In its own way, through the packages that it needs for it."""
    for package in ("compressed_tensors", "accelerate"):
        pytest.importorskip(package, reason=f"transformers needs {package} for this (pip install -e '.[dev]')")
    quantize, config = FP8_WIDE if kind == "fp8 blocks" else KINDS[kind]  # it has whole blocks alone
    coded, _ = write_quantized(tiny_checkpoint("llama", tied=False, **ALIGNED), tmp_path, quantize, config)
    tokens = prompts([12])[0]
    assert_logits_equal(Driver(coded).step({0: tokens})[0], hf_logits(coded, tokens))


def test_what_a_step_reads() -> None:
    """Of 16 bits: half the bytes and the scales, and all of what is plain."""
    config = AutoConfig.from_pretrained(tiny_checkpoint("qwen3"))
    shapes = linear_shapes(config)
    whole = linear_bytes(config, torch.bfloat16, shapes)
    config.quantization_config = FP8_BLOCKS | {"weight_block_size": [8, 8]}
    assert linear_bytes(config, torch.bfloat16, shapes) == whole // 2 + whole // 2 // 64 * 4
    config.quantization_config = FP8_BLOCKS | {"modules_to_not_convert": ["model"]}
    assert linear_bytes(config, torch.bfloat16, shapes) == whole
