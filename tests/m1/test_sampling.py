"""Noise, filters, the draw, penalties: the unit tests of a sampler that keeps no state."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from folovllm.request import Sequence, sampling_spec
from folovllm.sample.filters import apply_min_p_filtering, apply_top_k_filtering, apply_top_p_filtering
from folovllm.sample.logprobs import logprobs_of_rows
from folovllm.sample.noise import gumbel, philox_4x32_10, uniform
from folovllm.sample.sampler import Sampler, SamplingBatch
from folovllm.sampling_params import SamplingParams
from tests.sampling import adjusted, sequence, state_of
from tests.tiny import worked_case

INF = float("inf")
CPU = torch.device("cpu")


def rows(n: int, temperature: float = 1.0, position: int = 5) -> SamplingBatch:
    """`n` rows with seeds 0 to n-1 and no filters."""
    return SamplingBatch(
        temperature=torch.full((n,), temperature), seeds=torch.arange(n), positions=torch.full((n,), position),
        all_greedy=temperature == 0, min_p=None, top_k=None, top_p=None, 
    )  # fmt: skip


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Pearson's statistic of observed `counts` [V] under `probs` [V]."""
    expected = probs * counts.sum()
    return float(((counts - expected).square() / expected).sum())


class TestNoise:
    @pytest.mark.parametrize(("counter", "key", "expected"), [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ])  # fmt: skip
    def test_philox_gives_the_published_answers(self, counter: str, key: str, expected: str) -> None:
        """The known-answer vectors that come with Random123."""
        words = philox_4x32_10(*([torch.tensor(int(w, 16)) for w in text.split()] for text in (counter, key)))
        assert " ".join(f"{int(word):08x}" for word in words) == expected

    def test_uniform_uses_all_four_outputs_and_both_words_of_the_seed(self) -> None:
        numbers = uniform(torch.tensor([7, 7 + (1 << 32)]), torch.tensor([3, 3]), 10)
        assert numbers.shape == (2, 10) and numbers.unique().numel() == 20
        zero = torch.tensor([0])
        words = philox_4x32_10([torch.tensor([1]), torch.tensor([3]), zero, zero], [torch.tensor([7]), zero])
        assert torch.equal(numbers[0, 4:8], ((torch.stack(words).flatten() >> 9).float() + 0.5) * 2.0**-23)

    def test_a_row_does_not_depend_on_the_others(self) -> None:
        alone = gumbel(torch.tensor([11]), torch.tensor([4]), 50)
        beside = gumbel(torch.tensor([3, 11, 9]), torch.tensor([8, 4, 4]), 50)
        assert torch.equal(alone[0], beside[1])
        assert torch.equal(alone[0, :20], gumbel(torch.tensor([11]), torch.tensor([4]), 20)[0])


