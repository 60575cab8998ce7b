"""The twins stand far apart."""


def twins(things):
    return things * 2
