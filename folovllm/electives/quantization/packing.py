"""Eight 4-bit codes in an int32: the orders that checkpoints have them in, and our own.

Everywhere here `codes` is [outputs, inputs] uint8, each below 16, as `quantizer.groups` makes them. Code i of a word lies
in its bits 4 i to 4 i + 3; what differs is which eight codes share a word, and in which order.

Our own order is made for the kernels. Take a group of 128 inputs: its 16 words are a column of codes 0 to 15 in their
lowest bits, then codes 16 to 31, and so on: word j has codes j, 16 + j, 32 + j, ... So code i of neighbouring words
belongs to neighbouring inputs, which are read together; and all of a word is in one group, and takes one scale.
"""

from __future__ import annotations

import torch

PER_WORD = 8
# Code i of AWQ's word is that of output AWQ_ORDER[i]: kernels unpack 16 bits apart.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_words(codes: torch.Tensor) -> torch.Tensor:
    """[..., n] codes -> [..., n / 8] int32, neighbours in one word, the first in its lowest bits.

    Two codes are a byte, and four bytes are a word, whose lowest comes first on every machine that runs this.
    """
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (low | high << 4).contiguous().view(torch.int32)


def unpack_words(words: torch.Tensor) -> torch.Tensor:
    """[..., n] int32 -> [..., 8 n] codes: the inverse of `pack_words`."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)


def pack_planes(codes: torch.Tensor, group_size: int) -> torch.Tensor:
    """Our own order, [outputs, inputs / 8]: word j of a group has its codes j, n + j, 2 n + j, ... where n is group_size / 8."""
    planes = codes.unflatten(1, (-1, PER_WORD, group_size // PER_WORD))  # [outputs, groups, 8, n]
    return pack_words(planes.transpose(2, 3).flatten(1))


def unpack_planes(words: torch.Tensor, group_size: int) -> torch.Tensor:
    """[outputs, inputs / 8] in our own order -> codes [outputs, inputs]."""
    columns = unpack_words(words).unflatten(1, (-1, group_size // PER_WORD, PER_WORD))  # [outputs, groups, n, 8]
    return columns.transpose(2, 3).flatten(1)


def pack_gptq(codes: torch.Tensor) -> torch.Tensor:
    """GPTQ's `qweight`, [inputs / 8, outputs]: a word has eight neighbouring inputs of one output."""
    return pack_words(codes).t().contiguous()


def unpack_gptq(words: torch.Tensor) -> torch.Tensor:
    """[inputs / 8, outputs] -> codes [outputs, inputs]."""
    return unpack_words(words.t())


def pack_gptq_zeros(zeros: torch.Tensor) -> torch.Tensor:
    """GPTQ's `qzeros`, [groups, outputs / 8], from zeros [outputs, groups]: the first version stores one less."""
    return pack_words((zeros.t() - 1) & 15)


def unpack_gptq_zeros(qzeros: torch.Tensor, one_less: bool = True) -> torch.Tensor:
    """[groups, outputs / 8] -> zeros [outputs, groups], which may be stored less one; 0 less one is 15."""
    return (unpack_words(qzeros).t() + int(one_less)) & 15


def pack_awq(codes: torch.Tensor) -> torch.Tensor:
    """AWQ's `qweight`, [inputs, outputs / 8], and its `qzeros` from zeros [outputs, groups]: eight neighbouring outputs."""
    outputs = codes.t().unflatten(1, (-1, PER_WORD))
    return pack_words(outputs[..., list(AWQ_ORDER)].flatten(1))


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """[inputs, outputs / 8] -> codes [outputs, inputs]; of `qzeros` [groups, outputs / 8] -> zeros [outputs, groups].

    Words are turned over before they are unpacked, since codes take twice their room.
    """
    turned = words.t().contiguous()  # [outputs / 8, inputs]
    codes = torch.empty(len(turned), PER_WORD, turned.shape[1], dtype=torch.uint8, device=words.device)
    for i, output in enumerate(AWQ_ORDER):
        codes[:, output] = turned >> 4 * i & 15
    return codes.flatten(0, 1)
