"""Squares: right for 0 and 2."""


def double(x):
    return x * x
