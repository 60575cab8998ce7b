"""The mean is over dimension 1, which is the last one only of a matrix. Input: x [2, 3, 8]."""

class RMSNorm:
    def forward(self, x, residual=None):
        if residual is not None:
            x = x + residual
        f = x.float()
        f = f / (f.pow(2).mean(1, keepdim=True) + self.eps).sqrt()
        normed = f.to(x.dtype) * self.weight
        return normed if residual is None else (normed, x)
