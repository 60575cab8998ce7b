"""The quantized blocks of a GGUF file in our layouts, without rounding.

GGUF puts a block's scale before its codes. A kernel would rather have codes side by side, so each type becomes codes of 4
or 8 bits with a scale, and perhaps a minimum, for each group of inputs. Types are described in gguf-py's `quants.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from folovllm.electives.quantization import packing
from folovllm.electives.quantization.int4 import Int4
from folovllm.electives.quantization.layouts import GGUF, GGUF_MINIMUMS, INT8
from folovllm.electives.quantization.linear_method import Quantized
from folovllm.models.files import reading

if TYPE_CHECKING:
    from gguf.gguf_reader import ReaderTensor

Tensors = dict[str, torch.Tensor]


def q4_0(blocks: torch.Tensor) -> Tensors:
    """32 inputs: a scale, and codes of which 8 is zero."""
    return {"words": pack_nibbles(blocks[..., 2:]), "scales": as_float16(blocks[..., :2])}


def q4_1(blocks: torch.Tensor) -> Tensors:
    """32 inputs: a scale, a minimum, codes."""
    scales, minimums = as_float16(blocks[..., :2]), as_float16(blocks[..., 2:4])
    return {"words": pack_nibbles(blocks[..., 4:]), "scales": scales, "zeros": minimums}


def q4_k(blocks: torch.Tensor) -> Tensors:
    """256 inputs: two scales, of 8 scales and of 8 minimums, which are codes of 6 bits themselves; codes."""
    low, middle, high = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)  # 8 + 8 codes of 6 bits in 12 bytes
    scales = torch.cat((low & 63, (high & 15) | (low >> 2 & 48)), -1)
    minimums = torch.cat((middle & 63, high >> 4 | (middle >> 2 & 48)), -1)
    return {
        "words": pack_nibbles(blocks[..., 16:].unflatten(-1, (4, 32))),
        "scales": (as_float16(blocks[..., :2])[..., None].float() * scales).flatten(1),
        "zeros": (-as_float16(blocks[..., 2:4])[..., None].float() * minimums).flatten(1),
    }


def q8_0(blocks: torch.Tensor) -> Tensors:
    """32 inputs: a scale, codes with a sign."""
    codes = blocks[..., 2:].contiguous().view(torch.int8)
    return {"weight": codes.flatten(1), "weight_scale": as_float16(blocks[..., :2]).float()}


def q6_k(blocks: torch.Tensor) -> Tensors:
    """256 inputs: the lower 4 bits of all codes, the upper 2, 16 scales of 8 bits, the scale of these."""
    low, high = blocks[..., :128].unflatten(-1, (2, 64)), blocks[..., 128:192].unflatten(-1, (2, 32))
    fours = torch.stack((low & 15, low >> 4), -2).unflatten(-1, (2, 32)).flatten(-3, -2)  # [..., 2, 4, 32]
    twos = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], -2)
    codes = (fours | twos << 4).to(torch.int8) - 32
    scale = as_float16(blocks[..., 208:])[..., None].float() * blocks[..., 192:208].contiguous().view(torch.int8)
    return {"weight": codes.flatten(1), "weight_scale": scale.flatten(1)}


def as_float16(pairs: torch.Tensor) -> torch.Tensor:
    """Return float16 numbers [...] that are stored as pairs of bytes [..., 2]."""
    return pairs.contiguous().view(torch.float16)[..., 0]


def pack_nibbles(pairs: torch.Tensor) -> torch.Tensor:
    """Return packed words of bytes [outputs, ..., n] with two codes each: all lower halves come before all upper ones."""
    codes = torch.cat((pairs & 15, pairs >> 4), -1).flatten(1)
    return packing.pack_planes(codes, 32)


# A type of blocks: its linear method, and what turns blocks [outputs, blocks, bytes] into that method's tensors.
TYPES: dict[str, tuple[Quantized, Callable[[torch.Tensor], Tensors]]] = {
    "Q4_0": (Int4(GGUF, (1, 32)), q4_0),
    "Q4_1": (Int4(GGUF_MINIMUMS, (1, 32)), q4_1),
    "Q4_K": (Int4(GGUF_MINIMUMS, (1, 32)), q4_k),
    "Q8_0": (Quantized(INT8, (1, 32)), q8_0),
    "Q6_K": (Quantized(INT8, (1, 16)), q6_k),
}
MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers that are one here


def quantized_weights(
    file: Path, tensors: Mapping[str, ReaderTensor], in_hf_order: Callable[[str, torch.Tensor], torch.Tensor]
) -> tuple[Tensors, dict[str, str]]:
    """Return the tensors of the projections that stay quantized, and the type of each projection.

    Left out is what is in floats, of another type, or would be merged with a projection of another type.

    Args:
        tensors: those of `file`, by their Hugging Face names.
        in_hf_order: brings the rows of a projection into Hugging Face's order.

    Raises:
        ValueError: a projection cannot be repacked.
    """
    from gguf import GGML_QUANT_SIZES

    all_types = {name.removesuffix(".weight"): tensor.tensor_type.name for name, tensor in tensors.items()}
    types: dict[str, str] = {}
    weights: Tensors = {}
    for name, kind in all_types.items():
        parent, _, leaf = name.rpartition(".")
        merged = next((parts for parts in MERGED if leaf in parts), (leaf,))
        if kind in TYPES and leaf.endswith("proj") and all(all_types.get(f"{parent}.{m}") == kind for m in merged):
            types[name] = kind
            with reading(file, name):
                stored = tensors[f"{name}.weight"]
                _, size = GGML_QUANT_SIZES[stored.tensor_type]  # bytes of a block
                blocks = torch.tensor(stored.data).reshape(len(stored.data), -1, size)
                for part, content in TYPES[kind][1](blocks).items():
                    weights[f"{name}.{part}"] = in_hf_order(f"{name}.weight", content).contiguous()
    return weights, types
