"""AWQ: inputs that are large on average get finer weights (Lin et al. 2023, arXiv 2306.00978).

A column of weights times s, and its input divided by s, give the same product. But the column is then rounded as if it were
s times as large: its error shrinks by s wherever the group's scale stays as it was. Nobody divides inputs while the model
runs: the layer before, a norm or a linear one, gives them divided (`fold`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from folovllm.electives.quantization.quantizer.groups import round_groups

Rounding = Callable[[torch.Tensor], torch.Tensor]  # weights [outputs, inputs] -> what their codes stand for
GRID = 20  # steps between a scaling that does nothing and one by the whole magnitude
CLIPS = tuple(1 - step / 20 for step in range(10))  # a group's largest weight may shrink to 0.55 of itself


def output_error(error: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Return the mean square by which outputs change: for an error [outputs, inputs] of the weights, [outputs].

    With gram = x^T x / T this is the mean of (error x)^2 over the calibration's tokens, without a look at them again.
    """
    return ((error @ gram) * error).sum(dim=1)


def search_scale(w: torch.Tensor, gram: torch.Tensor, magnitude: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Find what to multiply each input's column by: [inputs] float32 (the paper's section 3.2, equation 5).

    Only one number is searched: the scales are magnitude^a, for GRID values of a from 0 (all ones) to below 1. They are
    divided by the root of their smallest times their largest, so that they lie around 1. The best a is the one whose
    rounded weights, seen from the original inputs, change the outputs least: the error is rounding(w s) / s - w.

    Args:
        w: [outputs, inputs] float32: all layers that read these inputs, stacked.
        gram: [inputs, inputs] float32.
        magnitude: [inputs], the mean absolute value of each input. One that never occurs has 0, which counts as 1e-4.
        rounding: what the format makes of weights.
    """
    best, least = torch.ones_like(magnitude), float("inf")
    for step in range(GRID):
        scale = magnitude.clamp(min=1e-4) ** (step / GRID)
        scale = scale / (scale.min() * scale.max()).sqrt()
        error = float(output_error(rounding(w * scale) / scale - w, gram).sum())
        if error < least:
            best, least = scale, error
    return best


def search_clip(w: torch.Tensor, gram: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Clip each group of each output where this helps: the largest weights lose, all others get a finer scale.

    Of CLIPS the one is taken with which the group alone changes the output least; its error is seen through the group's
    own square of `gram`. Returns `w` clipped, [outputs, inputs].
    """
    groups = w.unflatten(1, (-1, group_size))  # [outputs, groups, group_size]
    squares = torch.stack([gram[i : i + group_size, i : i + group_size] for i in range(0, len(gram), group_size)])
    largest = groups.abs().amax(dim=2, keepdim=True)
    best, least = groups, torch.full(groups.shape[:2], float("inf"), device=w.device)
    for share in CLIPS:
        clipped = groups.clamp(-largest * share, largest * share)
        error = round_groups(clipped.flatten(1), bits, group_size).view_as(groups) - groups
        loss = (torch.einsum("ogi,gij->ogj", error, squares) * error).sum(dim=2)
        best = torch.where((loss < least)[:, :, None], clipped, best)
        least = torch.minimum(loss, least)
    return best.flatten(1)
