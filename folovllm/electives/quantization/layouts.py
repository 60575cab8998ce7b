"""The layouts that checkpoints have quantized weights in: tensors' names, dtypes, and what brings each into our form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from folovllm.electives.quantization import packing
from folovllm.layers.linear import FLOATS

E4M3 = torch.float8_e4m3fn
STORED = {E4M3: ("F8_E4M3",), torch.int8: ("I8",), torch.int32: ("I32",)}  # as safetensors call them
FROM_UNSIGNED = -0x7F7F7F80  # 0x80808080: flips the highest bit of four bytes, which subtracts 128 from each

Unpack = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """How a checkpoint stores W [outputs, inputs] of a linear layer. A kind of tensor is the last part of its name.

    Attributes:
        codes, scales: the kinds of tensors that every layout has.
        dtype: in which a layer keeps codes: E4M3, int8, or int32 words of eight codes of 4 bits.
        zeros: the kind that says which code of a group is zero; without, it is 0 of 8 bits, and 8 of 4 bits.
        has_minimums: zeros are no codes, but the values of code 0, in floats.
        order: the kind that says which group each input is in; without, they come in order.
        inputs: the kind of the scale of FP8 activations, one for each layer; without, activations have scales of their own.
        outputs_last: codes, scales and zeros are [inputs or groups, outputs], else the other way around.
        packs_outputs: kinds whose words have eight neighbouring outputs.
        unpack, unpack_zeros: the stored tensor, int32 words -> codes [outputs, inputs], zeros [outputs, groups].
        ignores: kinds that a checkpoint may hold, and no product needs.
    """

    codes: str
    scales: str
    dtype: torch.dtype
    zeros: str | None = None
    has_minimums: bool = False
    order: str | None = None
    inputs: str | None = None
    outputs_last: bool = False
    packs_outputs: tuple[str, ...] = ()
    unpack: Unpack | None = None
    unpack_zeros: Unpack | None = None
    ignores: tuple[str, ...] = ()

    @property
    def per_number(self) -> int:
        """Codes in one of the numbers that a layer keeps."""
        return packing.PER_WORD if self.dtype == torch.int32 else 1

    def unpack_of(self, kind: str) -> Unpack | None:
        """Return what unpacks this kind of tensor; None if it is stored as a layer keeps it."""
        return {self.codes: self.unpack, self.zeros: self.unpack_zeros}.get(kind)

    def stored(self, kind: str) -> tuple[str, ...]:
        """Return the dtypes that a kind of tensor may be stored in."""
        if kind == self.order or self.unpack_of(kind) is not None:
            return STORED[torch.int32]
        return STORED[self.dtype] if kind == self.codes else FLOATS


def unpack_by_outputs(words: torch.Tensor) -> torch.Tensor:
    """[outputs / 8, groups] words of neighbouring outputs -> [outputs, groups]."""
    return packing.unpack_words(words.t()).t()


def signed_bytes(words: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs / 4] words of four codes, the first in the lowest byte and all 128 too large -> int8 [outputs, inputs]."""
    return (words ^ FROM_UNSIGNED).view(torch.int8)


def unpack_gptq_v2_zeros(words: torch.Tensor) -> torch.Tensor:
    """Zeros of GPTQ's second layout, which are stored as they are."""
    return packing.unpack_gptq_zeros(words, one_less=False)


# Ignored: scales of activations, since activations may stay as they are, and zero points, which symmetric codes do not need.
INT8 = Layout("weight", "weight_scale", torch.int8, ignores=("input_scale", "activation_scale", "weight_zero_point"))
FP8 = replace(INT8, dtype=E4M3)
PACKED_INT8 = replace(INT8, codes="weight_packed", unpack=signed_bytes, ignores=(*INT8.ignores, "weight_shape"))
# compressed-tensors' pack-quantized: a word has eight neighbouring inputs, one of zeros eight neighbouring outputs.
PACKED_INT4 = Layout(
    "weight_packed", "weight_scale", torch.int32, "weight_zero_point", packs_outputs=("weight_zero_point",),
    unpack=packing.unpack_words, unpack_zeros=unpack_by_outputs, ignores=("weight_shape",),
)  # fmt: skip
# A word has eight neighbouring inputs of an output. Zeros are stored less one, in the first version.
GPTQ = Layout(
    "qweight", "scales", torch.int32, "qzeros", outputs_last=True, packs_outputs=("qzeros",),
    unpack=packing.unpack_gptq, unpack_zeros=packing.unpack_gptq_zeros, ignores=("g_idx",),
)  # fmt: skip
GPTQ_V2 = replace(GPTQ, unpack_zeros=unpack_gptq_v2_zeros)
# A word has one input of eight neighbouring outputs, in an order of its own.
AWQ = Layout(
    "qweight", "scales", torch.int32, "qzeros", outputs_last=True, packs_outputs=("qweight", "qzeros"),
    unpack=packing.unpack_awq, unpack_zeros=packing.unpack_awq,
)  # fmt: skip
# What `gguf_weights` writes: words are in our order already. With minimums: Q4_1 and Q4_K.
GGUF = Layout("words", "scales", torch.int32)
GGUF_MINIMUMS = replace(GGUF, zeros="zeros", has_minimums=True)
