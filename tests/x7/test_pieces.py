"""The kernel that gathers and scatters blocks, beside torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux only")

from folovllm.electives.kv_transfer.kernels.pieces import move_pieces
from tests.m4.cases import DEVICE


@pytest.mark.parametrize(("pieces", "words", "count"), [(2, 64, 1), (4, 2050, 3), (6, 2048, 5)])
def test_a_block_is_a_line_and_comes_back(pieces: int, words: int, count: int) -> None:
    cache = torch.randint(-(2**31), 2**31 - 1, (pieces, 9, words), dtype=torch.int32, device=DEVICE)
    ids = torch.randperm(9)[:count].to(DEVICE, torch.int32)
    buffer = torch.full((count, pieces, words), -1, dtype=torch.int32, device=DEVICE)
    move_pieces(cache, buffer, ids, to_cache=False)
    assert torch.equal(buffer, cache[:, ids.long()].transpose(0, 1))
    target, others = torch.full_like(cache, 7), [i for i in range(9) if i not in ids.tolist()]
    move_pieces(target, buffer, ids, to_cache=True)
    assert torch.equal(target[:, ids.long()], cache[:, ids.long()])
    assert (target[:, others] == 7).all()
