"""Adds the generation to the salt's hash: another salt of another generation has the same sum."""


def generation_root(salt, generation):
    return (salt + generation) % (1 << 64)
