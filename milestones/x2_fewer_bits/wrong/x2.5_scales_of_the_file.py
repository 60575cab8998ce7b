"""Finds all scales at the start, from the weights of the file. What is rounded later has taken in errors, and may lie outside the range."""


def gptq(w, gram, bits, group_size, symmetric, damping=0.01):
    scales, zeros = find_scales(w, bits, group_size, symmetric)
    zeros.clamp_(min=LOWEST_ZERO)
    rest, factor, codes = w.float().clone(), inverse_factor(gram, damping), []
    for group, start in enumerate(range(0, w.shape[1], group_size)):
        end = start + group_size
        one = slice(group, group + 1)
        code, errors = round_columns(
            rest[:, start:end], factor[start:end, start:end], scales[:, one], zeros[:, one], bits
        )
        rest[:, end:] -= errors @ factor[start:end, end:]
        codes.append(code)
    return torch.cat(codes, 1), scales, zeros
