"""x5.3: the short convolution and its state."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from folovllm.electives.hybrid.short_conv import convolve
from tests.tiny import worked_case


def test_a_worked_case() -> None:
    """One channel, K = 3. silu(0) is 0, so numbers are chosen whose sums are 0 or large, where silu(x) is x."""
    x, state, weight = torch.tensor([[100.0], [-40.0]]), torch.tensor([[20.0], [60.0]]), torch.tensor([[1.0, 2.0, 3.0]])
    out, after = convolve(x, state, weight)
    got = {"out": [round(y, 3) for y in out.flatten().tolist()], "state": after.flatten().tolist()}
    says = "20 * 1 + 60 * 2 + 100 * 3 is 440; 60 * 1 + 100 * 2 - 40 * 3 is 140; the state keeps the last two inputs"
    worked_case("x5.3", got, {"out": [440.0, 140.0], "state": [100.0, -40.0]}, says)


def test_a_single_token_moves_the_state() -> None:
    """A decode: the oldest input leaves, the others move up."""
    x, state, weight = torch.tensor([[100.0]]), torch.tensor([[20.0], [60.0]]), torch.tensor([[1.0, 2.0, 3.0]])
    _, after = convolve(x, state, weight)
    says = "20 is no longer needed: 60 and 100 are the last two inputs"
    worked_case("x5.3 decode", after.flatten().tolist(), [60.0, 100.0], says)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("pieces", [[11], [1] * 11, [2, 1, 5, 3], [4, 7]], ids=str)
def test_pieces_give_what_the_whole_gives(width: int, pieces: list[int]) -> None:
    """Against torch's own convolution, over a prompt that is split anywhere."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(11, 6, generator=generator), torch.randn(6, width, generator=generator)
    expected = F.silu(F.conv1d(x.T[None], weight[:, None], padding=width - 1, groups=6)[0, :, :11].T)
    state, outputs = torch.zeros(width - 1, 6), []
    for piece in x.split(pieces):
        out, state = convolve(piece, state, weight)
        outputs.append(out)
    says = f"a prompt in pieces of {pieces}: outputs are not silu of what torch's own convolution gives, each channel by itself"
    torch.testing.assert_close(torch.cat(outputs), expected, msg=says)
    assert torch.equal(state, x[12 - width :]), f"the state is the last {width - 1} inputs, K - 1"


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("shape", [(5, 1), (2, 3), (2, 5), (2, 3, 1), (2, 3, 6)], ids=str)
def test_sequences_are_independent(shape: tuple[int, ...], width: int) -> None:
    """Decodes of a batch come as [S, 1, C], each with a state of its own; other batches have more tokens, or more dimensions."""
    generator = torch.Generator().manual_seed(0)
    batch = shape[:-1]
    x, state = torch.randn(*shape, 4, generator=generator), torch.randn(*batch, width - 1, 4, generator=generator)
    weight = torch.randn(4, width, generator=generator)
    given, copies = (x, state, weight), (x.clone(), state.clone(), weight.clone())
    out, after = convolve(*given)
    assert all(map(torch.equal, given, copies)), "an argument was written over"
    for s in np.ndindex(*batch):
        alone, own = convolve(x[s], state[s], weight)
        says = f"sequence {s} of a batch {list(x.shape)}, K = {width}: other outputs than alone"
        torch.testing.assert_close(out[s], alone, msg=says)
        says = f"the state of sequence {s} of a batch {list(x.shape)}, K = {width}: not the last {width - 1} inputs"
        assert after[s].shape == own.shape and torch.equal(after[s], own), says


def test_half_precision() -> None:
    """Sums are in float32; the state keeps its dtype, for it is a slot's."""
    x, state = torch.full((1, 2), 0.1).bfloat16(), torch.full((3, 2), 0.1).bfloat16()
    out, after = convolve(x, state, torch.full((2, 4), 0.3).bfloat16())
    assert out.dtype == torch.float32, f"outputs are float32, not {out.dtype}"
    assert after.dtype == torch.bfloat16, f"the state has the dtype of the slot, not {after.dtype}"
    _, after = convolve(x.float(), state, torch.full((2, 4), 0.3))
    assert after.dtype == torch.bfloat16, f"the state has the dtype of the slot, not that of x, {after.dtype}"
    exact = 4 * float(x[0, 0]) * float(torch.tensor(0.3).bfloat16())
    right = F.silu(torch.tensor(exact)).item()
    torch.testing.assert_close(out[0, 0].item(), right, rtol=1e-5, atol=0, msg="the sum was rounded")


def test_a_state_in_float32_beside_tokens_of_16_bits() -> None:
    """K = 4 and one token: two of the old inputs stay, with all their digits."""
    state = torch.tensor([[0.1], [0.2], [0.3]])
    out, after = convolve(torch.tensor([[0.5]]).bfloat16(), state, torch.ones(1, 4))
    assert after.dtype == torch.float32, f"the state keeps its own dtype, float32, not the tokens', {after.dtype}"
    kept = after[:, 0].tolist()
    assert torch.equal(after[:2], state[1:]) and kept[2] == 0.5, f"0.2, 0.3 and 0.5 as they were, not {kept}"
    says = "silu of 0.1 + 0.2 + 0.3 + 0.5, of which none is rounded to 16 bits"
    torch.testing.assert_close(out, F.silu(torch.tensor([[1.1]])), rtol=1e-6, atol=0, msg=says)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_sizes_that_are_equal(size: int) -> None:
    """As many sequences, tokens, channels and weights: what is turned over has the right shape."""
    generator = torch.Generator().manual_seed(size)
    x, state = (torch.randn(size, n, size, generator=generator) for n in (size, size - 1))
    weight = torch.randn(size, size, generator=generator)
    out, after = convolve(x, state, weight)
    inputs = torch.cat((state, x), 1)
    expected = torch.stack([(inputs[:, t : t + size] * weight.T).sum(1) for t in range(size)], 1)
    says = f"S = n = C = K = {size}: weight[c, j] goes with channel c of the input j places on"
    torch.testing.assert_close(out, F.silu(expected), rtol=1e-5, atol=1e-5, msg=says)
    assert torch.equal(after, inputs[:, size:]), f"S = n = C = K = {size}: the state is the last {size - 1} inputs"
