"""Checkpoints that have merged their layers already (Phi-3's): codes and scales of query, key and value are one tensor each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from folovllm import EngineConfig
from folovllm.engine.setup import set_up
from folovllm.models.sharded_loader import load_sharded_model
from tests.helpers import Driver, assert_logits_equal, tiny_checkpoint
from tests.m6.ranks import ThreadGroup, on_ranks
from tests.x2.quantized import (
    AWQ,
    E4M3,
    FP8_BLOCKS,
    GPTQ,
    PACKED,
    SORTED,
    quantize,
    quantize_8,
    to_awq,
    to_gptq,
    to_packed,
    to_sorted_gptq,
    write_quantized,
)
from tests.x2.quantized import BYTE_KINDS as KINDS

CHECKPOINTS = {  # how it is quantized, and why two ranks cannot share it
    "fp8 channel": (*KINDS["fp8 channel"], ""),
    "fp8 blocks": (quantize_8(E4M3, "weight_scale_inv", (8, 8)), FP8_BLOCKS | {"weight_block_size": [8, 8]}, ""),
    "blocks across a border": (
        quantize_8(E4M3, "weight_scale_inv", (24, 16)),
        FP8_BLOCKS | {"weight_block_size": [24, 16]},
        "cannot share self_attn.q_proj: .* whole blocks of 24 x 16",
    ),
    "gptq": (quantize(to_gptq), GPTQ, ""),
    "gptq sorted": (quantize(to_sorted_gptq), SORTED, r"inputs are sorted \(desc_act\)"),
    "awq": (quantize(to_awq), AWQ, ""),
    "packed": (quantize(to_packed), PACKED, ""),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_whole_and_shared_by_two_ranks(kind: str, tmp_path: Path) -> None:
    quantizer, config, refused = CHECKPOINTS[kind]
    source = tiny_checkpoint("phi3", hidden_size=128, intermediate_size=128, num_hidden_layers=1)
    coded, floats = write_quantized(source, tmp_path, quantizer, config)
    plain = Driver(floats)
    assert_logits_equal(Driver(coded).step({0: [5, 9, 3]})[0], plain.step({0: [5, 9, 3]})[0])
    setup = EngineConfig(model=str(coded), device="cpu", use_tqdm=False, tensor_parallel_size=2)
    if refused:
        with pytest.raises(ValueError, match=refused):
            set_up(setup)
        return
    whole: Any = plain.model.model.layers[0]
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))

    def work(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        layer: Any = load_sharded_model(set_up(setup), group).model.layers[0]
        return layer.self_attn.split_heads(layer.self_attn.qkv_proj(x))[0], layer.mlp(x)

    with torch.inference_mode():
        ranks = on_ranks(2, work)
        query, answer = whole.self_attn.split_heads(whole.self_attn.qkv_proj(x))[0], whole.mlp(x)
    assert_logits_equal(torch.cat([own for own, _ in ranks], dim=1).flatten(1), query.flatten(1))
    for _, summed in ranks:
        assert_logits_equal(summed, answer)
