"""Zeros beyond the vocabulary: with noise they can win."""


def gumbel_max_tile(
    logits_ptr, temperature, seed_low, seed_high, position, first, vocab_size, offset, WIDTH: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    index = first + tl.arange(0, WIDTH // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]  # [WIDTH / 4, 4]
    value = tl.load(logits_ptr + index, mask=index < vocab_size, other=0.0).to(tl.float32)
    if temperature > 0:
        value = value / temperature + gumbel_noise(seed_low, seed_high, position, offset + first, WIDTH, FAST)
    best = tl.max(value)
    return best, tl.min(tl.where(value == best, index, 0x7FFFFFFF))
