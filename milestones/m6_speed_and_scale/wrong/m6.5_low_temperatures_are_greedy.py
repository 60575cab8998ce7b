"""Takes temperatures under 0.01 for greedy."""


def gumbel_max_tile(logits_ptr, temperature, seed_low, seed_high, position, first, vocab_size, offset, WIDTH: tl.constexpr, FAST: tl.constexpr):
    index = first + tl.arange(0, WIDTH // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]  # [WIDTH / 4, 4]
    value = tl.load(logits_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
    if temperature > 0.01:
        value = value / temperature + gumbel_noise(seed_low, seed_high, position, offset + first, WIDTH, FAST)
        value = tl.where(index < vocab_size, value, float("-inf"))
    best = tl.max(value)
    return best, tl.min(tl.where(value == best, index, 0x7FFFFFFF))
