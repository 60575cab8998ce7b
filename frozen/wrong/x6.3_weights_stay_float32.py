"""The weights are not rounded to the dtype of the values. Input: bfloat16 values."""

def attend_in_tiles(query, key, value, positions, scale):
    n, heads, rows, _ = query.shape
    top = torch.full((n, heads, rows, 1), -torch.inf, device=query.device)
    total = torch.zeros_like(top)
    acc = torch.zeros(n, heads, rows, value.shape[-1], device=query.device)
    for first in range(0, key.shape[2], CONTEXT):
        k, v = key[:, :, first : first + CONTEXT], value[:, :, first : first + CONTEXT]
        scores = (query @ k.transpose(2, 3)).float() * scale
        seen = torch.arange(first, first + CONTEXT, device=query.device) <= positions[:, None, :, None]
        scores = scores.masked_fill(~seen, -torch.inf)
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        shrink, weights = (top - new).exp(), (scores - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        acc = acc * shrink + weights @ v.float()
        top = new
    return (acc / total).to(value.dtype)