class TestFilters:
    """m1.4. Rows carry different values, so that a filter which mixes rows up is found out."""

    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25]]))

    def kept(self, filtered: torch.Tensor) -> list[list[int]]:
        same = filtered == self.logits[: len(filtered)]
        assert torch.equal(~same, filtered.isneginf()), "what stays keeps its logit, what goes becomes -inf"
        return [row.nonzero().flatten().tolist() for row in same]

    def test_a_worked_case_of_min_p(self) -> None:
        kept = self.kept(apply_min_p_filtering(self.logits[:1], torch.tensor([0.35])))
        says = "of probabilities 0.1, 0.4, 0.2, 0.3 those below 0.35 * 0.4 = 0.14 go; ids of what stays"
        worked_case("m1.4 min-p", kept, [[1, 2, 3]], says)

    def test_a_worked_case_of_top_k(self) -> None:
        kept = self.kept(apply_top_k_filtering(self.logits[:2], torch.tensor([2, 1])))
        says = "the 2 largest of 0.1, 0.4, 0.2, 0.3 and the largest of 0.7, 0.1, 0.15, 0.05; ids of what stays"
        worked_case("m1.4 top-k", kept, [[1, 3], [0]], says)

    def test_a_worked_case_of_top_p(self) -> None:
        kept = self.kept(apply_top_p_filtering(self.logits[:1], torch.tensor([0.75])))
        says = "0.4 + 0.3 = 0.7 does not reach 0.75, so the token that crosses the line (0.2) stays; ids of what stays"
        worked_case("m1.4 top-p", kept, [[1, 2, 3]], says)

    def test_top_p_of_1_keeps_all(self) -> None:
        out = apply_top_p_filtering(torch.tensor([[40.0, 1.0, 0.0]]), torch.tensor([1.0]))
        says = "top_p = 1 keeps all, also behind a token whose probability is rounded to 1; ids of what stays"
        worked_case("m1.4 top-p of 1", out.isfinite()[0].nonzero().flatten(), [0, 1, 2], says)

    def test_top_p_of_1_keeps_all_of_a_large_vocabulary(self) -> None:
        logits = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0))
        kept = apply_top_p_filtering(logits, torch.tensor([1.0, 0.9])).isfinite().sum(-1).tolist()
        assert kept[0] == 50_000, "a sum of 50,000 probabilities may be rounded to more than 1: top_p = 1 is no bound"
        assert kept[1] < 50_000, "the other row has a bound"

    @pytest.mark.parametrize(("apply", "values", "kept", "says"), [
        (apply_top_k_filtering, [0, -1, 99], [[0, 1, 2, 3]] * 3, "0 or less, or as many as there are: all stay"),
        (apply_top_p_filtering, [0.75, 0.5, 1.0], [[1, 2, 3], [0], [0, 1, 2, 3]], "each row has a top_p of its own"),
        (apply_top_p_filtering, [1e-9, 1e-9, 0.5], [[1], [0], [0, 1]], "the most likely stays; of equals the lower ids"),
        (apply_min_p_filtering, [0.4, 0.2, 0.99], [[1, 2, 3], [0, 2], [0, 1, 2, 3]], "each row has a min_p of its own"),
        (apply_min_p_filtering, [0.0, 1.0, 1.0], [[0, 1, 2, 3], [0], [0, 1, 2, 3]], "0 drops nothing, 1 all that is less likely than the first"),
    ], ids=["top-k off", "top-p", "top-p, ties", "min-p", "min-p, ends"])  # fmt: skip
    def test_each_row(self, apply: Any, values: list[float], kept: list[list[int]], says: str) -> None:
        assert self.kept(apply(self.logits, torch.tensor(values))) == kept, says

    def test_top_k_keeps_ties_of_the_last(self) -> None:
        tied = torch.tensor([[1.0, 3.0, 2.0, 2.0]])
        kept = apply_top_k_filtering(tied, torch.tensor([2])).isfinite().tolist()
        assert kept == [[False, True, True, True]], "the second largest is there twice: both stay"

    def test_what_a_filter_dropped_stays_dropped(self) -> None:
        logits = torch.tensor([[2.0, -INF, 1.0, 0.0]])
        for apply, value in (
            (apply_min_p_filtering, 0.1),
            (apply_top_k_filtering, 4),
            (apply_top_p_filtering, 0.9999),
            (apply_top_p_filtering, 1.0),
        ):
            out = apply(logits, torch.tensor([value]))
            assert out[0, 1] == -INF, "what an earlier filter made -inf stays so"
            assert out[0, 0] == 2.0 and not out.isnan().any(), "the rest is as it was"

    def test_the_input_is_left_alone(self) -> None:
        before = self.logits.clone()
        apply_top_k_filtering(self.logits, torch.tensor([1, 1, 1]))
        apply_top_p_filtering(self.logits, torch.tensor([0.1, 0.1, 0.1]))
        apply_min_p_filtering(self.logits, torch.tensor([0.9, 0.9, 0.9]))
        assert torch.equal(self.logits, before), "the logits that came in are still the caller's"

    @given(st.integers(0, 10_000), st.integers(1, 12), st.floats(0.05, 0.95), st.floats(0.01, 0.9))
    def test_as_transformers_does(self, seed: int, k: int, p: float, m: float) -> None:
        logits = torch.randn(3, 17, generator=torch.Generator().manual_seed(seed)) * 3
        ids = torch.zeros(3, 1, dtype=torch.long)
        for ours, theirs, value in (
            (apply_top_k_filtering, TopKLogitsWarper, k),
            (apply_top_p_filtering, TopPLogitsWarper, p),
            (apply_min_p_filtering, MinPLogitsWarper, m),
        ):
            found, expected = ours(logits, torch.full((3,), value)), theirs(value)(ids, logits)
            says = f"other tokens stay than with transformers' {theirs.__name__}"
            assert torch.equal(found.isfinite(), expected.isfinite()), says


