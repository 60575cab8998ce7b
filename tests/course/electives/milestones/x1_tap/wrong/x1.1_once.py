"""Takes one thing."""


def drain(pool):
    return [pool.take()]
