"""The experts of a layer in two stacks, and what a stack of any weights must do: plain ones here, quantized ones in X2."""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn

from folovllm.layers.activation import SiluAndMul
from folovllm.layers.fusable import ALL, FusablePlain
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.linear import LinearBase, LinearMethod


class StackedLinearMethod(Protocol):
    """What experts ask of the linear method of their stacks, beside what any layer does."""

    def check_stack(self, layer: LinearBase) -> None:
        """Raise ValueError unless the parts of `layer` can be used one by one. The message completes a sentence."""

    def dequantized(self, layer: LinearBase, dtype: torch.dtype, parts: slice = ...) -> torch.Tensor:
        """W [outputs, inputs] of some of the `output_sizes` in `dtype`, a copy or a view. Works after `check_stack`."""

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


class PlainStack(FusablePlain):
    """Plain weights as a `StackedLinearMethod`."""

    def check_stack(self, layer: LinearBase) -> None:
        """Any stack can be used."""

    def dequantized(self, layer: LinearBase, dtype: torch.dtype, parts: slice = ALL) -> torch.Tensor:
        return layer.weight.view(len(layer.output_sizes), -1, layer.input_size)[parts].flatten(0, 1)

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
        from folovllm.electives.moe.kernels.grouped_linear import grouped_linear

        return grouped_linear(x, layer.weight.view(num_experts, -1, layer.input_size), order, starts, gated, out)


PLAIN_STACK = PlainStack()


class ExpertStack(LinearBase):
    """One projection of all experts, as parts of one merged layer: the weights of one expert after those of another.

    So a linear method creates, fills, cuts and arranges it as any layer, a checkpoint's names lead to each expert, and a kernel
    finds each in it.
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


class Experts(nn.Module):
    """The experts that this rank holds, by their numbers; their weights lie in two stacks, [E, 2I, H] and [E, H, I]."""

    def __init__(
        self,
        held: range,
        num_experts: int,
        hidden: int,
        inner: int,
        linear_methods: tuple[LinearMethod, LinearMethod] = (PLAIN_STACK, PLAIN_STACK),
    ) -> None:
        """`linear_methods` are those of gate and up, and of down."""
        super().__init__()
        self.num_held, self.is_part = len(held), len(held) < num_experts
        self.gate_ups = ExpertStack(hidden, [inner] * (2 * len(held)), linear_methods[0])
        self.downs = ExpertStack(inner, [hidden] * len(held), linear_methods[1])
        self.act_fn = SiluAndMul()

    def forward(self, x: torch.Tensor, order: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Run the experts that have tokens one after the other: x [T, H] -> the output for each pair (token, expert) [T * k, H].

        `order` and `starts` are those of `sort_by_expert`. The output for an expert of another rank is zeros.
        """
        answers, top_k = x.new_zeros(len(order), x.shape[1]), len(order) // max(1, len(x))
        for e, (first, end) in enumerate(pairwise(starts.tolist())):
            if first < end:
                pairs = order[first:end]
                answers[pairs] = self.run_expert(e, x[pairs // top_k])
        return answers

    def run_expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        """Run expert `e`, counted from this rank's first: [n, H] -> [n, H]."""
        gate_up = self.gate_ups.stacked.dequantized(self.gate_ups, x.dtype, slice(2 * e, 2 * e + 2))
        down = self.downs.stacked.dequantized(self.downs, x.dtype, slice(e, e + 1))
        return F.linear(self.act_fn(F.linear(x, gate_up)), down)


class GroupedExperts(Experts):
    """All experts in two kernels, which find out on the device who has how many tokens."""

    def forward(self, x: torch.Tensor, order: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        gate_ups, downs = self.gate_ups, self.downs
        hidden = gate_ups.stacked.grouped_product(gate_ups, x.contiguous(), self.num_held, order, starts, gated=True)
        answers = x.new_zeros(len(order), x.shape[1]) if self.is_part else None
        return downs.stacked.grouped_product(downs, hidden, self.num_held, order, starts, out=answers)


def expert_linear_methods(layers: LayerSet, num_experts: int) -> tuple[LinearMethod, LinearMethod]:
    """Return the linear methods of gate and up, and of down, which all experts of a layer share.

    Raises ValueError if experts have different ones.
    """
    names = [[f"mlp.experts.{e}.{name}" for name in ("gate_up_proj", "down_proj")] for e in range(num_experts)]
    (gate_up, down), *others = {tuple(map(layers.linear_method_of, both)) for both in names}
    is_plain = gate_up is layers.linear_method
    if others or is_plain != (down is layers.linear_method):
        raise ValueError(
            "all experts of a layer must be quantized in one way, or none of them: one product takes them all"
        )
    return (PLAIN_STACK, PLAIN_STACK) if is_plain else (gate_up, down)
