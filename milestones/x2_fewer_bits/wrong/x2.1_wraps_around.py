"""Does not hold codes between the ends: the largest number gets a code that has no place in so few bits."""


def round_to_codes(w, scales, zeros, bits):
    w, group_size = w.float(), w.shape[1] // scales.shape[1]
    steps = (w / spread(scales.float(), group_size)).round()
    return (steps + spread(zeros, group_size)).to(torch.int32).remainder(2**bits).to(torch.uint8)
