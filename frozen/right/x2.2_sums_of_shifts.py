"""Sums of shifted codes in 64 bits, which wrap into 32."""

def pack_words(codes):
    parts = codes.long().unflatten(-1, (-1, PER_WORD))
    shifts = torch.arange(0, 32, 4, device=codes.device)
    total = (parts << shifts).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)

def unpack_words(words):
    shifts = torch.arange(0, 32, 4, device=words.device)
    return ((words.long()[..., None] >> shifts) & 15).to(torch.uint8).flatten(-2)
