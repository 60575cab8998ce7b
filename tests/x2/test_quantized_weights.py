"""Weights in 8 bits: what a checkpoint says of them, what is refused, and what a step reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from folovllm import EngineConfig
from folovllm.apps.bench.roofline import Weights
from folovllm.electives.quantization.config import CheckpointQuantization
from folovllm.electives.quantization.fp8 import Fp8
from folovllm.electives.quantization.layouts import FP8, INT8
from folovllm.electives.quantization.linear_method import Quantized
from folovllm.engine.setup import EngineSetup, set_up
from folovllm.models.loader import load_model
from folovllm.models.registry import build_model
from tests.helpers import Driver, assert_logits_equal, tiny_checkpoint
from tests.x2.quantized import ALIGNED, BLOCK, E4M3, FP8_BLOCKS, FP8_WIDE, compressed, quantize_8, write_quantized
from tests.x2.quantized import BYTE_KINDS as KINDS

SAID_INT8 = compressed(8, "int", "int-quantized", "channel")
IN_WHOLE = "weights share a scale, where whole numbers of at least 1 are needed"
UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "quip"}, "quantized by 'quip'.*not supported: the known ones are fp8, .*compressed-tensors"),
    ({"bits": 4}, "quantized by None"),
    ({"quant_method": "fp8", "activation_scheme": "odd"}, "activation_scheme 'odd' is not supported"),
    *(
        ({"quant_method": "fp8", "weight_block_size": block}, IN_WHOLE)
        for block in ([0, 128], [-128, 128], ["128", "128"], [128.0, 128])
    ),
    ({"quant_method": "fp8", "modules_to_not_convert": ["re:["]}, "quantization_config in config.json: .*unterminated"),
    ({"quant_method": "fp8", "modules_to_not_convert": [3]}, "cannot read the quantization_config"),
    *(({"quant_method": "gptq", "bits": 4, "group_size": n}, f"1 x {n!r} {IN_WHOLE}") for n in ("128", -32)),
    *(
        (compressed(4, "int", "pack-quantized", "group", group_size=size), IN_WHOLE)
        for size in (0, -32, 128.0, "128", True)
    ),
    (compressed(4, "int", "pack-quantized", "group", group_size=32, actorder="group"), "whose actorder is not 'group'"),
    (compressed(5, "int", "pack-quantized", "group"), "int5 pack-quantized are not supported"),
    (compressed(8, "int", "int-quantized", "group", group_size=0), IN_WHOLE),
    (compressed(8, "int", "int-quantized", "attn_head"), "strategy 'attn_head'"),
    (compressed(8, "int", "int-quantized", "channel", symmetric=False), "asymmetric int8"),
    (SAID_INT8 | {"config_groups": []}, "quantization_config"),
    (SAID_INT8 | {"format": "marlin-24"}, "int8 marlin-24 are not"),
]  # fmt: skip


class TestWhatACheckpointSays:
    def linear_method_of(self, said: Any, name: str) -> Any:
        config = AutoConfig.from_pretrained(tiny_checkpoint("qwen3"))
        config.quantization_config = said
        packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        linear_method_of = CheckpointQuantization().linear_methods_of(config, packed, {})
        assert linear_method_of is not None
        return linear_method_of(name)

    def test_by_name(self) -> None:
        alone = Fp8(replace(FP8, scales="weight_scale_inv"), BLOCK)
        assert self.linear_method_of(FP8_BLOCKS, "model.layers.0.self_attn.qkv_proj") == replace(alone, rounds=True)
        said = FP8_BLOCKS | {"activation_scheme": None}
        assert self.linear_method_of(said, "model.layers.0.self_attn.qkv_proj") == alone
        assert self.linear_method_of(KINDS["int8 channel"][1], "model.layers.0.mlp.down_proj") == Quantized(INT8)
        said = FP8_BLOCKS | {"modules_to_not_convert": ["model.layers.1", "down_proj"]}
        assert self.linear_method_of(said, "model.layers.0.mlp.down_proj") is None
        assert self.linear_method_of(said, "model.layers.1.mlp.gate_up_proj") is None
        assert self.linear_method_of(said, "model.layers.10.mlp.gate_up_proj") is not None
        said = compressed(8, "int", "int-quantized", "channel", ("lm_head", "re:.*layers\\.0\\.mlp"))
        assert self.linear_method_of(said, "model.layers.0.mlp.down_proj") is None
        assert self.linear_method_of(said, "model.layers.1.mlp.down_proj") == Quantized(INT8)

    @pytest.mark.parametrize(("said", "says"), UNKNOWN)
    def test_what_is_unknown_is_refused_by_its_name(self, said: dict[str, Any], says: str) -> None:
        with pytest.raises(ValueError, match=says):
            self.linear_method_of(said, "model.layers.0.mlp.down_proj")

    def test_what_is_merged_here_must_be_of_one_kind(self) -> None:
        said = compressed(8, "int", "int-quantized", "channel", ("re:.*k_proj",))
        with pytest.raises(ValueError, match=r"q_proj, k_proj, v_proj of model.layers.0.self_attn are one layer"):
            self.linear_method_of(said, "model.layers.0.self_attn.qkv_proj")


def test_some_layers_stay_plain(tmp_path: Path) -> None:
    """A part of a layer may, and each name counts for itself."""
    unquantized = ("lm_head", "re:.*layers.1.self_attn.*", "model.layers.2.mlp.down_proj")
    config = compressed(8, "float", "float-quantized", "channel", unquantized)
    plain = ("layers.1.self_attn", "layers.2.mlp.down_proj")
    quantize = quantize_8(E4M3, "weight_scale", None)
    coded, floats = write_quantized(tiny_checkpoint("qwen3"), tmp_path, quantize, config, plain)
    ours = Driver(coded)
    assert_logits_equal(ours.step({0: [5, 9, 3]})[0], Driver(floats).step({0: [5, 9, 3]})[0])
    layers: Any = ours.model.model.layers
    assert layers[1].self_attn.qkv_proj.weight.dtype == layers[2].mlp.down_proj.weight.dtype == torch.float32
    assert layers[1].mlp.gate_up_proj.weight.dtype == layers[2].mlp.gate_up_proj.weight.dtype == E4M3


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (SAID_INT8, r"proj.weight' is stored as float8_e4m3fn, and config.json makes it int8"),
        (None, r"stored as float8_e4m3fn: quantized weights that config.json does not speak of"),
    ],
)
def test_what_is_stored_is_not_what_is_said(said: Any, says: str, tmp_path: Path) -> None:
    quantize, _ = KINDS["fp8 blocks"]
    coded, _ = write_quantized(tiny_checkpoint("qwen3"), tmp_path, quantize, said)
    with pytest.raises(ValueError, match=says):
        Driver(coded)


def test_a_checkpoint_must_agree_with_what_is_asked_for(tmp_path: Path) -> None:
    def setup(**fields: Any) -> EngineSetup:
        return set_up(EngineConfig(device="cpu", **fields))

    coded, floats = map(str, write_quantized(tiny_checkpoint("qwen3"), tmp_path, *KINDS["fp8 blocks"]))
    assert setup(model=coded, quantization="fp8").hf_config.quantization_config["quant_method"] == "fp8"
    assert setup(model=floats, quantization="fp8").hf_config.quantization_config["online"]
    for fields, says in (
        ({"model": coded, "quantization": "awq"}, "'awq' was asked for, and this checkpoint is quantized by 'fp8'"),
        ({"model": floats, "quantization": "fp8", "milestone": "m1"}, 'a checkpoint in 16 bits needs model_impl="native"'),
        ({"model": floats, "quantization": "awq"}, "'awq' was asked for, and this checkpoint is not quantized"),
        ({"model": floats, "random_weights": True, "quantization": "q"}, "'q' cannot be made up: choose one of fp8, int8"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            setup(**fields)


def test_what_was_folded_into_earlier_weights_is_forgotten(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux only")
    from folovllm.models.fused_layer import skinny_layers

    source = tiny_checkpoint("qwen3", num_hidden_layers=1, **ALIGNED)
    driver = Driver(write_quantized(source, tmp_path, *FP8_WIDE)[0], layers=skinny_layers(16))
    before = driver.model.model.layers[0].self_attn.qkv_proj.quantized.columns.clone()  # type: ignore[union-attr]
    assert before.std() > 0.1
    load_model(driver.model, tmp_path / "coded", use_tqdm=False)
    assert torch.equal(driver.model.model.layers[0].self_attn.qkv_proj.quantized.columns, before)  # type: ignore[union-attr]


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
