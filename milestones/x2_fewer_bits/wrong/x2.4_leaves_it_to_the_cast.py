"""Does not clamp: what a cast makes of 1,000 depends on the version of torch, and in some it is NaN."""


def encode(x, factor):
    return (x.float() * factor).to(FP8)
