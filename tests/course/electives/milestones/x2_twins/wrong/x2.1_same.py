"""Nobody has a twin."""


def twins(things):
    return things
