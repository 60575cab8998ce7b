"""The state after the tokens is a view of the inputs that are joined, in their dtype float32. Input: state in bfloat16."""

def convolve(x, state, weight):
    k = weight.shape[1]
    inputs = torch.cat([state.float(), x.float()], -2)
    n = x.shape[-2]
    y = sum(weight[:, j].float() * inputs[..., j : j + n, :] for j in range(k))
    return torch.nn.functional.silu(y), inputs[..., inputs.shape[-2] - (k - 1) :, :]
