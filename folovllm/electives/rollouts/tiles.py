"""Work in tiles of one size, so that the result of a row does not depend on how many other rows there are.

A library chooses a kernel by the shape of its input, and kernels add in different orders. On a CPU a product of 1, 2 or 8 rows
differs in its last bits from the same rows in a product of 64; on a GPU a sum over a row may be split by the number of rows.
With one shape there is one kernel (He et al. 2025, "Defeating Nondeterminism in LLM Inference").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

ROWS = 32  # tokens of a product or a norm. Fewer make a CPU's large products slower; more, a single decode

Compute = Callable[..., Any]


def in_tiles(function: Compute, rows: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Return `function(rows, *others)`, computed over `ROWS` of `rows` [T, ...] at a time; the last tile is padded with zeros.

    `function` must treat rows independently. Under autograd the result has gradients (`PlainBackward`).
    """

    def tiled(rows: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        count = len(rows)
        padded = F.pad(rows, [0, 0] * (rows.dim() - 1) + [0, -count % ROWS])
        return torch.cat([function(tile, *others) for tile in padded.split(ROWS)])[:count]

    result: torch.Tensor = with_plain_backward(tiled, function, rows, *others)
    return result


def with_plain_backward(forward: Compute, plain: Compute, *tensors: torch.Tensor) -> Any:
    """Return `forward(*tensors)`, one tensor or several; its gradients, if somebody wants them, are those of `plain`.

    `plain` is the same function as torch computes it, in one piece.
    """
    if not torch.is_grad_enabled():
        return forward(*tensors)
    return PlainBackward.apply(forward, plain, *tensors)  # type: ignore[no-untyped-call]


class PlainBackward(torch.autograd.Function):
    """Goes forward by one function, and back by the gradients of another, which is fast: gradients need not be the engine's bits.

    The backward pass computes `plain` once more, so only the inputs are kept.
    """

    @staticmethod
    def forward(ctx: Any, forward: Compute, plain: Compute, *tensors: torch.Tensor) -> Any:
        ctx.plain = plain
        ctx.save_for_backward(*tensors)
        return forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            result = ctx.plain(*inputs)
        return None, None, *torch.autograd.grad(result, inputs, gradients)
