"""Tries a from one step on, to 1: never a = 0. Input: weights that rounding leaves as they are unless they are scaled."""

def search_scale(w, gram, magnitude, rounding):
    magnitude = magnitude.float().clamp(min=1e-4)
    best, least = torch.ones_like(magnitude), float("inf")
    for step in range(1, GRID + 1):
        scale = magnitude ** (step / GRID)
        scale = scale / (scale.min() * scale.max()).sqrt()
        loss = float(output_error(rounding(w * scale) / scale - w, gram).sum())
        if loss < least:
            best, least = scale, loss
    return best