class TestDraw:
    """m1.5."""

    def test_a_worked_case(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With noise of round numbers, by seed. Row 0 is greedy; the logits of row 2 are divided by 2 already."""
        noise = torch.tensor([[0.0, 0.0, 50.0], [0.0, 20.0, 0.0], [0.0, 30.0, 0.0], [0.0, 30.0, 0.0]])
        for module in ("noise", "sampler"):
            monkeypatch.setattr(f"folovllm.sample.{module}.gumbel", lambda seeds, positions, vocab: noise[seeds])
        logits = torch.tensor([[20.0, 10.0, 0.0], [20.0, 10.0, 0.0], [40.0, 0.0, 10.0], [40.0, 0.0, 10.0]])
        batch = rows(4)
        batch.temperature = torch.tensor([0.0, 1.0, 2.0, 1.0])
        says = (
            "logits [20, 10, 0] of a greedy row; [20, 10, 0] + noise [0, 20, 0]; twice [40, 0, 10] + noise [0, 30, 0], "
            "of which the temperatures, 2 and 1, are applied already: the largest of each row"
        )
        worked_case("m1.5", Sampler().sample_filtered(logits, batch), [0, 1, 0, 0], says)

    def test_greedy_takes_the_largest_and_of_equals_the_first(self) -> None:
        logits = torch.tensor([[0.0, 5.0, 5.0], [9.0, 1.0, 2.0]])
        drawn = Sampler().sample_filtered(logits, rows(2, temperature=0.0)).tolist()
        assert drawn == [1, 0], "the largest; the first of the two 5s"

    @pytest.mark.parametrize("temperatures", [[0.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    def test_ids_are_int64(self, temperatures: list[float]) -> None:
        batch = rows(2, max(temperatures))
        batch.temperature = torch.tensor(temperatures)
        drawn = Sampler().sample_filtered(torch.zeros(2, 5), batch)
        said = f"temperatures {temperatures}: [S] int64, not {list(drawn.shape)} {drawn.dtype}"
        assert drawn.shape == (2,) and drawn.dtype == torch.int64, said

    def test_greedy_makes_no_noise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def never(*args: object) -> torch.Tensor:
            raise AssertionError("noise was made though all rows are greedy")

        monkeypatch.setattr("folovllm.sample.sampler.gumbel", never)
        Sampler().sample_filtered(torch.randn(3, 5), rows(3, temperature=0.0))

    def test_draws_follow_the_softmax(self) -> None:
        logits = torch.tensor([1.5, 0.0, -1.0, 1.0, -INF, 0.5, -2.0, 0.2])
        tokens = Sampler().sample_filtered(logits.expand(20_000, -1), rows(20_000))
        counts = tokens.bincount(minlength=8)
        assert counts[4] == 0, "a token that was filtered out was drawn"
        keep = logits.isfinite()
        distance = chi_square(counts[keep].double(), logits.softmax(0)[keep].double())
        assert distance < 22.5, "20,000 draws are not distributed as softmax(logits)"  # 6 degrees, p = 0.001

    def test_draws_along_positions_follow_the_softmax_too(self) -> None:
        batch = rows(20_000)
        batch.seeds, batch.positions = torch.full((20_000,), 42), torch.arange(20_000)
        logits = torch.tensor([0.3, 0.0, -1.0, 1.0])
        counts = Sampler().sample_filtered(logits.expand(20_000, -1), batch).bincount(minlength=4)
        distance = chi_square(counts.double(), logits.softmax(0).double())
        assert distance < 16.3, "the draws of one seed are not distributed as softmax(logits)"  # 3 degrees

    @pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
    def test_the_noise_is_that_of_seed_and_position(self, temperature: float) -> None:
        logits = torch.randn(64, 100)
        batch = rows(64, temperature, position=9)
        expected = (logits + gumbel(batch.seeds, batch.positions, 100)).argmax(-1)
        drawn = Sampler().sample_filtered(logits, batch)
        assert torch.equal(drawn, expected), "argmax(logits + gumbel(...)); the temperature is in the logits"

    def test_greedy_and_drawing_rows_in_one_batch(self) -> None:
        logits = torch.randn(200, 10, generator=torch.Generator().manual_seed(0))
        batch = rows(200)
        alone = Sampler().sample_filtered(logits, batch)
        batch.temperature = torch.where(torch.arange(200) % 2 == 0, 0.0, 1.0)
        mixed = Sampler().sample_filtered(logits, batch)
        assert torch.equal(mixed[::2], logits[::2].argmax(-1)), "greedy rows take the argmax beside rows that draw"
        assert torch.equal(mixed[1::2], alone[1::2]), "rows that draw are not changed by greedy ones beside them"


def batch_of(*params: SamplingParams) -> SamplingBatch:
    """A draw after a prompt of one token, a row for each."""
    specs = [sampling_spec(sequence(p, [5])) for p in params]
    return SamplingBatch.from_specs(specs, [1] * len(specs), CPU)


def penalized(logits: torch.Tensor, *seqs: Sequence) -> torch.Tensor:
    """What penalties make of the logits [S, V]."""
    state = state_of(*map(sampling_spec, seqs), vocab_size=logits.shape[1])
    return adjusted(logits, state, [seq.num_tokens for seq in seqs])


class TestWholeSampler:
    def test_order_temperature_then_min_p_then_top_k_then_top_p(self) -> None:
        logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(3)) * 2
        params = SamplingParams(temperature=0.7, min_p=0.02, top_k=12, top_p=0.8)
        batch = batch_of(params)
        expected = apply_min_p_filtering(logits / 0.7, torch.tensor([0.02]))
        expected = apply_top_k_filtering(expected, torch.tensor([12]))
        expected = apply_top_p_filtering(expected, torch.tensor([0.8]))
        assert torch.equal(Sampler().filter(logits, batch), expected)
        assert 1 < expected.isfinite().sum() < 12

    def test_rows_with_and_without_filters(self) -> None:
        logits = torch.randn(1, 30).expand(3, -1)
        params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=1, seed=1)]
        filtered = Sampler().filter(logits, batch_of(*params))
        assert torch.equal(filtered[:2], logits[:2])
        assert filtered[2].isfinite().sum() == 1

    @pytest.mark.parametrize("draw", [{"temperature": 0}, {"temperature": 5.0, "top_k": 2}], ids=["greedy", "filtered"])
    def test_logprobs_are_those_of_the_model(self, draw: dict[str, float]) -> None:
        logits = torch.randn(2, 20)
        params = [SamplingParams(**draw, logprobs=3), SamplingParams(temperature=0)]
        out = Sampler()(logits, batch_of(*params))
        chosen, *top = out.logprobs[0] or []
        values, ids = logits[0].log_softmax(-1).topk(3)
        assert chosen[0] == out.token_ids[0] and chosen in top[:2], "one of the two that top_k keeps"
        assert [i for i, _, _ in top] == ids.tolist() and [v for _, v, _ in top] == pytest.approx(values.tolist())
        assert [rank for _, _, rank in top] == [1, 2, 3]
        assert out.logprobs[1] is None

    def test_logprobs_0_gives_the_chosen_token_alone(self) -> None:
        params = SamplingParams(temperature=2.0, top_k=4, logprobs=0)
        out = Sampler()(torch.randn(1, 20), batch_of(params))
        assert [i for i, _, _ in out.logprobs[0] or []] == out.token_ids

    def test_the_rank_of_a_token_among_all(self) -> None:
        logits = torch.tensor([[1.0, 4.0, 3.0, 0.0, 2.0]])
        (row,) = logprobs_of_rows(logits, [0], [2])
        assert [(id_, rank) for id_, _, rank in row or []] == [(0, 4), (1, 1), (2, 2)]


class TestPenalties:
    def test_repetition_as_transformers_does(self) -> None:
        logits = torch.randn(1, 12)
        seq = sequence(SamplingParams(repetition_penalty=1.7), [3, 4, 4], [5, 3])
        expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[3, 4, 4, 5, 3]]), logits.clone())
        assert torch.allclose(penalized(logits, seq), expected)

    def test_presence_once_and_frequency_per_occurrence_in_the_answer_alone(self) -> None:
        seq = sequence(SamplingParams(presence_penalty=1.0, frequency_penalty=0.25), [0, 1], [2, 3, 3])
        out = penalized(torch.zeros(1, 5), seq)
        assert out.tolist() == [[0, 0, -1.25, -1.5, 0]]

    def test_only_the_rows_that_ask_and_never_in_place(self) -> None:
        logits = torch.ones(3, 5)
        asked = [{}, {"presence_penalty": 2.0}, {"allowed_token_ids": [3]}]
        seqs = [sequence(SamplingParams(**fields), [0], [2]) for fields in asked]
        out = penalized(logits, *seqs)
        assert out[0].tolist() == [1] * 5 and out[1, 2] == -1 and logits.eq(1).all()
        assert out[2].isfinite().tolist() == [False, False, False, True, False]
        assert penalized(logits, *seqs[:1] * 3) is logits, "float32 that nobody changes is not copied"

    def test_no_end_before_min_tokens(self) -> None:
        seq = sequence(SamplingParams(min_tokens=2, stop_token_ids=[4]), [0], [2])
        state = state_of(sampling_spec(seq), vocab_size=5)
        early, late = (adjusted(torch.zeros(1, 5), state, [position]) for position in (2, 3))
        assert early.isneginf().tolist() == [[False, True, False, False, True]] and late.isfinite().all()
