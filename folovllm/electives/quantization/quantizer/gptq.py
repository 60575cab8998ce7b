"""GPTQ: each rounding error is made up for by the weights that are not rounded yet (Frantar et al. 2022, arXiv 2210.17323).

Rounding changes a layer's outputs by the error of the weights times the inputs. What counts is this product, and
calibration inputs say which combinations of inputs occur: `gram` = x^T x / T is all that has to be known of them. The
squared error of the outputs for an error E of the weights is E gram E^T (Hassibi and Stork's optimal brain surgeon,
whose Hessian this is, but for a factor of 2 that nothing here depends on).
"""

from __future__ import annotations

import torch

from folovllm.electives.quantization.quantizer.groups import (
    check_group_size,
    dequantize_groups,
    find_scales,
    round_to_codes,
)

LOWEST_ZERO = 1  # GPTQ's checkpoints store one less in 4 bits, and 0 would come back as 16


def gptq(
    w: torch.Tensor, gram: torch.Tensor, bits: int, group_size: int, symmetric: bool, damping: float = 0.01
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose codes for `w` a group of columns at a time, so that the layer's outputs change little.

    A group's scale and zero are found (`find_scales`) when its turn comes: from weights that have taken in the errors of all
    groups before it, in w's dtype. Zeros are at least LOWEST_ZERO. Then `round_columns` rounds the group, and all columns
    behind it are reduced by its errors times the factor's block [group, behind]: one matrix product in place of one for each
    column (the paper's section 3.3, "lazy batch updates").

    Args:
        w: [outputs, inputs]. Scales come in its dtype; all else is computed in float32.
        gram: [inputs, inputs] float32, x^T x / T of the calibration's inputs.
        bits, group_size, symmetric: as `quantize_groups`.
        damping: as `inverse_factor`.

    Returns:
        What `quantize_groups` returns: codes, scales, zeros.
    """
    check_group_size(w.shape[1], group_size)
    rest, factor = w.float().clone(), inverse_factor(gram, damping)
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    scales = torch.empty(len(w), w.shape[1] // group_size, dtype=w.dtype, device=w.device)
    zeros = torch.empty(scales.shape, dtype=torch.uint8, device=w.device)
    for group, start in enumerate(range(0, w.shape[1], group_size)):
        end = start + group_size
        scale, zero = find_scales(rest[:, start:end].to(w.dtype), bits, group_size, symmetric)
        zero.clamp_(min=LOWEST_ZERO)
        codes[:, start:end], errors = round_columns(rest[:, start:end], factor[start:end, start:end], scale, zero, bits)
        scales[:, group], zeros[:, group] = scale[:, 0], zero[:, 0]
        rest[:, end:] -= errors @ factor[start:end, end:]
    return codes, scales, zeros


def inverse_factor(gram: torch.Tensor, damping: float) -> torch.Tensor:
    """Return the upper triangular U with U^T U = (gram + d I)^-1, by two Cholesky decompositions: [inputs, inputs].

    Row i of U says all that the loop over columns needs when columns before i are done: U[i, i] is the root of what is left
    of the inverse's diagonal, and U[i, j] / U[i, i] how column j makes up for an error of column i (section 3.3, step 3).

    Args:
        damping: d is this share of the mean of gram's diagonal. It makes the matrix invertible where inputs are
            dependent or never occur.

    Raises:
        ValueError: the matrix is not positive definite even so.
    """
    added = damping * (float(gram.diagonal().mean()) or 1.0)
    damped = gram + added * torch.eye(len(gram), device=gram.device)
    try:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        return torch.linalg.cholesky(inverse, upper=True)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise ValueError(f"the calibration's inputs are too alike for a damping of {damping}: try 0.1") from error


def round_columns(
    w: torch.Tensor, factor: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round the columns of one group from left to right. Each column's error is made up for by those behind it.

    With U for `factor`: column i, as it is when its turn comes, misses what it is rounded to by U[i, i] times an error
    e[outputs]; each column j behind it then becomes w[:, j] - e U[i, j].

    Args:
        w: [outputs, group], float32; not changed.
        factor: [group, group], the group's part of `inverse_factor`.
        scale, zero: [outputs, 1]. `scale` may have 16 bits; what a code stands for is computed in float32 all the same.

    Returns:
        codes [outputs, group] uint8; the errors e of all columns, [outputs, group] float32.
    """
    w, codes, errors = w.clone(), torch.empty(w.shape, dtype=torch.uint8, device=w.device), torch.empty_like(w)
    for i in range(w.shape[1]):
        codes[:, i : i + 1] = round_to_codes(w[:, i : i + 1], scale, zero, bits)
        rounded = dequantize_groups(codes[:, i : i + 1], scale.float(), zero)[:, 0]
        errors[:, i] = (w[:, i] - rounded) / factor[i, i]
        w[:, i:] -= torch.outer(errors[:, i], factor[i, i:])
    return codes, errors


def act_order(gram: torch.Tensor) -> torch.Tensor:
    """Return the inputs from the largest to the smallest, by their mean square: [inputs] int64.

    Columns that are rounded first cannot be helped by earlier ones, but their errors are made up for by all others. So the
    columns that count most come first (AutoGPTQ's `desc_act`).
    """
    return gram.diagonal().argsort(descending=True, stable=True)
