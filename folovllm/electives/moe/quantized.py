"""Experts whose weights are quantized, by the linear methods of `layers.linear_method`, as far as these allow it."""

from __future__ import annotations

from functools import partial
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn

from folovllm.electives.moe.layers import run_one_by_one
from folovllm.layers.activation import SiluAndMul
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.linear import LinearBase, LinearMethod


class StackedLinearMethod(Protocol):
    """What experts ask of the linear method of their stacks, beside what any layer does."""

    def check_stack(self, layer: LinearBase) -> None:
        """Raise ValueError unless the parts of `layer` can be used one by one. The message completes a sentence."""

    def dequantized(self, layer: LinearBase, dtype: torch.dtype, parts: slice = ...) -> torch.Tensor:
        """W [outputs, inputs] of some of the `output_sizes` in `dtype`, a copy. Works after `check_stack`."""

    def grouped_product(
        self,
        layer: LinearBase,
        x: torch.Tensor,
        num_experts: int,
        order: torch.Tensor,
        starts: torch.Tensor,
        gated: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply each token by the matrices of its experts, which are the parts of `layer`. Works after `check_stack`.

        Args:
            x: [T, inputs], or [pairs, inputs] where each (token, expert) pair has a row of its own.
            order, starts: the pairs sorted by expert, and where each expert's begin (`moe.layers.sort_by_expert`).
            gated: an expert is two parts, gate and up; the result is silu(gate) * up.
            out: [pairs, outputs] to write to. Rows of pairs whose expert is elsewhere stay as they are.

        Returns:
            [pairs, outputs], in the order of pairs, not of experts.
        """


class ExpertStack(LinearBase):
    """One projection of all experts, as parts of one merged layer: codes and scales of one expert after those of another.

    So a linear method creates, fills, cuts and arranges it as any layer, and a kernel finds each expert in it.
    """

    is_stack = True

    def __init__(self, input_size: int, output_sizes: list[int], linear_method: LinearMethod) -> None:
        super().__init__(input_size, output_sizes, linear_method=linear_method)
        try:
            self.stacked.check_stack(self)
        except ValueError as error:
            raise ValueError(f"experts with such weights are not supported: {error}") from error

    @property
    def stacked(self) -> StackedLinearMethod:
        """The linear method, as experts see it."""
        return cast(StackedLinearMethod, self.linear_method)


class QuantizedExperts(nn.Module):
    """Stands in the place of `Experts`: the experts that this rank holds, in two stacks."""

    def __init__(
        self, linear_methods: tuple[LinearMethod, LinearMethod], held: range, num_experts: int, hidden: int, inner: int
    ) -> None:
        """`linear_methods` are those of gate and up, and of down."""
        super().__init__()
        self.num_held, self.is_part = len(held), len(held) < num_experts
        self.gate_ups = ExpertStack(hidden, [inner] * (2 * len(held)), linear_methods[0])
        self.downs = ExpertStack(inner, [hidden] * len(held), linear_methods[1])
        self.act_fn = SiluAndMul()

    def forward(self, x: torch.Tensor, order: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Run one expert after the other; each is unpacked when it has tokens."""
        return run_one_by_one([partial(self.run_expert, e) for e in range(self.num_held)], x, order, starts)

    def run_expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        """Run expert `e`, counted from this rank's first: [n, H] -> [n, H]."""
        gate_up = self.gate_ups.stacked.dequantized(self.gate_ups, x.dtype, slice(2 * e, 2 * e + 2))
        down = self.downs.stacked.dequantized(self.downs, x.dtype, slice(e, e + 1))
        return F.linear(self.act_fn(F.linear(x, gate_up)), down)


class GroupedQuantizedExperts(QuantizedExperts):
    """All experts in two kernels, as `GroupedExperts`."""

    def forward(self, x: torch.Tensor, order: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        gate_ups, downs = self.gate_ups, self.downs
        hidden = gate_ups.stacked.grouped_product(gate_ups, x.contiguous(), self.num_held, order, starts, gated=True)
        answers = x.new_zeros(len(order), x.shape[1]) if self.is_part else None
        return downs.stacked.grouped_product(downs, hidden, self.num_held, order, starts, out=answers)


def expert_linear_methods(layers: LayerSet, num_experts: int) -> tuple[LinearMethod, LinearMethod] | None:
    """Return the linear methods of gate and up, and of down, which all experts of a layer share; None if they are not quantized.

    Raises ValueError if experts have different ones.
    """
    names = [[f"mlp.experts.{e}.{name}" for name in ("gate_up_proj", "down_proj")] for e in range(num_experts)]
    (gate_up, down), *others = {tuple(map(layers.linear_method_of, both)) for both in names}
    is_plain = gate_up is layers.linear_method
    if others or is_plain != (down is layers.linear_method):
        raise ValueError(
            "all experts of a layer must be quantized in one way, or none of them: one product takes them all"
        )
    return None if is_plain else (gate_up, down)
