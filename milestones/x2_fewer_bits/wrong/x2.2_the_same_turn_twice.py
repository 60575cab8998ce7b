"""Unpacks with the shape of packing: [8, n] where the codes come as [n, 8]."""


def unpack_planes(words, group_size):
    columns = unpack_words(words).unflatten(1, (-1, PER_WORD, group_size // PER_WORD))
    return columns.transpose(2, 3).flatten(1)
