"""Weights in 8 bits: what a checkpoint says of them, what is refused, and what a step reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from folovllm import EngineConfig
from folovllm.apps.bench.roofline import Weights
from folovllm.electives.quantization.config import CheckpointQuantization
from folovllm.electives.quantization.fp8 import Fp8
from folovllm.electives.quantization.scaled import Int8
from folovllm.engine.setup import EngineSetup, set_up
from folovllm.models.loader import load_model
from folovllm.models.registry import build_model
from tests.helpers import Driver, assert_logits_equal, tiny_checkpoint
from tests.x2.quantized import ALIGNED, BLOCK, E4M3, FP8_BLOCKS, FP8_WIDE, compressed, quantize_8, write_quantized
from tests.x2.quantized import BYTE_KINDS as KINDS


class TestWhatACheckpointSays:
    def linear_method_of(self, said: Any, name: str) -> Any:
        config = AutoConfig.from_pretrained(tiny_checkpoint("qwen3"))
        config.quantization_config = said
        packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        linear_method_of = CheckpointQuantization().linear_methods_of(config, packed, {})
        assert linear_method_of is not None
        return linear_method_of(name)

    def test_by_name(self) -> None:
        both = Fp8("weight_scale_inv", BLOCK, activations="dynamic")
        assert self.linear_method_of(FP8_BLOCKS, "model.layers.0.self_attn.qkv_proj") == both
        alone = FP8_BLOCKS | {"activation_scheme": None}
        assert self.linear_method_of(alone, "model.layers.0.self_attn.qkv_proj") == Fp8("weight_scale_inv", BLOCK)
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
            ({"quant_method": "fp8", "activation_scheme": "odd"}, "activation_scheme 'odd' is not supported"),
            (compressed(8, "int", "int-quantized", "channel") | {"config_groups": []}, "quantization_config"),
            (compressed(5, "int", "pack-quantized", "group"), "int5 pack-quantized are not supported"),
            *(
                ({"quant_method": "fp8", "weight_block_size": block}, "a block of .* whole numbers of at least 1")
                for block in ([0, 128], [-128, 128], ["128", "128"], [128.0, 128])
            ),
            (
                {"quant_method": "fp8", "modules_to_not_convert": ["re:["]},
                "cannot read the quantization_config in config.json: .*unterminated",
            ),
            (compressed(8, "int", "int-quantized", "group", group_size=0), "a block of .* whole numbers of at least 1"),
            ({"quant_method": "fp8", "modules_to_not_convert": [3]}, "cannot read the quantization_config"),
            (
                {"quant_method": "gptq", "bits": 4, "group_size": "128"},
                "group_size is '128', where whole numbers",
            ),
            ({"quant_method": "gptq", "bits": 4, "group_size": -32}, "group_size is -32, where whole numbers"),
            *(
                (
                    compressed(4, "int", "pack-quantized", "group", group_size=size),
                    "group_size is .*whole numbers",
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

    @pytest.mark.parametrize(
        ("said", "says"),
        [
            (KINDS["int8 channel"][1], r"proj.weight' is stored as float8_e4m3fn, and config.json makes it int8"),
            (None, r"stored as float8_e4m3fn: quantized weights that config.json does not speak of"),
            (
                FP8_BLOCKS | {"weight_block_size": [32, 8]},
                r"weight_scale_inv' has shape \[\d+, \d+\], the model expects",
            ),
        ],
    )
    def test_what_is_stored_is_not_what_is_said(self, coded: Path, said: Any, says: str) -> None:
        altered(coded, quantization_config=said)
        with pytest.raises(ValueError, match=says):
            Driver(coded)

    def test_codes_that_are_no_number(self, coded: Path) -> None:
        tensors = load_file(coded / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"].view(torch.uint8)[3, 5] = 0xFF
        save_file(tensors, coded / "model.safetensors")
        with pytest.raises(ValueError, match=r"1.mlp.up_proj.weight' holds NaN or infinity"):
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
        assert self.setup(model=floats, quantization="fp8").hf_config.quantization_config["online"]
        with pytest.raises(ValueError, match='a checkpoint in 16 bits needs model_impl="native"'):
            self.setup(model=floats, quantization="fp8", milestone="m1")
        with pytest.raises(ValueError, match="'awq' was asked for, and this checkpoint is not quantized"):
            self.setup(model=floats, quantization="awq")
        with pytest.raises(ValueError, match="'q' cannot be made up: choose one of fp8, int8"):
            self.setup(model=floats, random_weights=True, quantization="q")


def test_what_was_folded_into_earlier_weights_is_forgotten(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux only")
    from folovllm.models.fused_layer import skinny_layers

    source = tiny_checkpoint("qwen3", num_hidden_layers=1, **ALIGNED)
    driver = Driver(write_quantized(source, tmp_path, *FP8_WIDE)[0], layers=skinny_layers(16))
    before = driver.model.model.layers[0].self_attn.qkv_proj.columns.clone()  # type: ignore[union-attr]
    assert before.std() > 0.1
    load_model(driver.model, tmp_path / "coded", use_tqdm=False)
    assert torch.equal(driver.model.model.layers[0].self_attn.qkv_proj.columns, before)  # type: ignore[union-attr]


def test_what_a_step_reads() -> None:
    """Of 16 bits: half the bytes and the scales, and all of what is plain."""
    config = AutoConfig.from_pretrained(tiny_checkpoint("qwen3"))

    def num_bytes() -> int:
        model = build_model(config, torch.bfloat16, "meta", max_model_len=1)
        return Weights.of(model, torch.bfloat16).always_bytes

    whole = num_bytes()
    config.quantization_config = FP8_BLOCKS | {"weight_block_size": [8, 8]}
    assert num_bytes() == whole // 2 + whole // 2 // 64 * 4
    config.quantization_config = FP8_BLOCKS | {"modules_to_not_convert": ["model"]}
    assert num_bytes() == whole
