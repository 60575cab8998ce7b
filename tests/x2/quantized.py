"""Tiny quantized checkpoints, each with the same model in plain floats: what its codes stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from folovllm import EngineConfig
from folovllm.electives.quantization import packing
from folovllm.electives.quantization.config import compressed_config
from folovllm.electives.quantization.layouts import E4M3
from folovllm.electives.quantization.quantizer.groups import dequantize_groups, quantize_groups
from folovllm.electives.quantization.weight import QuantizedWeight
from folovllm.engine.setup import set_up
from folovllm.models.loader import load_native_model
from folovllm.models.sharded_loader import load_sharded_model
from tests.contract import DEVICE
from tests.helpers import tiny_checkpoint
from tests.m6.ranks import ThreadGroup, on_ranks

Tensors = dict[str, torch.Tensor]
PROJECTIONS = ("proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
Quantize = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]  # W -> tensors by kind, and the W that they stand for


def write_quantized(
    source: Path, folder: Path, quantize: Quantize, config: dict[str, Any], plain: tuple[str, ...] = ()
) -> tuple[Path, Path]:
    """Write `source` twice to `folder`: with all projections quantized but for those whose name has one of `plain`, and as
    plain floats. Its norms get weights that are not all the same."""
    coded, floats, generator = Tensors(), Tensors(), torch.Generator().manual_seed(0)
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("norm.weight"):
            tensor *= 0.75 + 0.75 * torch.rand(tensor.shape, generator=generator)
        if name.endswith(PROJECTIONS) and not any(part in name for part in plain):
            parts, floats[name] = quantize(tensor.float())
            coded |= {name.removesuffix("weight") + kind: part.contiguous() for kind, part in parts.items()}
        else:
            coded[name] = floats[name] = tensor
    for kind, tensors in (("coded", coded), ("floats", floats)):
        (folder / kind).mkdir(parents=True)
        for file in source.iterdir():
            (folder / kind / file.name).write_bytes(file.read_bytes())
        save_file(tensors, folder / kind / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((source / "config.json").read_text()) | {"quantization_config": config}
    (folder / "coded" / "config.json").write_text(json.dumps(said))
    return folder / "coded", folder / "floats"


def quantize_8(
    dtype: torch.dtype, scale_name: str, block: tuple[int, int] | None, per_tensor: bool = False
) -> Quantize:
    """Codes of 8 bits with a scale for each output, block, or for everything."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape if per_tensor else block or (1, weight.shape[1])
        pads = (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
        blocks = torch.nn.functional.pad(weight.abs(), pads).unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        scale = blocks.amax((1, 3)) / (448.0 if dtype == E4M3 else 127.0)
        wide = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
        codes = ((weight / wide).round() if dtype == torch.int8 else weight / wide).to(dtype)
        return {"weight": codes, scale_name: scale[0, 0].clone() if per_tensor else scale}, codes.float() * wide

    return quantize


def packed(quantize: Quantize) -> Quantize:
    """The same with four int8 in an int32, as compressed-tensors' pack-quantized has them."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        parts, floats = quantize(weight)
        unsigned = (parts.pop("weight").int() + 128).to(torch.uint8)
        parts |= {"weight_packed": unsigned.view(torch.int32), "weight_shape": torch.tensor(weight.shape)}
        return parts, floats

    return pack


def compressed(
    bits: int, kind: str, packing: str, strategy: str, ignore: tuple[str, ...] = ("lm_head",), **more: Any
) -> dict[str, Any]:
    """A `quantization_config` as llm-compressor writes it."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    return compressed_config(packing, weights, ignore=ignore)


def assert_ranks_hold_their_parts(coded: Path, random_weights: bool = False, **tolerance: float) -> None:
    """Two ranks' attention and MLP of the last layer are those of the whole model."""
    fields = EngineConfig(model=str(coded), device="cpu", use_tqdm=False, random_weights=random_weights)
    setup = set_up(replace(fields, tensor_parallel_size=2))
    whole: Any = load_native_model(set_up(fields)).model.layers[-1]
    x = torch.randn(3, setup.hf_config.hidden_size, generator=torch.Generator().manual_seed(0))

    def work(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        layer: Any = load_sharded_model(setup, group).model.layers[-1]
        return layer.self_attn.split_heads(layer.self_attn.qkv_proj(x))[0], layer.mlp(x)

    with torch.inference_mode():
        ranks = on_ranks(2, work)
        query = whole.self_attn.split_heads(whole.self_attn.qkv_proj(x))[0]
        torch.testing.assert_close(torch.cat([own for own, _ in ranks], dim=1), query, **tolerance)
        for _, summed in ranks:
            torch.testing.assert_close(summed, whole.mlp(x), **tolerance)


def with_input_scale(quantize: Quantize) -> Quantize:
    """The same with a scale for the layer's inputs."""

    def both(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        parts, floats = quantize(weight)
        return parts | {"input_scale": torch.tensor(weight.shape[0] / 1000)}, floats

    return both


BLOCK = (16, 8)
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "modules_to_not_convert": ["lm_head"]}
BYTE_KINDS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "fp8 blocks": (quantize_8(E4M3, "weight_scale_inv", BLOCK), FP8_BLOCKS),
    "fp8 tensor": (
        quantize_8(E4M3, "weight_scale", None, per_tensor=True),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["re:.*lm_head"]},
    ),
    "fp8 channel": (quantize_8(E4M3, "weight_scale", None), compressed(8, "float", "float-quantized", "channel")),
    "fp8 static": (
        with_input_scale(quantize_8(E4M3, "weight_scale", None)),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    ),
    "int8 channel": (quantize_8(torch.int8, "weight_scale", None), compressed(8, "int", "int-quantized", "channel")),
    "int8 packed": (packed(quantize_8(torch.int8, "weight_scale", None)), compressed(8, "int", "pack-quantized", "channel")),
    "int8 groups": (
        quantize_8(torch.int8, "weight_scale", (1, 8)), compressed(8, "int", "int-quantized", "group", group_size=8),
    ),
}  # fmt: skip
GROUP = 32
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
PACKED = compressed(4, "int", "pack-quantized", "group", group_size=GROUP, symmetric=False)
SORTED = GPTQ | {"desc_act": True}


