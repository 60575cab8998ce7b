"""Where AWQ's scales go: a layer's inputs come divided from the layer before it."""

from __future__ import annotations

from functools import partial

import torch

from folovllm.quantization.quantizer.awq import search_scale
from folovllm.quantization.quantizer.groups import dequantize_groups, quantize_groups
from folovllm.quantization.quantizer.one_layer import Inputs, OneLayer

NORMS = {"self_attn.qkv_proj": "input_layernorm", "mlp.gate_up_proj": "post_attention_layernorm"}
LINEARS = {"self_attn.o_proj": "self_attn.v_proj", "mlp.down_proj": "mlp.up_proj"}  # who reads: who wrote it


def round_groups(w: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """What codes of `bits` bits with zeros make of `w`: [outputs, inputs]."""
    return dequantize_groups(*quantize_groups(w, bits, group_size, symmetric=False))


def fold_scales(layer: OneLayer, inputs: dict[str, Inputs], bits: int, group_size: int, dtype: torch.dtype) -> None:
    """Search a scale for the inputs of each linear layer and fold it in: the decoder layer's outputs stay as they are.

    Where query heads share K and V, the outputs of attention are no outputs of V, and `o_proj` stays as it is (in AutoAWQ, too).
    So does what reads a part of one merged matrix (Phi-3's).
    `inputs` are divided along. `dtype` is that in which norms will be stored.
    """
    before = {name: place for parts in layer.parts.values() for name, place in parts.items()}
    tensors = layer.tensors()
    rounding = partial(round_groups, bits=bits, group_size=group_size)
    for name, linear in layer.linears.items():
        w, found = linear.weight.data, inputs[name]
        writer = None if name in NORMS else before.get(LINEARS[name])
        if name not in NORMS and (writer is None or len(writer) != w.shape[1]):
            continue
        scale = search_scale(w, found.gram, found.magnitude, rounding)
        if writer is None:
            scale = divide_norm(tensors[f"{NORMS[name]}.weight"], scale, dtype)
        else:
            writer /= scale[:, None]
            if (bias := tensors.get(f"{LINEARS[name]}.bias")) is not None:
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
