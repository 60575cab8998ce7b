"""The layouts that checkpoints have int4 weights in. Each is brought into ours as it is loaded (`packing`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from folovllm.electives.quantization import packing
from folovllm.electives.quantization.int4 import Int4
from folovllm.electives.quantization.linear_method import Dtypes, StoredView

if TYPE_CHECKING:
    from folovllm.distributed.sharding import Weight
    from folovllm.layers.fusable import Cut


@dataclass(frozen=True)
class Int4Checkpoint(Int4):
    """Int4 weights as a checkpoint stores them. `repack` brings a tensor into our order; `shard` cuts it before that."""

    outputs_last: ClassVar[bool] = True  # each tensor is [inputs or groups, outputs], else the other way around
    packs_outputs: ClassVar[tuple[str, ...]]  # names of tensors whose words have eight neighbouring outputs

    unpack = staticmethod(packing.unpack_words)  # of a checkpoint's words the codes [outputs, inputs]

    def unpack_zeros(self, words: torch.Tensor) -> torch.Tensor:
        """Return the zeros [outputs, groups] of a checkpoint's words."""
        return packing.unpack_words(words.t()).t()

    def repack(self, kind: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return words in the order of `pack_planes`, and scales and zeros as [outputs, groups]."""
        words, scales, zeros = self.names
        if kind == words:
            codes = self.unpack(tensor)
            return packing.pack_planes(codes, self.group_size_of(codes.shape[1]))
        if kind == zeros:
            return self.unpack_zeros(tensor)
        return tensor.t() if kind == scales and self.outputs_last else tensor

    def shard(self, kind: str, tensor: Weight, cut: Cut) -> torch.Tensor:
        """Cut words, scales and zeros as [outputs, inputs or groups]."""
        if kind not in self.names:
            return cut(tensor)
        packed, stored = packing.PER_WORD if kind in self.packs_outputs else 1, tensor[...]
        part = cut(StoredView(stored.t() if self.outputs_last else stored, (packed, 1)))
        return part.t() if self.outputs_last else part

    def shard_filled(self, kind: str, tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
        return cut(StoredView(tensor, (1, 1)))


@dataclass(frozen=True)
class PackedInt4(Int4Checkpoint):
    """compressed-tensors' pack-quantized: words have eight neighbouring inputs, those of zeros eight neighbouring outputs."""

    names: ClassVar[tuple[str, str, str]] = ("weight_packed", "weight_scale", "weight_zero_point")
    dtypes: ClassVar[Dtypes] = dict.fromkeys(("weight_packed", "weight_zero_point"), ("I32",))
    ignores: ClassVar[tuple[str, ...]] = ("weight_shape",)
    outputs_last: ClassVar[bool] = False
    packs_outputs: ClassVar[tuple[str, ...]] = ("weight_zero_point",)


@dataclass(frozen=True)
class Gptq(Int4Checkpoint):
    """GPTQ's: a word has eight neighbouring inputs of an output; outputs are the last dimension.

    Attributes:
        one_less: zeros are stored less one, as the first version of the layout has them.
    """

    with_zeros: bool = True
    one_less: bool = True

    names: ClassVar[tuple[str, str, str]] = ("qweight", "scales", "qzeros")
    dtypes: ClassVar[Dtypes] = dict.fromkeys(("qweight", "qzeros"), ("I32",))
    ignores: ClassVar[tuple[str, ...]] = ("g_idx",)
    packs_outputs: ClassVar[tuple[str, ...]] = ("qzeros",)
    unpack = staticmethod(packing.unpack_gptq)

    def check_ignored(self, name: str, tensor: torch.Tensor) -> None:
        """Where inputs come in order, `g_idx` numbers their groups, or is left zero (vLLM drops any)."""
        count = tensor.numel()
        if tensor.any() and not torch.equal(tensor.long(), torch.arange(count) // self.group_size_of(count)):
            raise ValueError(
                f"{name!r} puts inputs into groups in an order of their own, of which config.json says nothing: set "
                '"desc_act": true in the quantization_config there'
            )

    def unpack_zeros(self, words: torch.Tensor) -> torch.Tensor:
        return packing.unpack_gptq_zeros(words, self.one_less)


@dataclass(frozen=True)
class SortedGptq(Gptq):
    """GPTQ's with `desc_act`: it quantized the inputs that matter most first, so a group's inputs lie anywhere."""

    order_name: ClassVar[str | None] = "g_idx"
    dtypes: ClassVar[Dtypes] = {**Gptq.dtypes, "g_idx": ("I32",)}
    ignores: ClassVar[tuple[str, ...]] = ()

    def repack(self, kind: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Raise ValueError unless `g_idx` puts as many inputs into each group."""
        if kind == "g_idx":
            size = self.group_size_of(tensor.numel())
            if not torch.equal(tensor.flatten().sort().values.cpu(), torch.arange(tensor.numel()) // size):
                raise ValueError(f"it does not put {size} inputs into each group: such checkpoints are not supported")
        return super().repack(kind, tensor, shape)

    def shard(self, kind: str, tensor: Weight, cut: Cut) -> torch.Tensor:
        """Leave `g_idx` whole: inputs in no particular order are needed by all ranks."""
        return tensor[:] if kind == "g_idx" else super().shard(kind, tensor, cut)


@dataclass(frozen=True)
class Awq(Int4Checkpoint):
    """AWQ's: a word has one input of eight neighbouring outputs, in an order of its own."""

    with_zeros: bool = True

    names: ClassVar[tuple[str, str, str]] = ("qweight", "scales", "qzeros")
    dtypes: ClassVar[Dtypes] = dict.fromkeys(("qweight", "qzeros"), ("I32",))
    packs_outputs: ClassVar[tuple[str, ...]] = ("qweight", "qzeros")
    unpack = staticmethod(packing.unpack_awq)

    def unpack_zeros(self, words: torch.Tensor) -> torch.Tensor:
        return packing.unpack_awq(words)
