"""The noise is that of ids from `offset` on in every tile: `first` is not counted. Input: a vocabulary of two tiles, temperature 1."""

def gumbel_max_tile(
    logits_ptr, temperature, seed_low, seed_high, position, first, vocab_size, offset, WIDTH: tl.constexpr,
    FAST: tl.constexpr,
):
    local = tl.arange(0, WIDTH // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    index = first + local
    value = tl.load(logits_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
    if temperature > 0:
        value = value / temperature + gumbel_noise(seed_low, seed_high, position, offset, WIDTH, FAST)
    there = (index < vocab_size) & (value == value)
    value = tl.where(there, value, float("-inf"))
    best = tl.max(tl.max(value, 1), 0)
    index = tl.where(there, index, first + WIDTH + vocab_size)
    at = tl.min(tl.min(tl.where(value == best, index, first + WIDTH + vocab_size), 1), 0)
    return best, at
