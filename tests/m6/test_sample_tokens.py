"""Penalties and filters on the device, by row, against the sampler's: the same survivors, the same tokens."""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from folovllm.sample.sampler import Sampler
from folovllm.sample.sampler_state import SamplerState
from folovllm.sample.sampling_row import WORDS_AT
from folovllm.sampling_params import SamplingParams
from tests.contract import DEVICE
from tests.sampling import set_rows, spec_of

pytest.importorskip("triton", reason="Triton is for Linux only")

from folovllm.kernels import filter_logits as filters
from folovllm.kernels.penalties import StepRows
from folovllm.kernels.record_sampled import record_sampled
from folovllm.kernels.sample_tokens import sample_tokens

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")  # the logarithm of a min_p that is off

EVERY_FILTER = [
    {}, {"top_k": 1}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.8},
    {"top_k": 30, "min_p": 0.2}, {"top_p": 0.95, "min_p": 0.1},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.02, "temperature": 0.6}, {"top_p": 0.5, "temperature": 3.0},
    {"top_k": 5, "temperature": 0.0}, {"top_k": 10**6, "top_p": 1e-15},
]  # fmt: skip

FEW_FILTERS = [EVERY_FILTER[i] for i in (2, 3, 7, 8, 9, 11)]


def state_for(
    params: list[SamplingParams], vocab_size: int, prompt=(), answer=(), ends=(), bias=None, bad_words=None
) -> SamplerState:
    """One row each, in reverse order, so that a row is not its sequence's index; seeds 100, 101 and so on.

    `bias` is for all of them; `bad_words` are given as tokens, for each.
    """
    state = SamplerState(len(params), vocab_size, torch.device(DEVICE))
    last, bad_words = len(params) - 1, bad_words or [()] * len(params)
    specs = [spec_of(p, prompt, answer, 100 + i, ends, bad_words[i]) for i, p in enumerate(params)]
    specs = [replace(spec, bias=tuple((dict(spec.bias) | (bias or {})).items())) for spec in specs]
    return set_rows(state, {last - i: spec for i, spec in enumerate(specs)})


class Step:
    """A step that the kernels and the sampler sample."""

    def __init__(self, logits: torch.Tensor, state: SamplerState, position: int = 40) -> None:
        count = len(logits)
        self.logits, self.state = logits.to(DEVICE), state
        self.rows = torch.arange(count - 1, -1, -1, dtype=torch.int32, device=DEVICE)
        self.positions = torch.arange(position, position + count, dtype=torch.int32, device=DEVICE)
        self.work = filters.FilterWorkspace.allocate(count, logits.shape[1], torch.device(DEVICE))

    @property
    def _step(self) -> StepRows:
        state = self.state
        return StepRows(state.fields, state.lines, state.masks, self.rows, self.positions)

    def tokens(self) -> list[int]:
        return sample_tokens(self.logits, self._step, self.work).tolist()

    def expected(self) -> tuple[torch.Tensor, list[int]]:
        """Logits over the temperature after all filters [S, V], and the tokens."""
        batch, sampler = self.state.batch(self.rows, self.positions), Sampler()
        adjusted = self.state.adjust(self.logits, self.rows, self.positions)
        return sampler.filter(adjusted, batch), sampler.sample(adjusted, batch).tolist()

    def filter(self) -> None:
        """The first half of sampling."""
        filters.filter_logits(self.logits, self._step, self.work)

    def survivors(self) -> torch.Tensor:
        """What the kernels have kept, [S, V], of what they filtered or sampled last; all of it where a row has no filters."""
        fields = self.state.fields[self.rows.long()]
        adjusted = self.state.adjust(self.logits, self.rows, self.positions)
        z = adjusted / self.state.batch(self.rows, self.positions).temperature[:, None]
        ids = torch.arange(adjusted.shape[1], device=DEVICE)
        threshold, last = self.work.threshold[:, None], self.work.last[:, None]
        return (fields[:, :1] & 1 == 0) | (z > threshold) | ((z == threshold) & (ids <= last))


