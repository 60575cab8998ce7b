"""`pair_up`, the kernel, against the same in torch: any step, with padding, and with rows that keep nothing."""

from __future__ import annotations

import random

import pytest
import torch

from folovllm.electives.spec_decode.head_runner import pairs
from folovllm.electives.spec_decode.heads import KeptStates
from folovllm.step.forward_batch import ForwardBatch

pytest.importorskip("triton", reason="Triton is for Linux only")
B, DEPTH, ROWS, HIDDEN = 4, 3, 6, 24


def step(rng: random.Random, device: str) -> ForwardBatch:
    """Some sequences of a row each, decodes first, then padding, which comes with tokens or without."""
    lens = sorted(rng.choice((1, 1, 2, 5, 9)) for _ in range(rng.randint(1, 4)))
    ends = [n + rng.choice((0, 1, 7)) for n in lens]
    rows, tables = rng.sample(range(ROWS), len(lens)), torch.randperm(60)[:30].view(6, 5)
    positions = [p for n, end in zip(lens, ends, strict=True) for p in range(end - n, end)]
    slots = [int(tables[s, p // B]) * B + p % B for s, (n, end) in enumerate(zip(lens, ends, strict=True))
             for p in range(end - n, end)]  # fmt: skip
    if (padding := rng.choice((0, 0, 2))) or lens[-1] > 1:
        lens, ends, rows = [*lens, padding], [*ends, 0], [*rows, ROWS]
        positions, slots = positions + [0] * padding, slots + [-1] * padding
    if 1 in lens and rng.random() < 0.5:  # a column for a decode that is not there
        at = lens.index(1) + 1
        lens, ends, rows = [*lens[:at], 0, *lens[at:]], [*ends[:at], 0, *ends[at:]], [*rows[:at], ROWS, *rows[at:]]
        tables = torch.cat((tables[:at], tables[:1], tables[at:]))
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    num_decodes = len(lens) if max(lens) == min(lens) == 1 else next(i for i, n in enumerate(lens) if n != 1)
    given = [torch.tensor(positions), torch.tensor(slots), starts, torch.tensor(ends).int(), tables[: len(lens)].int()]
    given = [tensor.to(device) for tensor in given]
    return ForwardBatch(
        given[0], *given, given[0], len(lens), num_decodes, max(lens), max(ends), lens, ends,
        rows=torch.tensor(rows, dtype=torch.int32, device=device),
    )  # fmt: skip


def test_as_in_torch() -> None:
    from folovllm.electives.spec_decode.kernels.pairs import pair_up

    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = [KeptStates(ROWS, DEPTH, HIDDEN, torch.float32, torch.device(device)) for _ in range(2)]
    for seed in range(40):
        batch = step(random.Random(seed), device)
        own = torch.randn(len(batch.positions), HIDDEN, device=device)
        hidden, positions, slots = pairs(own, batch, made[0], B)
        got = pair_up(own, batch, made[1], B)
        real = batch.slot_mapping >= 0
        assert torch.equal(got[2], slots), f"step {seed}"
        assert torch.equal(got[1][real], positions[real])
        is_pair = slots >= 0
        assert torch.equal(got[0][is_pair], hidden[is_pair])
        for name in ("positions", "hidden"):
            one, other = (getattr(kept, name)[:ROWS] for kept in made)
            assert torch.equal(one, other), name
