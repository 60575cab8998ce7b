"""Quantized layers as checkpoints have them: which tensors stand for the weights, and what `config.json` says of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from folovllm.electives.quantization import packing
from folovllm.electives.quantization.config import compressed_config
from folovllm.electives.quantization.quantizer.awq import search_clip, search_scale
from folovllm.electives.quantization.quantizer.folder import Tensors
from folovllm.electives.quantization.quantizer.gptq import LOWEST_ZERO, act_order, gptq
from folovllm.electives.quantization.quantizer.groups import dequantize_groups, quantize_groups, round_groups
from folovllm.electives.quantization.quantizer.one_layer import Inputs, OneLayer
from folovllm.electives.quantization.quantizer.options import QuantizeOptions
from folovllm.electives.quantization.weight import round_channels

BITS = 4
NORMS = {"self_attn.qkv_proj": "input_layernorm", "mlp.gate_up_proj": "post_attention_layernorm"}
LINEARS = {"self_attn.o_proj": "self_attn.v_proj", "mlp.down_proj": "mlp.up_proj"}  # whose outputs a layer reads
NOT_CLIPPED = ("q_proj", "k_proj")  # their outputs are multiplied by each other (AutoAWQ leaves them, too)


def quantize_layer(
    options: QuantizeOptions, layer: OneLayer, source: Tensors, dtype: torch.dtype, inputs: dict[str, Inputs] | None
) -> Tensors:
    """Return the checkpoint's tensors of the quantized layer; `layer` is left with the weights that they stand for.

    Args:
        source: the layer's tensors before. What is not quantized keeps its dtype.
        dtype: that of scales.
        inputs: what the layer's linear layers read; None where rounding looks at weights alone.
    """
    if inputs is not None and options.format == "awq":
        fold_scales(layer, inputs, BITS, options.group_size, dtype)
    tensors = {name: t for name, t in source.items() if name.removesuffix(".weight") not in layer.projections}
    for name, view in layer.tensors().items():
        if name in tensors:
            tensors[name] = view.to(tensors[name].dtype, copy=True)
            view.copy_(tensors[name])
    for part, (linear, w) in layer.projections.items():
        quantized, weight = quantize_weight(options, part, w, dtype, inputs[linear] if inputs else None)
        tensors |= {f"{part}.{kind}": tensor for kind, tensor in quantized.items()}
        w.copy_(weight)
    return tensors


def quantize_weight(
    options: QuantizeOptions, name: str, w: torch.Tensor, dtype: torch.dtype, inputs: Inputs | None
) -> tuple[Tensors, torch.Tensor]:
    """Quantize the weights `w` [outputs, inputs] float32 of the projection `name`; `dtype` is that of scales.

    `inputs` are what the layer reads; None where rounding looks at weights alone.

    Returns:
        the checkpoint's tensors, by the last part of their names; and the weights that they stand for, float32.
    """
    if options.format == "gptq":
        return to_gptq(options, w.to(dtype), inputs)
    if options.format == "awq":
        if inputs is not None and not options.no_clip and not name.endswith(NOT_CLIPPED):
            w = search_clip(w, inputs.gram, BITS, options.group_size)
        return to_awq(options, w.to(dtype))
    return to_8_bits(w, torch.float8_e4m3fn if options.format == "fp8" else torch.int8, dtype)


def to_gptq(o: QuantizeOptions, w: torch.Tensor, inputs: Inputs | None) -> tuple[Tensors, torch.Tensor]:
    """GPTQ's layout, first version: zeros are stored as one less. Codes by GPTQ, or by rounding alone.

    `qweight` [inputs / 8, outputs], `qzeros` [groups, outputs / 8], `scales` [groups, outputs], `g_idx` [inputs].
    """
    order = torch.arange(w.shape[1], device=w.device)
    if inputs is None:
        codes, scales, zeros = quantize_groups(w, BITS, o.group_size, not o.asymmetric, LOWEST_ZERO)
    else:
        order = act_order(inputs.gram) if o.act_order else order
        gram = inputs.gram[order][:, order]
        codes, scales, zeros = gptq(w[:, order], gram, BITS, o.group_size, not o.asymmetric, o.damping)
    back = order.argsort()  # where each input came in the order
    tensors = {
        "qweight": packing.pack_gptq(codes[:, back]),
        "qzeros": packing.pack_gptq_zeros(zeros),
        "scales": scales.t().contiguous(),
        "g_idx": (back // o.group_size).to(torch.int32),
    }
    return tensors, dequantize_groups(codes, scales.float(), zeros)[:, back]


def to_awq(o: QuantizeOptions, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """AWQ's layout; every group has a zero.

    `qweight` [inputs, outputs / 8], `qzeros` [groups, outputs / 8], `scales` [groups, outputs].
    """
    codes, scales, zeros = quantize_groups(w, BITS, o.group_size, symmetric=False)
    packed = {"qweight": packing.pack_awq(codes), "qzeros": packing.pack_awq(zeros)}
    return {**packed, "scales": scales.t().contiguous()}, dequantize_groups(codes, scales.float(), zeros)


def to_8_bits(w: torch.Tensor, to: torch.dtype, scale_dtype: torch.dtype) -> tuple[Tensors, torch.Tensor]:
    """FP8 or INT8 with a scale for each output, in compressed-tensors' layout.

    `weight_scale` [outputs, 1]; FP8: `weight` [outputs, inputs]; INT8: `weight_packed` [outputs, inputs / 4], `weight_shape` [2].
    Four codes of INT8 share an int32: the one layout in which vLLM reads weights alone.
    """
    codes, scales = round_channels(w, to, scale_dtype)
    tensors = {"weight": codes, "weight_scale": scales}
    if to == torch.int8:
        packed = (codes ^ -128).view(torch.int32)  # 128 more than they are, as unsigned bytes, the first one lowest
        tensors = {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor(w.shape)}
    return tensors, codes.float() * scales.float()


def quantization_config(o: QuantizeOptions, unquantized: Sequence[str]) -> dict[str, Any]:
    """Return the `quantization_config`; `unquantized` are the layers that are left, which vLLM wants to know with 8 bits.

    As GPTQModel, AutoAWQ and llm-compressor write it: FP8_DYNAMIC, for vLLM rounds the inputs to FP8, too; W8A16.
    """
    int4 = {"quant_method": o.format, "bits": BITS, "group_size": o.group_size}
    if o.format == "gptq":
        own = {"checkpoint_format": "gptq", "desc_act": o.act_order, "sym": not o.asymmetric, "lm_head": False}
        return int4 | own | {"damp_percent": o.damping}
    if o.format == "awq":
        return int4 | {"zero_point": True, "version": "gemm", "modules_to_not_convert": None}
    layout, kind = ("float-quantized", "float") if o.format == "fp8" else ("pack-quantized", "int")
    numbers = {"num_bits": 8, "type": kind, "symmetric": True}
    inputs = numbers | {"strategy": "token", "dynamic": True} if o.format == "fp8" else None
    return compressed_config(layout, numbers | {"strategy": "channel", "dynamic": False}, inputs, unquantized)


def fold_scales(layer: OneLayer, inputs: dict[str, Inputs], bits: int, group_size: int, dtype: torch.dtype) -> None:
    """Search a scale for the inputs of each linear layer and fold it in: the decoder layer's outputs stay as they are.

    Where query heads share K and V, the outputs of attention are no outputs of V, and `o_proj` stays as it is (in AutoAWQ, too).
    So does what reads a part of one merged matrix (Phi-3's).
    `inputs` are divided along. `dtype` is that in which norms will be stored.
    """
    tensors, rounding = layer.tensors(), partial(round_groups, bits=bits, group_size=group_size)
    for name, linear in layer.linears.items():
        w, found, writer = linear.weight.data, inputs[name], LINEARS.get(name)
        if writer is not None and (writer not in layer.projections or len(layer.projections[writer][1]) != w.shape[1]):
            continue
        scale = search_scale(w, found.gram, found.magnitude, rounding)
        if writer is None:
            scale = divide_norm(tensors[f"{NORMS[name]}.weight"], scale, dtype)
        else:
            rows, bias = layer.projections[writer][1], tensors.get(f"{writer}.bias")
            rows /= scale[:, None]
            if bias is not None:
                bias /= scale
        w *= scale
        found.divide(scale)


def divide_norm(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Divide a norm's `weight` by `scale`, both [inputs], and round it to `dtype`.

    Returns the scales by which it has really become smaller: so the linear layer makes up for the rounding.
    """
    divided = (weight / scale).to(dtype).to(weight.dtype)
    real = torch.where(divided == 0, scale, weight / divided)
    weight.copy_(divided)
    return real
