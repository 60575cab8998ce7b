"""SiLU of each term. Input: two inputs of different sign, weight [[1, 1]]."""

def convolve(x, state, weight):
    k, n = weight.shape[1], x.shape[-2]
    inputs = torch.cat([state.float(), x.float()], -2)
    y = sum(torch.nn.functional.silu(weight[:, j].float() * inputs[..., j : j + n, :]) for j in range(k))
    return y, inputs[..., inputs.shape[-2] - (k - 1) :, :].to(state.dtype)
