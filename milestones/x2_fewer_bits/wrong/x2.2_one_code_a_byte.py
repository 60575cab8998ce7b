"""Takes four codes for a word: a byte holds two."""


def pack_words(codes):
    return codes.contiguous().view(torch.int32)
