"""Converts to uint8 before it clamps: 256 becomes 0. Input: 8 bits, symmetric, a group whose largest number is positive."""

def round_to_codes(w, scales, zeros, bits):
    group_size = w.shape[1] // scales.shape[1]
    codes = (w.float() / spread(scales.float(), group_size)).round() + spread(zeros.float(), group_size)
    return codes.to(torch.int32).to(torch.uint8).clamp(0, 2**bits - 1)
