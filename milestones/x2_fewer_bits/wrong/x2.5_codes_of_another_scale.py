"""Chooses codes with scales of 32 bits and returns them in 16: the codes belong to scales that nobody keeps."""


def gptq(w, gram, bits, group_size, symmetric, damping=0.01):
    check_group_size(w.shape[1], group_size)
    rest, factor, codes, scales, zeros = w.float().clone(), inverse_factor(gram, damping), [], [], []
    for start in range(0, w.shape[1], group_size):
        end = start + group_size
        scale, zero = find_scales(rest[:, start:end], bits, group_size, symmetric)
        zero.clamp_(min=LOWEST_ZERO)
        code, errors = round_columns(rest[:, start:end], factor[start:end, start:end], scale, zero, bits)
        rest[:, end:] -= errors @ factor[start:end, end:]
        codes.append(code)
        scales.append(scale.to(w.dtype))
        zeros.append(zero)
    return torch.cat(codes, 1), torch.cat(scales, 1), torch.cat(zeros, 1)
