"""The one-pass draw against the sampler's: the same noise, the same tokens."""

from __future__ import annotations

import pytest
import torch

from folovllm.sample.noise import gumbel
from tests.m6.devices import DEVICE

pytest.importorskip("triton", reason="Triton is for Linux only")

from folovllm.kernels.gumbel_max import TILE, gumbel_max


def words(seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The low and high halves of 64-bit seeds, as int32."""
    halves = seeds.cpu().view(torch.int32).view(-1, 2).to(seeds.device)
    return halves[:, 0].contiguous(), halves[:, 1].contiguous()


def reference(logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The scores whose argmax is the draw, by torch."""
    noise = gumbel(seeds, at, logits.shape[-1])
    scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
    return torch.where(temperature[:, None] > 0, scaled + noise, logits.float())


def rows(count: int, vocab_size: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, vocab_size, generator=generator)
    temperature = torch.tensor([0.0, 1.0, 0.6, 2.0])[torch.arange(count) % 4]
    seeds = torch.randint(0, 2**63 - 1, (count,), generator=generator)
    positions = torch.randint(0, 40_000, (count,), generator=generator)
    return logits.to(DEVICE), temperature.to(DEVICE), seeds.to(DEVICE), positions.to(DEVICE)


class TestGumbelMax:
    @pytest.mark.parametrize("vocab_size", [1, 3, 4, 259, TILE - 1, TILE, TILE + 1, 2 * TILE + 7])
    def test_draws_as_the_sampler_does(self, vocab_size: int) -> None:
        logits, temperature, seeds, positions = rows(5, vocab_size, seed=vocab_size)
        tokens = gumbel_max(logits, temperature, *words(seeds), positions.int())
        assert tokens.tolist() == reference(logits, temperature, seeds, positions).argmax(-1).tolist()

    def test_another_position_or_seed_is_another_draw(self) -> None:
        logits = torch.zeros(4, 259, device=DEVICE)
        temperature = torch.ones(4, device=DEVICE)
        seeds = torch.tensor([1, 1, 1 + (1 << 32), 2], device=DEVICE)  # the third differs in its high word alone
        positions = torch.tensor([7, 8, 7, 7], dtype=torch.int32, device=DEVICE)
        tokens = gumbel_max(logits, temperature, *words(seeds), positions).tolist()
        assert len(set(tokens)) == 4

    def test_greedy_ties_go_to_the_lowest_id(self) -> None:
        logits = torch.zeros(2, TILE + 100, device=DEVICE)
        logits[0, [50, 51, TILE + 3]] = 1.0
        logits[1, [TILE + 3, TILE + 1]] = 1.0
        zero = torch.zeros(2, device=DEVICE)
        tokens = gumbel_max(logits, zero, zero.int(), zero.int(), zero.int())
        assert tokens.tolist() == [50, TILE + 1]

    def test_a_share_of_the_vocabulary_has_the_noise_of_its_ids(self) -> None:
        logits, temperature, seeds, positions = rows(4, 512, seed=3)
        scores = reference(logits, temperature, seeds, positions)
        second = gumbel_max(logits[:, 256:], temperature, *words(seeds), positions.int(), offset=256)
        assert second.tolist() == (256 + scores[:, 256:].argmax(-1)).tolist()

    def test_what_is_minus_infinity_is_never_drawn(self) -> None:
        logits, temperature, seeds, positions = rows(8, 300, seed=4)
        logits[:, 10:] = -torch.inf
        tokens = gumbel_max(logits, temperature, *words(seeds), positions.int())
        assert (tokens < 10).all()

    def test_what_lies_behind_the_vocabulary_loses_to_everything(self) -> None:
        logits, temperature, seeds, positions = rows(8, 301, seed=7)
        logits = -1e30 * (1 + logits.abs())
        tokens = gumbel_max(logits, temperature, *words(seeds), positions.int())
        assert tokens.tolist() == reference(logits, temperature, seeds, positions).argmax(-1).tolist()

    @pytest.mark.parametrize("vocab_size", [300, TILE, TILE + 1])
    def test_nan_is_never_the_best(self, vocab_size: int) -> None:
        """Where there is nothing else, the index is none of the row's, and the kernel takes the first token."""
        logits, temperature, seeds, positions = rows(4, vocab_size, seed=8)
        logits[:, ::2] = torch.nan
        scores = reference(logits, temperature, seeds, positions).nan_to_num(-torch.inf, posinf=torch.inf)
        drawn = gumbel_max(logits, temperature, *words(seeds), positions.int())
        assert drawn.tolist() == scores.argmax(-1).tolist()
        logits[:] = torch.nan
        assert gumbel_max(logits, temperature, *words(seeds), positions.int()).tolist() == [0] * 4

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_narrow_logits_are_scored_in_float32(self, dtype: torch.dtype) -> None:
        logits, temperature, seeds, positions = rows(16, 1000, seed=6)
        logits = (20 * logits).to(dtype)
        tokens = gumbel_max(logits, temperature, *words(seeds), positions.int())
        assert tokens.tolist() == reference(logits, temperature, seeds, positions).argmax(-1).tolist()

    @pytest.mark.gpu
    def test_bfloat16_and_a_real_vocabulary(self) -> None:
        logits, temperature, seeds, positions = rows(64, 151_936, seed=5)
        logits = logits.bfloat16()
        tokens = gumbel_max(logits, temperature, *words(seeds), positions.int())
        scores = reference(logits, temperature, seeds, positions)
        best = scores.gather(1, tokens[:, None])[:, 0]
        assert torch.allclose(best, scores.amax(-1), atol=1e-4)  # equal but for the rounding of two logarithms