def to_gptq(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    groups = torch.arange(codes.shape[1], dtype=torch.int32) // (codes.shape[1] // scales.shape[1])
    return {
        "qweight": packing.pack_gptq(codes),
        "scales": scales.t(),
        "qzeros": packing.pack_gptq_zeros(zeros),
        "g_idx": groups,
    }


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


INT4_KINDS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "gptq": (quantize(to_gptq), GPTQ),
    "gptq symmetric": (quantize(to_gptq, symmetric=True), GPTQ | {"sym": True}),
    "gptq v2": (quantize(to_gptq_v2), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq sorted": (quantize(to_sorted_gptq), SORTED),
    "gptq with groups left zero": (
        quantize(lambda *codes: to_gptq(*codes) | {"g_idx": torch.zeros(codes[0].shape[1], dtype=torch.int32)}), GPTQ,
    ),
    "gptq without groups": (quantize(lambda *codes: {k: t for k, t in to_gptq(*codes).items() if k != "g_idx"}), GPTQ),
    "gptq rows": (quantize(to_gptq, None), SORTED | {"group_size": -1}),
    "awq": (quantize(to_awq), AWQ),
    "packed": (quantize(to_packed), PACKED),
    "packed symmetric": (
        quantize(to_packed_symmetric, symmetric=True), compressed(4, "int", "pack-quantized", "group", group_size=GROUP),
    ),
    "packed rows": (
        quantize(to_packed_symmetric, None, symmetric=True), compressed(4, "int", "pack-quantized", "channel"),
    ),
}  # fmt: skip
ALIGNED = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "hidden_size": 32, "intermediate_size": 48}
FP8_WIDE = (quantize_8(E4M3, "weight_scale_inv", (16, 16)), {"quant_method": "fp8", "weight_block_size": [16, 16]})


