"""Codes of 4 bits as those who write checkpoints lay them out, each brought into ours as it is loaded (`packing`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from folovllm.quantization import packing
from folovllm.quantization.int4 import Int4
from folovllm.quantization.scaled import shrunk

if TYPE_CHECKING:
    from folovllm.distributed.sharding import Weight
    from folovllm.layers.linear_method import Cut


@dataclass(frozen=True)
class PackedInt4(Int4):
    """compressed-tensors' pack-quantized: words have eight neighbouring inputs, those of zeros eight neighbouring outputs."""

    names: ClassVar[tuple[str, str, str]] = ("weight_packed", "weight_scale", "weight_zero_point")
    ignores: ClassVar[tuple[str, ...]] = ("weight_shape",)

    def arrange(self, kind: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """As `Int4`."""
        tensor = super().arrange(kind, tensor, shape)
        if kind == "weight_packed":
            codes = packing.unpack_words(tensor)
            return packing.pack_planes(codes, self.group_size_of(codes.shape[1]))
        return packing.unpack_words(tensor.t()).t() if kind == "weight_zero_point" else tensor

    def shard(self, kind: str, tensor: Weight, cut: Cut) -> torch.Tensor:
        """As `LinearMethod`."""
        packed = packing.PER_WORD if kind == "weight_zero_point" else 1
        return cut(tensor) if kind == "bias" else cut(Laid(tensor, 0, packed))


@dataclass(frozen=True)
class Gptq(Int4):
    """GPTQ's: a word has eight neighbouring inputs of an output; outputs are the last dimension.

    Attributes:
        one_less: zeros are stored less one, as the first version of the layout has them.
    """

    with_zeros: bool = True
    one_less: bool = True

    names: ClassVar[tuple[str, str, str]] = ("qweight", "scales", "qzeros")
    ignores: ClassVar[tuple[str, ...]] = ("g_idx",)

    def check_ignored(self, name: str, tensor: torch.Tensor) -> None:
        """As `LinearMethod`. Where inputs come in order, `g_idx` numbers their groups, or is left zero (vLLM drops any)."""
        count = tensor.numel()
        if tensor.any() and not torch.equal(tensor.long(), torch.arange(count) // self.group_size_of(count)):
            raise ValueError(
                f"{name!r} puts inputs into groups in an order of their own, of which config.json says nothing: set "
                '"desc_act": true in the quantization_config there'
            )

    def arrange(self, kind: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """As `Int4`."""
        tensor = super().arrange(kind, tensor, shape)
        if kind == "qweight":
            codes = packing.unpack_gptq(tensor)
            return packing.pack_planes(codes, self.group_size_of(codes.shape[1]))
        if kind == "qzeros":
            return packing.unpack_gptq_zeros(tensor, self.one_less)
        return tensor.t() if kind == "scales" else tensor

    def shard(self, kind: str, tensor: Weight, cut: Cut) -> torch.Tensor:
        """As `LinearMethod`. Inputs that are in no particular order are in everybody's."""
        if kind in self.names:
            return cut(Laid(tensor, 1, packing.PER_WORD if kind == "qzeros" else 1)).t()
        return tensor[:] if kind == "g_idx" else cut(tensor)


@dataclass(frozen=True)
class SortedGptq(Gptq):
    """GPTQ's with `desc_act`: it quantized the inputs that matter most first, so a group's inputs lie anywhere."""

    order_name: ClassVar[str | None] = "g_idx"
    ignores: ClassVar[tuple[str, ...]] = ()

    def stored(self, kind: str) -> tuple[str, ...]:
        """As `Int4`."""
        return ("I32",) if kind == "g_idx" else super().stored(kind)


@dataclass(frozen=True)
class Awq(Int4):
    """AWQ's: a word has one input of eight neighbouring outputs, in an order of its own."""

    with_zeros: bool = True

    names: ClassVar[tuple[str, str, str]] = ("qweight", "scales", "qzeros")

    def arrange(self, kind: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """As `Int4`."""
        tensor = super().arrange(kind, tensor, shape)
        if kind == "qweight":
            codes = packing.unpack_awq(tensor)
            return packing.pack_planes(codes, self.group_size_of(codes.shape[1]))
        if kind == "qzeros":
            return packing.unpack_awq(tensor)
        return tensor.t() if kind == "scales" else tensor

    def shard(self, kind: str, tensor: Weight, cut: Cut) -> torch.Tensor:
        """As `LinearMethod`."""
        if kind in self.names:
            return cut(Laid(tensor, 1, 1 if kind == "scales" else packing.PER_WORD)).t()
        return cut(tensor)


class Laid:
    """A tensor whose dimension `dim` is outputs, `packed` of them in a word; the other one is words of inputs, or groups.

    It is seen as [outputs, the other one], and so is what an index gives, but that words stay words. If the other one is
    a single group, all ranks have it.
    """

    def __init__(self, stored: Weight, dim: int, packed: int) -> None:
        self.stored, self.dim, self.packed = stored, dim, packed
        self.shape = torch.Size([stored.shape[dim] * packed, stored.shape[1 - dim]])

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        slices = shrunk(rows, self.packed), (slice(None) if self.shape[1] == 1 else columns)
        return self.stored[slices] if self.dim == 0 else self.stored[slices[::-1]].t()