def spread(count: int, vocab_size: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits as models make them: a few likely tokens, and in 16 bits many ties."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, vocab_size, generator=generator)
    logits[:, :: max(vocab_size // 9, 1)] += 6
    return logits.to(dtype)


class TestFilters:
    def check(self, logits: torch.Tensor, filters: list[dict], **known: Any) -> None:
        """The kernels keep and sample what the sampler does."""
        params = [SamplingParams(**chosen) for chosen in filters]
        step = Step(logits, state_for(params, logits.shape[1], **known))
        kept, tokens = step.expected()
        assert step.tokens() == tokens
        assert torch.equal(step.survivors(), kept > -torch.inf)

    @pytest.mark.parametrize(("vocab_size", "dtype"), [
        (1, torch.float32), (5, torch.float16), (259, torch.float32), (filters.TILE + 3, torch.float16),
    ])  # fmt: skip
    def test_keeps_what_the_sampler_keeps(self, vocab_size: int, dtype: torch.dtype) -> None:
        self.check(spread(len(EVERY_FILTER), vocab_size, vocab_size, dtype), EVERY_FILTER)

    def test_ties_at_the_border(self) -> None:
        """top_k keeps all that equal the last; top_p the lower ids of them, in whatever order they were written down.

        Beside float64: the float32 sum over thousands of equal probabilities is wrong by a few of them.
        """
        vocab_size, chosen = filters.TILE + 200, [EVERY_FILTER[i] for i in (2, 3, 8, 11)]
        params = [SamplingParams(**fields) for fields in chosen for _ in range(2)]
        logits = torch.randint(0, 3, (len(params), vocab_size), generator=torch.manual_seed(1)).float()
        logits[::2] = 0  # one level, where the others have three
        step = Step(logits, state_for(params, vocab_size))
        batch = step.state.batch(step.rows, step.positions)
        kept = Sampler().filter(step.logits.double(), batch)
        step.filter()
        assert torch.equal(step.survivors(), kept > -torch.inf)

    def test_more_candidates_than_can_be_written_down(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(filters, "CAPACITY", 16)
        penalised = [chosen | {"repetition_penalty": 1.3} for chosen in FEW_FILTERS]
        self.check(spread(len(penalised), 700, 2), penalised, answer=range(0, 700, 3))

    def test_logits_of_any_size(self) -> None:
        """The smallest, then large ones below and above zero, each with three filters."""
        scale, shift = torch.tensor([[1e-3, 0.0], [30.0, -500.0], [1e4, 500.0]]).repeat_interleave(3, 0).T[..., None]
        self.check(spread(9, 300, 3) * scale + shift, FEW_FILTERS[:3] * 3)

    def test_what_is_minus_infinity_or_no_number_is_never_sampled(self) -> None:
        params = [SamplingParams(**chosen) for chosen in FEW_FILTERS]
        logits = spread(len(params), 300, 4)
        logits[:, ::2], logits[:, 1::4] = -torch.inf, torch.nan
        step = Step(logits, state_for(params, 300))
        assert all(token % 4 == 3 for token in step.tokens())
        step.logits[:] = -torch.inf
        assert all(0 <= token < 300 for token in step.tokens())

    def test_a_step_leaves_nothing_behind(self) -> None:
        """The next step, with other logits, finds what it would have found alone."""
        params = [SamplingParams(**chosen) for chosen in FEW_FILTERS[1:4]]
        state = state_for(params, 300)
        step = Step(spread(len(params), 300, 5), state)
        step.tokens()
        second = Step(spread(len(params), 300, 6), state)
        second.work = step.work
        assert second.tokens() == second.expected()[1]

    def test_plain_rows_leave_the_workspace_alone(self) -> None:
        """They write nothing, not even their thresholds."""
        step = Step(spread(3, 300, 7), state_for([SamplingParams(), SamplingParams(temperature=0.0)] * 2, 300))
        step.work.threshold.fill_(7.0)
        assert step.tokens() == step.expected()[1]
        assert (step.work.threshold == 7).all()

    @pytest.mark.gpu
    @pytest.mark.parametrize("wide", [False, True])
    def test_bfloat16_and_a_real_vocabulary(self, wide: bool) -> None:
        params = [SamplingParams(**chosen) for chosen in EVERY_FILTER] * 6
        logits = spread(len(params), 151_936, 8) * (0.2 if wide else 1)
        step = Step(logits.bfloat16(), state_for(params, 151_936))
        kept, _ = step.expected()
        step.filter()
        different = (step.survivors() != (kept > -torch.inf)).sum(1)
        assert (different <= (kept > -torch.inf).sum(1) * 1e-3).all()  # float32 sums at the threshold of top_p


class TestPenalties:
    PARAMS = (
        {},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3, "temperature": 0.0},
        {"repetition_penalty": 0.8, "frequency_penalty": -0.5, "top_k": 10},
        {"min_tokens": 8, "top_p": 0.9},
        {"allowed_token_ids": [3, 31, 32, 59], "temperature": 2.0},
        {"temperature": 2.0},
        {"allowed_token_ids": list(range(20, 33)), "top_k": 9, "logit_bias": {31: 5}},
        {"allowed_token_ids": list(range(20, 50)), "repetition_penalty": 1.5, "top_k": 5, "min_p": 0.01},
    )

    BAD_WORDS: ClassVar = {6: [[3], [11, 12], [9, 11, 13], [11, 11, 21], [12, 14]], 7: [[i] for i in range(30)]}

    @pytest.fixture
    def state(self) -> SamplerState:
        params = [SamplingParams(**chosen) for chosen in self.PARAMS]
        return state_for(
            params, 60, prompt=[5, 5, 9, 10], answer=[9, 11, 11], ends=[0, 3], bias={20: 4.0, 21: -np.inf},
            bad_words=[self.BAD_WORDS.get(i, ()) for i in range(len(params))],
        )  # fmt: skip

    @pytest.mark.parametrize("position", [0, 40])
    def test_samples_as_the_sampler_does(self, state: SamplerState, position: int) -> None:
        step = Step(spread(len(self.PARAMS), 60, position), state, position)
        assert step.tokens() == step.expected()[1]

    def test_counts_what_was_sampled(self, state: SamplerState) -> None:
        rows = torch.tensor([0, 4, 9, 9, 7], dtype=torch.int32, device=DEVICE)  # 4 has no penalty, 9 is padding
        tokens = torch.tensor([11, 0, 3, 3, 9], device=DEVICE)
        counted = torch.tensor([True, True, True, True, False], device=DEVICE)
        expected = state.lines.clone()
        expected[0, WORDS_AT + 11] += 1
        record_sampled(tokens, rows, rows, counted, state.fields, state.lines)
        assert torch.equal(state.lines, expected)
        record_sampled(tokens, rows, rows, None, state.fields, state.lines)
        assert (state.lines - expected).nonzero().tolist() == [[0, WORDS_AT + 11], [7, WORDS_AT + 9]]


class TestBadWords:
    WORDS = (
        [[3, 4], [4], [3, 3, 5]],
        [[31, 63], [31, 63, 95], [95, 95, 95, 31]],
        [[i % 60, (7 * i) % 60] for i in range(100)],
    )

    def test_forbids_as_torch_does(self) -> None:
        """Token by token, from a row that has a part of its answer already; the padding has no bad words."""
        kernel, plain = (SamplerState(3, 100, torch.device(where)) for where in (DEVICE, "cpu"))
        specs = [spec_of(SamplingParams(), [1, 2], [31, 3], i, bad_words=words) for i, words in enumerate(self.WORDS)]
        for state in (kernel, plain):
            set_rows(state, dict(enumerate(specs)))
        rows, generator = torch.tensor([2, 3, 0, 1], dtype=torch.int32), torch.Generator().manual_seed(0)
        few = torch.tensor([3, 4, 31, 63, 95])
        for position in range(4, 12):
            tokens = few[torch.randint(5, (4,), generator=generator)]
            counted = torch.randint(4, (4,), generator=generator)
            positions = torch.full((4,), position, dtype=torch.int32)
            plain.record(tokens, rows, positions, counted)
            step = [tensor.to(DEVICE) for tensor in (tokens, rows, positions, counted)]
            record_sampled(*step, kernel.fields, kernel.lines)
            assert torch.equal(kernel.lines.cpu(), plain.lines)
