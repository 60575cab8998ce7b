"""Tries a = 1, too: GRID values from 0 on end below 1."""


def search_scale(w, gram, magnitude, rounding):
    best, least = torch.ones_like(magnitude), float("inf")
    for step in range(GRID + 1):
        scale = magnitude.clamp(min=1e-4) ** (step / GRID)
        scale = scale / (scale.min() * scale.max()).sqrt()
        error = float(output_error(rounding(w * scale) / scale - w, gram).sum())
        if error < least:
            best, least = scale, error
    return best
