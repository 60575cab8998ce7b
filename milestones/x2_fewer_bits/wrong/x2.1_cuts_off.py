"""Cuts fractions off where it should round: every number moves down by up to a whole step."""


def round_to_codes(w, scales, zeros, bits):
    w, group_size = w.float(), w.shape[1] // scales.shape[1]
    steps = w / spread(scales.float(), group_size)
    return (steps + spread(zeros, group_size)).clamp(0, 2**bits - 1).to(torch.uint8)
