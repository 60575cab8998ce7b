"""Does not pass a group's errors on to the columns behind it: only neighbours in the group make up for them."""


def gptq(w, gram, bits, group_size, symmetric, damping=0.01):
    check_group_size(w.shape[1], group_size)
    factor, codes, scales, zeros = inverse_factor(gram, damping), [], [], []
    for start in range(0, w.shape[1], group_size):
        end = start + group_size
        scale, zero = find_scales(w[:, start:end], bits, group_size, symmetric)
        zero.clamp_(min=LOWEST_ZERO)
        code, _ = round_columns(w[:, start:end].float(), factor[start:end, start:end], scale, zero, bits)
        codes.append(code)
        scales.append(scale)
        zeros.append(zero)
    return torch.cat(codes, 1), torch.cat(scales, 1), torch.cat(zeros, 1)
