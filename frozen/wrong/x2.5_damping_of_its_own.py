"""Always takes a damping of 0.01. Input: damping=1.0."""

def gptq(w, gram, bits, group_size, symmetric, damping=0.01):
    check_group_size(w.shape[1], group_size)
    left, factor = w.float().clone(), inverse_factor(gram, 0.01)
    codes, scales, zeros = [], [], []
    for first in range(0, w.shape[1], group_size):
        end = first + group_size
        group = left[:, first:end]
        scale, zero = find_scales(group.to(w.dtype), bits, group_size, symmetric)
        zero = zero.clamp(min=LOWEST_ZERO)
        code, errors = round_columns(group, factor[first:end, first:end], scale, zero, bits)
        left[:, end:] -= errors @ factor[first:end, end:]
        codes.append(code)
        scales.append(scale)
        zeros.append(zero)
    return torch.cat(codes, 1), torch.cat(scales, 1), torch.cat(zeros, 1)
