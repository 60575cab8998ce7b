"""The one-pass draw against the sampler's: the same noise, the same tokens."""

import pytest
import torch

from folovllm.sample.noise import gumbel
from tests.contract import DEVICE
from tests.tiny import worked_case

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


def assert_drawn(tokens: torch.Tensor, scores: torch.Tensor, says: str) -> None:
    assert tokens.tolist() == scores.argmax(-1).tolist(), says


NAN = float("nan")
# The noise of seed 0 at position 0, rounded: ids 0 to 3, 8 to 11 and TILE to TILE + 3.
NOISE = {0: [0.1, 2.1, 1.2, 0.7], 8: [-1.4, -0.1, -0.7, -0.3], TILE: [2.6, 0.4, -1.2, 3.0]}


def drawn(logits: list[float], temperature: float, before: int = 0, offset: int = 0) -> int:
    """The id drawn of one row with seed 0 at position 0; `before` columns of -inf come before the logits."""
    row = torch.cat((torch.full((before,), -torch.inf), torch.tensor(logits)))[None].to(DEVICE)
    zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    return int(gumbel_max(row, torch.tensor([temperature], device=DEVICE), zero, zero, zero, offset))


class TestGumbelMax:
    def test_a_worked_case(self) -> None:
        got = {
            "[0.5, 0, 0.5, 0] at temperature 0": drawn([0.5, 0.0, 0.5, 0.0], 0.0),
            "[1.5, 0, 0, 0] at temperature 0.5": drawn([1.5, 0.0, 0.0, 0.0], 0.5),
            "[NaN, 1, 0, 0] at temperature 0": drawn([NAN, 1.0, 0.0, 0.0], 0.0),
            "[-2e30, -1e30] at temperature 0": drawn([-2e30, -1e30], 0.0),
            "four times -100 at temperature 1": drawn([-100.0] * 4, 1.0),
            "[0, 0, 0, 0.3], which are ids 8 to 11, at temperature 1": drawn([0.0, 0.0, 0.0, 0.3], 1.0, offset=8),
            f"-inf up to id {TILE}, then four times 0, at temperature 1": drawn([0.0] * 4, 1.0, before=TILE),
        }
        says = f"the id of the largest of logit / temperature + noise; the noise is {NOISE}, by the id where it begins"
        worked_case("m6.5", got, dict(zip(got, [0, 0, 1, 1, 1, 11, TILE + 3], strict=True)), says)

    def test_the_noise_of_the_worked_case(self) -> None:
        noise = gumbel(torch.tensor([0]), torch.tensor([0]), TILE + 4)[0]
        for first, numbers in NOISE.items():
            assert [round(x, 1) for x in noise[first : first + 4].tolist()] == numbers, "as it is written above"

    @pytest.mark.parametrize("vocab_size", [1, 3, 4, 259, TILE - 1, TILE, TILE + 1, 2 * TILE + 7])
    def test_draws_as_the_sampler_does(self, vocab_size: int) -> None:
        logits, temperature, seeds, positions = rows(5, vocab_size, seed=vocab_size)
        tokens = gumbel_max(logits, temperature, *words(seeds), positions.int())
        scores = reference(logits, temperature, seeds, positions)
        assert_drawn(tokens, scores, "the token with the largest logit / temperature + noise")

    def test_another_position_or_seed_is_another_draw(self) -> None:
        logits = torch.zeros(4, 259, device=DEVICE)
        temperature = torch.ones(4, device=DEVICE)
        seeds = torch.tensor([1, 1, 1 + (1 << 32), 2], device=DEVICE)  # the third differs in its high word alone
        positions = torch.tensor([7, 8, 7, 7], dtype=torch.int32, device=DEVICE)
        tokens = gumbel_max(logits, temperature, *words(seeds), positions).tolist()
        assert len(set(tokens)) == 4, "position, low word and high word of the seed each change the noise"

    def test_greedy_ties_go_to_the_lowest_id(self) -> None:
        logits = torch.zeros(2, TILE + 100, device=DEVICE)
        logits[0, [50, 51, TILE + 3]] = 1.0
        logits[1, [TILE + 3, TILE + 1]] = 1.0
        zero = torch.zeros(2, device=DEVICE)
        tokens = gumbel_max(logits, zero, zero.int(), zero.int(), zero.int())
        assert tokens.tolist() == [50, TILE + 1], "of the largest the lowest id, also across tiles"

    def test_a_share_of_the_vocabulary_has_the_noise_of_its_ids(self) -> None:
        logits, temperature, seeds, positions = rows(4, 512, seed=3)
        scores = reference(logits, temperature, seeds, positions)
        second = gumbel_max(logits[:, 256:], temperature, *words(seeds), positions.int(), offset=256)
        assert_drawn(second - 256, scores[:, 256:], "the noise is that of the token's id, offset + index")

    def test_what_is_minus_infinity_is_never_drawn(self) -> None:
        logits, temperature, seeds, positions = rows(8, 300, seed=4)
        logits[:, 10:] = -torch.inf
        tokens = gumbel_max(logits, temperature, *words(seeds), positions.int())
        assert (tokens < 10).all(), "a token of logit -inf was drawn"

    def test_what_lies_behind_the_vocabulary_loses_to_everything(self) -> None:
        logits, temperature, seeds, positions = rows(8, 301, seed=7)
        logits = -1e30 * (1 + logits.abs())
        tokens = gumbel_max(logits, temperature, *words(seeds), positions.int())
        scores = reference(logits, temperature, seeds, positions)
        assert_drawn(tokens, scores, "what lies behind the vocabulary counts as -inf, below every logit")

    @pytest.mark.parametrize("vocab_size", [300, TILE, TILE + 1])
    def test_nan_is_never_the_best(self, vocab_size: int) -> None:
        """Where there is nothing else, the index is none of the row's, and the kernel takes the first token."""
        logits, temperature, seeds, positions = rows(4, vocab_size, seed=8)
        logits[:, ::2] = torch.nan
        scores = reference(logits, temperature, seeds, positions).nan_to_num(-torch.inf, posinf=torch.inf)
        tokens = gumbel_max(logits, temperature, *words(seeds), positions.int())
        assert_drawn(tokens, scores, "a NaN is never the best")
        logits[:2], logits[2], logits[3] = torch.nan, -torch.inf, torch.inf
        for heat in (temperature, temperature.flip(0)):
            tokens = gumbel_max(logits, heat, *words(seeds), positions.int(), offset=40)
            assert tokens.tolist() == [40] * 4, "where all is NaN or infinite the first token comes out"

    def test_nan_beside_what_is_infinite(self) -> None:
        for temperature in 0.0, 1.0:
            got = drawn([NAN, NAN, -torch.inf, NAN], temperature)
            assert got == 2, f"of [NaN, NaN, -inf, NaN] id 2 is the best at temperature {temperature}, not {got}"

    @pytest.mark.parametrize("temperature", [1e-6, 1e-3, 0.1, 100.0])
    def test_any_temperature_above_0_is_one(self, temperature: float) -> None:
        """Logits of T / 2, 0, 0, 0: the noise 0.1, 2.1, 1.2, 0.7 makes id 1 win by 2.1 to 0.6, and at temperature 0 it were id 0."""
        got = drawn([temperature / 2, 0.0, 0.0, 0.0], temperature)
        assert got == 1, f"at temperature {temperature} id {got} comes out, not 1: only 0 is greedy"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_narrow_logits_are_scored_in_float32(self, dtype: torch.dtype) -> None:
        logits, temperature, seeds, positions = rows(16, 1000, seed=6)
        logits = (20 * logits).to(dtype)
        tokens = gumbel_max(logits, temperature, *words(seeds), positions.int())
        scores = reference(logits, temperature, seeds, positions)
        assert_drawn(tokens, scores, "logits are widened to float32 before the noise is added")

    @pytest.mark.gpu
    def test_bfloat16_and_a_real_vocabulary(self) -> None:
        logits, temperature, seeds, positions = rows(64, 151_936, seed=5)
        logits = logits.bfloat16()
        tokens = gumbel_max(logits, temperature, *words(seeds), positions.int())
        scores = reference(logits, temperature, seeds, positions)
        best = scores.gather(1, tokens[:, None])[:, 0]
        assert torch.allclose(best, scores.amax(-1), atol=1e-4), "not the best, but for the rounding of two logarithms"


def test_tokens_are_kept_in_their_rows() -> None:
    """In the order of `rows`, padding's row as often as there is padding; other rows stay, and so does the rest of `out`."""
    logits = torch.zeros(4, 300, device=DEVICE)
    logits[torch.arange(4), torch.tensor([11, 22, 33, 44])] = 1.0
    rows = torch.tensor([5, 0, 6, 6], dtype=torch.int32, device=DEVICE)
    last, out = torch.full((7,), -7, device=DEVICE), torch.full((6,), -7, device=DEVICE)
    zero = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    tokens = gumbel_max(logits, zero.float(), zero, zero, zero, out=out, keep=(last, rows))
    assert tokens.tolist() == [11, 22, 33, 44] and out.tolist() == [11, 22, 33, 44, -7, -7]
    assert last[:6].tolist() == [22, -7, -7, -7, -7, 11] and last[6] in (33, 44)
