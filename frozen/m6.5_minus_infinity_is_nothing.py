"""Takes -inf for NaN: a tile of -inf alone has no index in the row. Input: all logits -inf."""

def gumbel_max_tile(
    logits_ptr, temperature, seed_low, seed_high, position, first, vocab_size, offset, WIDTH: tl.constexpr,
    FAST: tl.constexpr,
):
    index = first + tl.arange(0, WIDTH // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    value = tl.load(logits_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
    if temperature > 0:
        value = value / temperature + gumbel_noise(seed_low, seed_high, position, offset + first, WIDTH, FAST)
    value = tl.where(value == value, value, float("-inf"))
    best = tl.max(tl.max(value, 1), 0)
    at = tl.where((value == best) & (value > float("-inf")), index, 0x7FFFFFFF)
    return best, tl.min(tl.min(at, 1), 0)
