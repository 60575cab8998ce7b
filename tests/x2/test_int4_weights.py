"""Weights of 4 bits: three layouts of checkpoints that hold the same numbers, and engines on top of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from folovllm import EngineConfig
from folovllm.engine.setup import set_up
from folovllm.layers.formats import packing
from folovllm.layers.linear import LinearBase
from folovllm.quantize.groups import dequantize_groups, quantize_groups
from tests.helpers import Driver, assert_logits_equal, prompts, tiny_checkpoint
from tests.x2.quantized import Quantize, Tensors, compressed, write_quantized

GROUP = 32
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
PACKED = compressed(4, "int", "pack-quantized", "group", group_size=GROUP, symmetric=False)
SORTED = GPTQ | {"desc_act": True}


def tiny() -> Path:
    """Projections of 64 to 128 inputs, in groups of 32."""
    return tiny_checkpoint("qwen3", hidden_size=64, intermediate_size=96)


def to_gptq(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    groups = torch.arange(codes.shape[1], dtype=torch.int32) // (codes.shape[1] // scales.shape[1])
    return {"qweight": packing.pack_gptq(codes), "scales": scales.t(), "qzeros": packing.pack_gptq_zeros(zeros), "g_idx": groups}


def to_gptq_v2(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    return to_gptq(codes, scales, zeros) | {"qzeros": packing.pack_words(zeros.t().contiguous())}


def to_sorted_gptq(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    """Inputs in an order of their own: column i of the checkpoint's W is column `order[i]` of what was quantized."""
    order = torch.randperm(codes.shape[1], generator=torch.Generator().manual_seed(1))
    parts = to_gptq(codes[:, order], scales, zeros)
    return parts | {"g_idx": parts["g_idx"][order]}


def to_awq(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    return {"qweight": packing.pack_awq(codes), "scales": scales.t(), "qzeros": packing.pack_awq(zeros)}


def to_packed(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    return {
        "weight_packed": packing.pack_words(codes), "weight_scale": scales, "weight_shape": torch.tensor(codes.shape),
        "weight_zero_point": packing.pack_words(zeros.t().contiguous()).t(),
    }  # fmt: skip


def to_packed_symmetric(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    return {kind: part for kind, part in to_packed(codes, scales, zeros).items() if kind != "weight_zero_point"}


def quantize(pack: Any, group_size: int | None = GROUP, symmetric: bool = False) -> Quantize:
    def one(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros = quantize_groups(weight.half(), 4, group_size or weight.shape[1], symmetric)
        floats = dequantize_groups(codes, scales.float(), zeros)
        if pack is to_sorted_gptq:
            floats = floats[:, torch.randperm(codes.shape[1], generator=torch.Generator().manual_seed(1))]
        return pack(codes, scales, zeros), floats

    return one


KINDS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "gptq": (quantize(to_gptq), GPTQ),
    "gptq symmetric": (quantize(to_gptq, symmetric=True), GPTQ | {"sym": True}),
    "gptq v2": (quantize(to_gptq_v2), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq sorted": (quantize(to_sorted_gptq), SORTED),
    "gptq rows": (quantize(to_gptq, None), GPTQ | {"group_size": -1}),
    "awq": (quantize(to_awq), AWQ),
    "packed": (quantize(to_packed), PACKED),
    "packed symmetric": (
        quantize(to_packed_symmetric, symmetric=True), compressed(4, "int", "pack-quantized", "group", group_size=GROUP),
    ),
    "packed rows": (
        quantize(to_packed_symmetric, None, symmetric=True), compressed(4, "int", "pack-quantized", "channel"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_numbers_that_the_codes_stand_for(kind: str, tmp_path: Path) -> None:
    coded, floats = write_quantized(tiny(), tmp_path, *KINDS[kind])
    ours, plain = Driver(coded), Driver(floats)
    for pieces in ({0: prompts([20])[0]}, {0: [8], 1: [2, 5]}):
        expected = plain.step(pieces)
        for seq, logits in ours.step(pieces).items():
            assert_logits_equal(logits, expected[seq])
    linears = [module for module in ours.model.modules() if isinstance(module, LinearBase)]
    assert linears and all(linear.grouped.scales.dtype == torch.float16 for linear in linears)
    assert not any("weight" in dict(linear.named_parameters()) for linear in linears), "codes stay codes"
