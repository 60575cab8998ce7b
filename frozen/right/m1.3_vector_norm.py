"""The mean square from the norm of the vector."""

class RMSNorm:
    def forward(self, x, residual=None):
        total = x if residual is None else x + residual
        wide = total.to(torch.float32)
        square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True) ** 2 / x.shape[-1]
        normed = self.weight * torch.div(wide, torch.sqrt(square + self.eps)).to(x.dtype)
        if residual is None:
            return normed
        return normed, total
