"""Linear layers with quantized weights: one linear method for all layouts, whose codes of 8 bits are used as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from folovllm.electives.quantization.layouts import E4M3, Layout
from folovllm.electives.quantization.weight import QuantizedWeight
from folovllm.engine.require import is_whole, require
from folovllm.layers.fusable import ALL, FusableLinearMethod
from folovllm.step.kv_format import LARGEST

if TYPE_CHECKING:
    from folovllm.distributed.sharding import Weight
    from folovllm.layers.fusable import Cut
    from folovllm.layers.linear import LinearBase

SPREAD = {E4M3: 64.0, torch.int8: 32.0, torch.int32: 4.6}  # standard deviation of made-up codes
FULL = 128  # inputs that 16 words of 4-bit codes hold: of shorter groups, tensor cores would have numbers move between threads


@dataclass(slots=True)
class LayerState:
    """What a quantized layer keeps. Codes and scales are its parameters `weight` and `scale`, too.

    Attributes:
        weight: as kernels read it. None where `library` has it.
        dtype: of activations.
        is_aligned: a kernel can read the scales: blocks are multiples of 16 inputs, and none crosses two parts of the layer.
        columns: [inputs], or None: factors of the inputs, which cannot be folded into codes.
        order: [inputs], or None: the input that W's first column is for, its second, ... While weights are loaded:
            [parts * inputs], the group of each input of each part.
        input_scale: [parts], or None: of activations in FP8, from the checkpoint.
        floats: W, while it is loaded to be quantized.
        library: what multiplies by torch's kernel for 4 bits on CPU, which has a layout of its own.
    """

    weight: QuantizedWeight | None
    dtype: torch.dtype
    is_aligned: bool
    columns: torch.Tensor | None = None
    order: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    floats: torch.Tensor | None = None
    library: Callable[[torch.Tensor], torch.Tensor] | None = None


def state_of(layer: LinearBase) -> LayerState:
    """Return what `Quantized.create` gave the layer."""
    return cast(LayerState, layer.quantized)


def keep(layer: LinearBase, weight: QuantizedWeight | None) -> None:
    """Let a layer keep this weight."""
    state_of(layer).weight = weight
    tensors = (None, None) if weight is None else (weight.weight, weight.scale)
    layer.weight, layer.scale = (t if t is None else nn.Parameter(t, requires_grad=False) for t in tensors)  # type: ignore[assignment]


@dataclass(frozen=True)
class Quantized(FusableLinearMethod):
    """W is codes times `scale`, float32: one for each output, or for each block of W. Activations stay as they are.

    A scale for the whole layer is kept once for each output.

    Attributes:
        layout: how the checkpoint stores W.
        block: how many outputs and inputs share a scale; None: all inputs of an output.
    """

    layout: Layout
    block: tuple[int, int] | None = None

    multiple: ClassVar[int] = 1  # of inputs that a block must have

    def __post_init__(self) -> None:
        """Raise ValueError unless the sizes that a checkpoint's configuration names are whole numbers of at least 1."""
        sizes = self.block or ()
        said = " x ".join(map(repr, sizes))
        fits = all(is_whole(size) and size > 0 for size in sizes)
        require(fits, f"{said} weights share a scale, where whole numbers of at least 1 are needed")

    @property
    def ignores(self) -> tuple[str, ...]:  # type: ignore[override]
        """The kinds of tensors that a checkpoint may hold and the product does not need."""
        return self.layout.ignores

    def stored(self, kind: str) -> tuple[str, ...]:
        return self.layout.stored(kind)

    def create(self, layer: LinearBase) -> None:
        """Make codes, and what the layout has beside them. Scales are [outputs, 1], or a row for each row of blocks.

        A part of the layer begins a new row.
        """
        layout, inputs, sizes = self.layout, layer.input_size, layer.output_sizes
        rows, columns = self.block_of(inputs)
        is_aligned = inputs % 16 == columns % 16 == 0 and not any(size % rows for size in sizes[:-1])
        layer.quantized = state = LayerState(None, torch.get_default_dtype(), is_aligned)  # type: ignore[assignment]
        codes = torch.empty(sum(sizes), inputs // layout.per_number, dtype=layout.dtype)
        scale = torch.empty(sum(self.scale_rows(layer)), -(-inputs // columns), dtype=torch.float32)
        zeros = torch.empty_like(scale, dtype=torch.float32 if layout.has_minimums else torch.uint8)
        if layout.order:
            state.order = torch.empty(len(sizes) * inputs, dtype=torch.int32)
        if layout.inputs:
            state.input_scale = torch.empty(len(sizes), dtype=torch.float32)
        keep(layer, QuantizedWeight(codes, scale, rows, columns, zeros if layout.zeros else None))

    def block_of(self, inputs: int) -> tuple[int, int]:
        """Return how many outputs and inputs share a scale. `Int4` raises ValueError for a group that its kernel cannot read."""
        return self.block or (1, inputs)

    def scale_rows(self, layer: LinearBase) -> list[int]:
        """Return the rows of scales of each of `output_sizes`."""
        rows, _ = self.block_of(layer.input_size)
        return [-(-size // rows) for size in layer.output_sizes]

    def weight_views(self, layer: LinearBase) -> dict[str, Sequence[torch.Tensor]]:
        """Return, for each kind of tensor, its views by part."""
        layout, state, weight, sizes = self.layout, state_of(layer), self.weight_of(layer), layer.output_sizes
        each: tuple[tuple[str | None, torch.Tensor | None, list[int] | int], ...] = (
            (layout.codes, weight.weight, sizes), (layout.scales, weight.scale, self.scale_rows(layer)),
            (layout.zeros, weight.zeros, sizes), (layout.order, state.order, layer.input_size), (layout.inputs, state.input_scale, 1),
        )  # fmt: skip
        return {kind: torch.split(tensor, rows) for kind, tensor, rows in each if kind and tensor is not None}

    def repack(self, kind: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return codes [outputs, inputs], scales and zeros [outputs, groups].

        A single scale, [] or [1], is that of all; one for each output may come without its last dimension.
        """
        layout = self.layout
        if kind in (layout.scales, layout.inputs) and tensor.numel() == 1:
            return tensor.reshape([1] * len(shape)).expand(shape)
        if kind == layout.scales:
            return tensor[:, None] if tensor.dim() == 1 else tensor.t() if layout.outputs_last else tensor
        unpack = layout.unpack_of(kind)
        return tensor if unpack is None else unpack(tensor)

    def shard(self, kind: str, tensor: Weight, cut: Cut) -> torch.Tensor:
        """Cut codes, scales and zeros as [outputs, inputs or groups]. All ranks keep a single scale, and an order."""
        layout = self.layout
        packed = layout.per_number if kind in layout.packs_outputs else 1
        return self.cut(kind, tensor, cut, packed, layout.outputs_last)

    def shard_filled(self, kind: str, tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
        return self.cut(kind, tensor, cut, 1, False)

    def cut(self, kind: str, tensor: Weight, cut: Cut, packed: int, outputs_last: bool) -> torch.Tensor:
        """Return a rank's part of a tensor whose numbers stand for `packed` outputs each, or a row of blocks."""
        layout = self.layout
        if kind not in (layout.codes, layout.scales, layout.zeros, layout.order, layout.inputs):
            return cut(tensor)
        stored = tensor[...]
        if kind in (layout.order, layout.inputs) or stored.numel() == 1:
            return stored
        rows = self.block[0] if self.block and kind == layout.scales else packed
        part = cut(StoredView(stored[:, None] if stored.dim() == 1 else stored.t() if outputs_last else stored, rows))
        return part.t() if outputs_last else part

    def fill(self, kind: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Make up codes with a standard deviation of SPREAD, and scales that bring it to 0.02."""
        layout, spread = self.layout, SPREAD[self.layout.dtype]
        if kind == layout.codes and layout.per_number > 1:
            tensor.random_(-(2**31), 2**31 - 1, generator=generator)
        elif kind == layout.codes:
            drawn = torch.empty(tensor.shape, device=tensor.device).normal_(0.0, spread, generator=generator)
            tensor.copy_(drawn.clamp_(-127, 127))
        elif kind == layout.scales:
            tensor.fill_(torch.tensor(0.02 / spread).half())  # in 16 bits, as checkpoints often have them
        elif kind == layout.inputs:
            tensor.fill_(4 / LARGEST)
        elif kind == layout.zeros and not layout.has_minimums:
            tensor.fill_(8)
        else:
            super().fill(kind, tensor, generator)

    def num_bytes(self, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        """Return the bytes of codes, scales and zeros. A scale has 4 bytes beside codes of 8 bits, 2 beside 4 bits; a zero has 1, a minimum 2."""
        layout, (rows, columns) = self.layout, self.block_of(inputs)
        of_block = 4 if layout.per_number == 1 else 2 + (layout.zeros is not None) + layout.has_minimums
        codes = outputs * inputs * layout.dtype.itemsize // layout.per_number
        return codes + of_block * -(-outputs // rows) * -(-inputs // columns)

    def check_part(self, outputs: int, inputs: int) -> None:
        """Raise ValueError unless ranks can have whole blocks and whole words."""
        require(not self.layout.order, "its inputs are sorted (desc_act), so those of a group lie on all ranks")
        rows, columns = self.block or (1, self.multiple)
        rows *= self.layout.per_number
        says = f"a rank's part [{outputs}, {inputs}] would not hold whole blocks of {rows} x {columns} weights, whose scale or words"
        require(outputs % rows == inputs % columns == 0, f"{says} are kept together")

    def loaded(self, layer: LinearBase) -> None:
        """Forget what was folded into earlier weights."""
        state_of(layer).columns = None

    def can_fold(self, layer: LinearBase) -> bool:
        """Return False with a bias, and in float16, as unquantized weights do."""
        return layer.bias is None and state_of(layer).dtype != torch.float16

    def fold(self, layer: LinearBase, scale: torch.Tensor) -> None:
        """Keep the factors; every product multiplies its `x` by them."""
        state = state_of(layer)
        state.columns = scale.clone() if state.columns is None else state.columns * scale

    def check_stack(self, layer: LinearBase) -> None:
        """Raise ValueError unless the parts of `layer` can be used one by one, as experts are. The message completes a sentence."""
        require(not self.layout.order, "each sorts its inputs in an order of its own (desc_act)")
        rows, columns = self.block_of(layer.input_size)
        blocks, sizes = f"blocks of {rows} x {columns} weights with a scale", [layer.output_sizes[0], layer.input_size]
        require(state_of(layer).is_aligned, f"{blocks} do not divide {sizes} into multiples of 16 inputs")

    def weight_of(self, layer: LinearBase) -> QuantizedWeight:
        """Return the weight as kernels read it. There is none where torch's kernel multiplies."""
        weight = state_of(layer).weight
        assert weight is not None
        return weight

    def dequantized(self, layer: LinearBase, dtype: torch.dtype, parts: slice = ALL) -> torch.Tensor:
        """Return W [outputs, inputs] of some of the `output_sizes` in `dtype`, a copy."""
        weight, sizes, scale_rows = self.weight_of(layer), layer.output_sizes, self.scale_rows(layer)
        rows, scale = rows_of(sizes, parts), weight.scale[rows_of(scale_rows, parts)]
        if weight.rows > 1:
            each = zip(scale.split(scale_rows[parts]), sizes[parts], strict=True)
            scale = torch.cat([own.repeat_interleave(weight.rows, 0)[:size] for own, size in each])
        zeros = None if weight.zeros is None else weight.zeros[rows]
        return QuantizedWeight(weight.weight[rows], scale, 1, weight.columns, zeros).dequantized(dtype)

    def has_kernels(self, layer: LinearBase, x: torch.Tensor) -> bool:
        """Return whether a kernel multiplies: on a GPU, where it can read the scales."""
        return on_gpu(x) and state_of(layer).is_aligned

    def product(self, layer: LinearBase, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        state = state_of(layer)
        if state.columns is not None:
            x = x * state.columns
        if state.order is not None:
            x = x[:, state.order]
        if self.has_kernels(layer, x):
            from folovllm.electives.quantization.kernels.quant_matmul import multiply

            y = multiply(x, self.weight_of(layer), residual)
            return y if layer.bias is None else y.add_(layer.bias)
        y = F.linear(x, self.dequantized(layer, x.dtype), layer.bias) if state.library is None else state.library(x)
        return y if residual is None else residual.add_(y)

    def fuses(self, layer: LinearBase, x: torch.Tensor) -> bool:
        """Return True for few tokens, no bias, and inputs that are not sorted, where kernels multiply."""
        if layer.bias is not None or state_of(layer).order is not None or not self.has_kernels(layer, x):
            return False
        from folovllm.electives.quantization.kernels.quant_gemv import FEW, is_supported

        return len(x) in FEW and (self.layout.dtype == torch.int32 or is_supported(x))

    def fused(
        self, layer: LinearBase, x: torch.Tensor, norm_eps: float | None, gated: bool, residual: torch.Tensor | None
    ) -> torch.Tensor:
        from folovllm.electives.quantization.kernels.quant_gemv import is_supported, quant_gemv

        w, columns = self.weight_of(layer), state_of(layer).columns
        if self.layout.dtype == torch.int32 and (x.itemsize != 2 or w.columns % FULL or not is_supported(x)):
            from folovllm.electives.quantization.kernels.int4_linear import int4_linear

            return int4_linear(x, w.weight, w.scale, w.zeros, norm_eps, gated, residual, columns)
        return quant_gemv(x, w, norm_eps, gated, residual, columns)

    def grouped_product(
        self, layer: LinearBase, x: torch.Tensor, num_experts: int, order: torch.Tensor, starts: torch.Tensor,
        gated: bool = False, out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Multiply each token by the matrices of its experts, which are the parts of `layer` (`moe.experts`)."""
        from folovllm.electives.quantization.kernels.grouped_quant import grouped_quant

        return grouped_quant(x, self.weight_of(layer), num_experts, order, starts, gated, out)


class StoredView:
    """A checkpoint's matrix seen as [outputs, inputs], whose rows stand for `rows` outputs each.

    An index begins and ends between these. If all inputs share a number, every rank has it.
    """

    def __init__(self, stored: torch.Tensor, rows: int) -> None:
        self.stored, self.rows = stored, rows
        self.shape = torch.Size((rows * stored.shape[0], stored.shape[1]))

    def __getitem__(self, index: Any) -> torch.Tensor:
        outputs, columns = index if isinstance(index, tuple) else (index, ALL)
        first, end, _ = outputs.indices(self.shape[0])
        fits = first % self.rows == end % self.rows == 0
        require(fits, f"a part begins or ends within {self.rows} outputs that belong together")
        rows = slice(first // self.rows, end // self.rows)
        return self.stored[rows, ALL if self.stored.shape[1] == 1 else columns]


def rows_of(sizes: Sequence[int], parts: slice) -> slice:
    """Return the rows of some parts; `sizes` has the rows of each part."""
    first, end, _ = parts.indices(len(sizes))
    return slice(sum(sizes[:first]), sum(sizes[:end]))


def on_gpu(x: torch.Tensor) -> bool:
    """Return whether kernels should multiply these. In the interpreter their many programs would take minutes."""
    return x.is_cuda
