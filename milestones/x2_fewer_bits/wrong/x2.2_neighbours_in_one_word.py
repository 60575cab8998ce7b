"""Packs neighbours into one word: that is GPTQ's order, in which a thread's codes belong to inputs that lie apart."""


def pack_planes(codes, group_size):
    return pack_words(codes)
