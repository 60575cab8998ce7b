"""Clamps x and not the product: of a number that only the factor brings into the range a part is cut off."""


def encode(x, factor):
    return (x.float().clamp(-LARGEST, LARGEST) * factor).clamp(-LARGEST, LARGEST).to(FP8)
