"""Tokens that may be rejected: whatever is drafted and accepted, each output is that of the accepted tokens before it."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from folovllm.electives.hybrid.delta_rule import delta_rule_step
from folovllm.electives.hybrid.gated_delta_net import GatedDeltaNet
from tests import contract
from tests.x5.test_delta_kernels import batch_of, to_device, two_layers

MOST = 4  # samples of a sequence in a step
SLOTS = 6


@dataclass
class Text:
    """A sequence: the hidden states of its accepted tokens, and those that its last step computed, some of them rejected."""

    row: int
    accepted: torch.Tensor = field(default_factory=lambda: torch.empty(0, 32))


def expected(layer: GatedDeltaNet, x: torch.Tensor) -> torch.Tensor:
    """The outputs of a whole text [n, 32] by the published recurrence, a token at a time; no state is kept anywhere."""
    qkv, z, b, a = layer.project(x)
    width = layer.conv1d.weight.shape[2]
    padded = torch.nn.functional.pad(qkv.T[None], (width - 1, 0))
    mixed = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, layer.conv1d.weight, groups=qkv.shape[1]))[0].T
    state = torch.zeros(1, layer.num_v_heads, layer.k_dim, layer.v_dim)
    outputs = []
    for token in zip(*(t.split(1) for t in (*layer.split_heads(mixed), *layer.gates(b, a))), strict=True):
        out, state = delta_rule_step(state, *token)
        outputs.append(out)
    return layer.out_proj(layer.norm(torch.cat(outputs), z).flatten(1))


# A step: for each of three texts the new tokens (0: it sits out), and how many of them count if they may be rejected;
# then which text is left and begins anew with a copy of another one's slot, as from a snapshot.
PART = st.tuples(st.sampled_from([0, 1, 1, 2, 3, 4, 4, 7, 70]), st.integers(1, MOST))
STEPS = st.lists(
    st.tuples(PART, PART, PART, st.sampled_from([None, None, (0, 1), (2, 0), (1, 1)])), min_size=2, max_size=7
)


def check(layer: GatedDeltaNet, reference: GatedDeltaNet, steps: Any, where: str) -> None:
    texts = [Text(row) for row in (4, 0, 2)]
    generator = torch.Generator().manual_seed(len(steps))
    for *parts, copied in steps:
        taking_part = sorted([(n, m, t) for (n, m), t in zip(parts, texts, strict=True) if n], key=lambda p: p[0] > 1)
        if not taking_part:
            continue
        new = [torch.randn(n, 32, generator=generator) for n, _, _ in taking_part]
        lengths, computed = [len(x) for x in new], [len(text.accepted) for *_, text in taking_part]
        batch = batch_of(lengths, computed, [text.row for *_, text in taking_part])
        actual = layer(torch.cat(new).to(where), batch if where == "cpu" else to_device(batch)).cpu().split(lengths)
        for x, out, (n, m, text) in zip(new, actual, taking_part, strict=True):
            wanted = expected(reference, torch.cat([text.accepted, x]))[len(text.accepted) :]
            torch.testing.assert_close(out, wanted, rtol=5e-4, atol=5e-4)
            text.accepted = torch.cat([text.accepted, x[: min(n, m)] if 1 < n <= MOST else x])
        if copied is not None:
            source = texts[copied[0]]
            texts[copied[1]] = Text(next(r for r in range(SLOTS) if r not in {t.row for t in texts}), source.accepted)
            for state in layer.states:
                state[texts[copied[1]].row] = state[source.row]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(steps=STEPS)
@torch.inference_mode()
def test_in_torch(steps: Any) -> None:
    plain, _ = two_layers("odd sizes", MOST)
    check(plain, plain, steps, "cpu")


@pytest.mark.parametrize("geometry", ["grouped", "odd sizes"])
@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(steps=STEPS)
@torch.inference_mode()
def test_by_kernels(geometry: str, steps: Any) -> None:
    plain, fused = two_layers(geometry, MOST)
    check(fused.to(contract.DEVICE), plain, steps, contract.DEVICE)
