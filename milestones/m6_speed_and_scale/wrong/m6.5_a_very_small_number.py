"""A small number instead of -inf where no token is: there are smaller logits."""


def gumbel_max_tile(
    logits_ptr, temperature, seed_low, seed_high, position, first, vocab_size, offset, WIDTH: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    index = first + tl.arange(0, WIDTH // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]  # [WIDTH / 4, 4]
    value = tl.load(logits_ptr + index, mask=index < vocab_size, other=-1e9).to(tl.float32)
    if temperature > 0:
        value = value / temperature + gumbel_noise(seed_low, seed_high, position, offset + first, WIDTH, FAST)
        value = tl.where(index < vocab_size, value, -1e9)
    best = tl.max(value)
    return best, tl.min(tl.where(value == best, index, 0x7FFFFFFF))
