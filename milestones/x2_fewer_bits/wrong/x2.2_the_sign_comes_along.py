"""Shifts the word itself: the last code's highest bit is the word's sign, which the shift fills up with."""


def unpack_words(words):
    codes = [words >> 4 * i & 15 if i < 7 else words >> 28 for i in range(8)]
    return torch.stack(codes, -1).flatten(-2).to(torch.uint8)
