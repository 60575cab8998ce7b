"""`pair_up` and `start_chain`, the kernels, against the same in torch: any step, with padding, and with rows that keep nothing."""

import random

import pytest
import torch

from folovllm.electives.spec_decode import pairing
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
    from folovllm.electives.spec_decode.kernels import pairs

    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = [KeptStates(ROWS, DEPTH, HIDDEN, torch.float32, torch.device(device)) for _ in range(2)]
    for seed in range(40):
        batch = step(random.Random(seed), device)
        own = torch.randn(len(batch.positions), HIDDEN, device=device)
        hidden, positions, slots = pairing.pair_up(own, batch, made[0], B)
        got = pairs.pair_up(own, batch, made[1], B)
        real = batch.slot_mapping >= 0
        assert torch.equal(got[2], slots), f"step {seed}"
        assert torch.equal(got[1][real], positions[real])
        is_pair = slots >= 0
        assert torch.equal(got[0][is_pair], hidden[is_pair])
        for name in ("positions", "hidden"):
            one, other = (getattr(kept, name)[:ROWS] for kept in made)
            assert torch.equal(one, other), name


@pytest.mark.parametrize("block_size", [1, 4])
def test_what_a_chain_begins_with_as_in_torch(block_size: int) -> None:
    """Tables that end, rows without spare blocks for all of the chain, and columns of padding."""
    from folovllm.electives.spec_decode.kernels import pairs

    device, rng = "cuda" if torch.cuda.is_available() else "cpu", random.Random(0)
    kept = KeptStates(ROWS, DEPTH, HIDDEN, torch.float32, torch.device(device))
    kept.hidden.normal_()
    for k in (1, 2, 3, 5):
        count = rng.randint(1, ROWS)
        newest = torch.tensor([rng.choice((1, 2, 4, 7, 8, 19)) for _ in range(count)])
        is_real = torch.tensor([rng.random() < 0.8 for _ in range(count)])
        lens, rows = torch.where(is_real, newest + 1, 0).int(), torch.tensor(rng.sample(range(ROWS), count)).int()
        tables = torch.randint(60, (count, 20 // block_size), dtype=torch.int32)
        given = [tensor.to(device) for tensor in (newest, newest, newest, newest, lens, tables, newest)]
        given[1] = torch.where(is_real.to(device), given[1], 0)
        batch = ForwardBatch(*given, count, count, 1, 20, [1] * count, [], rows=rows.to(device))
        spare = 64, -(-k // block_size)
        wanted, got = (module.start_chain(batch, k, kept, block_size, *spare) for module in (pairing, pairs))
        names = "tables", "positions", "slots", "lengths", "hidden states"
        for name, one, other in zip(names, wanted, got, strict=True):
            kept_by = slice(None) if name in ("slots", "lengths") else is_real.to(device)
            one, other = (t[kept_by] if name in ("tables", "hidden states") else t[:, kept_by] for t in (one, other))
            assert torch.equal(one, other), f"{name}, k {k}"
