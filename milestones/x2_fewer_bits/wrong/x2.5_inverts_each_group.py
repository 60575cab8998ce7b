"""Factors each group's own square of the matrix, in place of taking the square of the factor: what columns behind the group could make up for is then unknown."""


def gptq(w, gram, bits, group_size, symmetric, damping=0.01):
    check_group_size(w.shape[1], group_size)
    rest, factor, codes, scales, zeros = w.float().clone(), inverse_factor(gram, damping), [], [], []
    for start in range(0, w.shape[1], group_size):
        end = start + group_size
        scale, zero = find_scales(rest[:, start:end].to(w.dtype), bits, group_size, symmetric)
        zero.clamp_(min=LOWEST_ZERO)
        own = inverse_factor(gram[start:end, start:end], damping)
        code, errors = round_columns(rest[:, start:end], own, scale, zero, bits)
        rest[:, end:] -= errors @ factor[start:end, end:]
        codes.append(code)
        scales.append(scale)
        zeros.append(zero)
    return torch.cat(codes, 1), torch.cat(scales, 1), torch.cat(zeros, 1)
