"""The quantized blocks of a GGUF file in our layouts: nothing is rounded, codes stay codes.

GGUF puts a block's scale before its codes. A kernel would rather have codes side by side, so each type becomes codes of 4
or 8 bits with a scale, and perhaps a minimum, for each group of inputs. Types are described in gguf-py's `quants.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from folovllm.electives.quantization import packing
from folovllm.electives.quantization.int4 import Int4
from folovllm.electives.quantization.scaled import Int8
from folovllm.layers.layer_set import LinearMethodOf
from folovllm.layers.linear import LinearMethod
from folovllm.models.files import reading

if TYPE_CHECKING:
    from gguf.gguf_reader import ReaderTensor

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Type:
    """A type of blocks: its linear method here, and how blocks [outputs, blocks, bytes] become that method's tensors."""

    linear_method: LinearMethod
    split: Callable[[torch.Tensor], Tensors]


def q4_0(blocks: torch.Tensor) -> Tensors:
    """32 inputs: a scale, and codes of which 8 is zero."""
    return {"words": words_of(blocks[..., 2:]), "scales": halves(blocks[..., :2])}


def q4_1(blocks: torch.Tensor) -> Tensors:
    """32 inputs: a scale, a minimum, codes."""
    return {"words": words_of(blocks[..., 4:]), "scales": halves(blocks[..., :2]), "zeros": halves(blocks[..., 2:4])}


def q4_k(blocks: torch.Tensor) -> Tensors:
    """256 inputs: two scales, of 8 scales and of 8 minimums, which are codes of 6 bits themselves; codes."""
    low, middle, high = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)  # 8 + 8 codes of 6 bits in 12 bytes
    scales = torch.cat((low & 63, (high & 15) | (low >> 2 & 48)), -1)
    minimums = torch.cat((middle & 63, high >> 4 | (middle >> 2 & 48)), -1)
    return {
        "words": words_of(blocks[..., 16:].unflatten(-1, (4, 32))),
        "scales": (halves(blocks[..., :2])[..., None].float() * scales).flatten(1),
        "zeros": (-halves(blocks[..., 2:4])[..., None].float() * minimums).flatten(1),
    }


def q8_0(blocks: torch.Tensor) -> Tensors:
    """32 inputs: a scale, codes with a sign."""
    codes = blocks[..., 2:].contiguous().view(torch.int8)
    return {"weight": codes.flatten(1), "weight_scale": halves(blocks[..., :2]).float()}


def q6_k(blocks: torch.Tensor) -> Tensors:
    """256 inputs: the lower 4 bits of all codes, the upper 2, 16 scales of 8 bits, the scale of these."""
    low, high, scales = (
        blocks[..., :128].unflatten(-1, (2, 64)),
        blocks[..., 128:192].unflatten(-1, (2, 32)),
        blocks[..., 192:208],
    )
    fours = torch.stack((low & 15, low >> 4), -2).unflatten(-1, (2, 32)).flatten(-3, -2)  # [..., 2, 4, 32]
    twos = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], -2)
    codes = (fours | twos << 4).to(torch.int8) - 32
    scale = halves(blocks[..., 208:])[..., None].float() * scales.contiguous().view(torch.int8)
    return {"weight": codes.flatten(1), "weight_scale": scale.flatten(1)}


def halves(pairs: torch.Tensor) -> torch.Tensor:
    """Return pairs of bytes [..., 2] as the float16 that they are, [...]."""
    return pairs.contiguous().view(torch.float16)[..., 0]


def words_of(pairs: torch.Tensor) -> torch.Tensor:
    """Return codes in our own order, of bytes [outputs, ..., n] with two codes each: all lower halves come before all upper ones."""
    codes = torch.cat((pairs & 15, pairs >> 4), -1).flatten(1)
    return packing.pack_planes(codes, 32)


TYPES: dict[str, Type] = {
    "Q4_0": Type(Int4(32), q4_0),
    "Q4_1": Type(Int4(32, with_zeros=True, with_minimum=True), q4_1),
    "Q4_K": Type(Int4(32, with_zeros=True, with_minimum=True), q4_k),
    "Q8_0": Type(Int8("weight_scale", (1, 32)), q8_0),
    "Q6_K": Type(Int8("weight_scale", (1, 16)), q6_k),
}
MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers that are one here


def read_gguf_types(said: Mapping[str, Any]) -> LinearMethodOf:
    """Read the `quantization_config` that `coded_weights` writes: the type of each quantized layer."""
    types: Mapping[str, str] = said["types"]
    return lambda name: TYPES[types[name]].linear_method if name in types else None


def coded_weights(
    file: Path, tensors: Mapping[str, ReaderTensor], rows: Callable[[str, torch.Tensor], torch.Tensor]
) -> tuple[Tensors, dict[str, Any]]:
    """Return the quantized projections of a file, and their `quantization_config`.

    Left out is what is in floats, of another type, or would be one layer with a projection of another type.

    Args:
        tensors: those of `file`, by their Hugging Face names.
        rows: puts the rows of a projection in our order.

    Raises:
        ValueError: a projection cannot be brought into our order.
    """
    weights: Tensors = {}
    kinds = {name.removesuffix(".weight"): tensor.tensor_type.name for name, tensor in tensors.items()}
    types = {
        name: kind for name, kind in kinds.items() if kind in TYPES and name.endswith("proj") and alike(name, kinds)
    }
    for name, kind in types.items():
        tensor = tensors[f"{name}.weight"]
        with reading(file, name):
            blocks = torch.tensor(tensor.data).reshape(len(tensor.data), -1, block_bytes(tensor))
            for part, content in TYPES[kind].split(blocks).items():
                weights[f"{name}.{part}"] = rows(f"{name}.weight", content).contiguous()
    return weights, {"quantization_config": {"quant_method": "gguf", "types": types}}


def alike(name: str, kinds: Mapping[str, str]) -> bool:
    """Return whether all parts of one merged layer have the type of this one."""
    parent, _, leaf = name.rpartition(".")
    beside = next((parts for parts in MERGED if leaf in parts), (leaf,))
    return len({kinds.get(f"{parent}.{part}") for part in beside}) == 1


def block_bytes(tensor: ReaderTensor) -> int:
    """Return the bytes of a block of this tensor's type."""
    from gguf import GGML_QUANT_SIZES

    return int(GGML_QUANT_SIZES[tensor.tensor_type][1])
