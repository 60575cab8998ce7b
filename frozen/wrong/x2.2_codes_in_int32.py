"""Codes come back in int32, not uint8. Input: any words."""

def unpack_words(words):
    return torch.stack([words >> 4 * i & 15 for i in range(PER_WORD)], dim=-1).flatten(-2)
