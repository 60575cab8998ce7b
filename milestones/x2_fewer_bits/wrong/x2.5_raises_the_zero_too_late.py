"""Raises a zero of 0 when the codes are chosen already: all numbers of the group come back a step too low."""


def gptq(w, gram, bits, group_size, symmetric, damping=0.01):
    check_group_size(w.shape[1], group_size)
    rest, factor, codes, scales, zeros = w.float().clone(), inverse_factor(gram, damping), [], [], []
    for start in range(0, w.shape[1], group_size):
        end = start + group_size
        scale, zero = find_scales(rest[:, start:end].to(w.dtype), bits, group_size, symmetric)
        code, errors = round_columns(rest[:, start:end], factor[start:end, start:end], scale, zero, bits)
        rest[:, end:] -= errors @ factor[start:end, end:]
        codes.append(code)
        scales.append(scale)
        zeros.append(zero.clamp(min=LOWEST_ZERO))
    return torch.cat(codes, 1), torch.cat(scales, 1), torch.cat(zeros, 1)