def rounded(x: torch.Tensor, group: int | None) -> torch.Tensor:
    """`x` [T, K] rounded to codes of E4M3, in its own dtype; the largest of a row, or of each `group`, is exact."""
    parts = x.float().unflatten(1, (-1, group or x.shape[1]))
    largest = parts.abs().amax(-1, keepdim=True)
    scale, factor = (torch.where(largest > 0, y, 1.0) for y in (largest / 448, 448 / largest))
    return ((parts * factor).to(E4M3).float() * scale).flatten(1).to(x.dtype)


def made_up(
    kind: str, outputs: int, inputs: int, block: tuple[int, int] | None = None, zeros: str = "none"
) -> tuple[QuantizedWeight, torch.Tensor]:
    """A weight as kernels read it, of all codes that there are, and W in double precision, in which W[0, inputs // 3] is zero.

    Codes of 4 bits may have zeros: "codes", or "minimums", with which no weight is zero.
    """
    generator, (rows, columns) = torch.Generator().manual_seed(inputs), block or (1, inputs)
    shape = -(-outputs // rows), -(-inputs // columns)

    def wide(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.double().repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]

    scale = torch.rand(shape, generator=generator) + 0.1
    if kind != "int4":
        codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8, generator=generator)
        codes = torch.where(codes & 0x7F == 0x7F, 5, codes).view(torch.int8 if kind == "int8" else E4M3)
        codes[0, inputs // 3], scale = 0, scale / 200
        return QuantizedWeight(codes.to(DEVICE), scale.to(DEVICE), rows, columns), codes.double() * wide(scale)
    codes, scale = torch.randint(0, 16, (outputs, inputs), generator=generator).byte(), scale.half() / 50
    zero = {
        "none": torch.full(shape, 8),
        "codes": torch.randint(0, 16, shape, generator=generator).byte(),
        "minimums": torch.randn(shape, generator=generator).half() / 10,
    }[zeros]
    if zeros == "minimums":
        weight = codes.double() * wide(scale) + wide(zero)
    else:
        codes[0, inputs // 3] = zero[0, inputs // 3 // columns]
        weight = (codes.double() - wide(zero)) * wide(scale)
    words, kept = packing.pack_planes(codes, columns), None if zeros == "none" else zero.to(DEVICE)
    return QuantizedWeight(words.to(DEVICE), scale.to(DEVICE), 1, columns, kept), weight


SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)


def as_gptqmodel_reads(t: Tensors) -> torch.Tensor:
    """It adds 1 to all eight zeros of a word at once, so none may be 15 as it is stored."""
    codes = ((t["qweight"][:, None] >> SHIFTS[None, :, None]) & 15).flatten(0, 1)  # [inputs, outputs]
    zeros = (((t["qzeros"] + 0x11111111)[..., None] >> SHIFTS) & 15).flatten(1)  # [groups, outputs]
    group = t["g_idx"].long()
    return (t["scales"].float()[group] * (codes - zeros[group])).t()


def as_autoawq_reads(t: Tensors) -> torch.Tensor:
    places = [0, 4, 1, 5, 2, 6, 3, 7]  # in a word, of the codes of eight neighbouring outputs
    codes, zeros = (((t[name][..., None] >> SHIFTS) & 15)[..., places].flatten(1) for name in ("qweight", "qzeros"))
    return ((codes - zeros.repeat_interleave(32, 0)) * t["scales"].float().repeat_interleave(32, 0)).t()


def as_other_readers(t: Tensors) -> torch.Tensor:
    """The weights that a quantizer's tensors stand for, as other programs read them; groups are of 32."""
    if "qweight" in t:
        return as_gptqmodel_reads(t) if "g_idx" in t else as_autoawq_reads(t)
    codes = t["weight"].float() if "weight" in t else t["weight_packed"].view(torch.uint8).float() - 128
    return codes * t["weight_scale"].float()


def tiny() -> Path:
    """Projections of 64 to 128 inputs, in groups of 32."""
    return tiny_checkpoint("qwen3", hidden_size=64, intermediate_size=96)
