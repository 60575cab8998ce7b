"""Products are rounded to the dtype of x before they are added. Input: bfloat16, pairs whose products nearly cancel."""

def rotate(x, cos, sin):
    a, b = x.float().chunk(2, dim=-1)
    ac, bs, bc, as_ = ((p).to(x.dtype) for p in (a * cos, b * sin, b * cos, a * sin))
    return torch.cat((ac - bs, bc + as_), dim=-1)
