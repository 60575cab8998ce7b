"""One product of complex numbers."""

def rotate(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    z = torch.complex(a, b) * torch.complex(cos, sin)
    return torch.cat((z.real, z.imag), -1).to(x.dtype)
