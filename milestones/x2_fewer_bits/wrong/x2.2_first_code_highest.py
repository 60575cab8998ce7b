"""Puts the first code of each pair into the upper half of the byte, as a number is written."""


def pack_words(codes):
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (low << 4 | high).contiguous().view(torch.int32)
