"""Cuts the whole row into eight planes, and not each group: a word's codes then need eight scales."""


def pack_planes(codes, group_size):
    planes = codes.unflatten(1, (PER_WORD, -1))
    return pack_words(planes.transpose(1, 2).flatten(1))
