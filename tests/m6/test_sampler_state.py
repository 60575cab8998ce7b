"""Fields and lines by row, in torch: what the runner hands over, what sampling makes of it, and the log-probabilities."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from folovllm.request import Sequence, sampling_spec
from folovllm.sample import sampling_row
from folovllm.sample.logprobs import gather_logprobs
from folovllm.sample.rows import SamplingRows
from folovllm.sample.sampler import Sampler
from folovllm.sample.sampler_state import SamplerState
from folovllm.sample.sampling_row import COMPLETES, COUNT, IN_PROMPT, MAX_BAD_WORDS, WORDS_AT, RowField
from folovllm.sampling_params import SamplingParams
from folovllm.step.schedule import SamplingSpec
from tests.sampling import CPU, int32, sequence, set_rows, spec_of

V = 120
EVERY_RULE = [
    {},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.0, "frequency_penalty": 0.25, "temperature": 0.0},
    {"repetition_penalty": 0.5, "frequency_penalty": -2.0, "top_k": 5, "top_p": 0.8},
    {"min_tokens": 4, "stop_token_ids": [7], "min_p": 0.01},
    {"min_tokens": 3},
    {"allowed_token_ids": [1, 31, 32, 64, 119], "presence_penalty": 1.5},
    {"allowed_token_ids": [77, 3], "temperature": 0.0},
    {"logit_bias": {7: 3.3, 8: -100, 119: 100}, "repetition_penalty": 1.3},
    {"logit_bias": {7: 3.3, 8: -1}, "bad_words": [[7], [8, 9]], "allowed_token_ids": [7, 8, 9], "temperature": 0.0},
    {"bad_words": [[1, 2], [2], [31, 31], [31, 31, 31], [31, 63, 95]], "allowed_token_ids": [1, 2, 31, 63, 95]},
]


def mask_of(allowed: Iterable[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """The token bitmask [ceil(V / 32)] in which only the bits of `allowed` are set."""
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask.view(np.int32)


def sequences(rules: list[dict], answer: list[int]) -> list[Sequence]:
    """Their `bad_words` are tokens, which the engine makes of texts."""
    params = [SamplingParams(**{name: x for name, x in rule.items() if name != "bad_words"}) for rule in rules]
    words = [rule.get("bad_words", ()) for rule in rules]
    return [sequence(p, [10, 11, 12], answer, ends=[99], bad_words=w) for p, w in zip(params, words, strict=True)]


def state_for(seqs: list[Sequence], rows: list[int], num_rows: int = 11) -> SamplerState:
    return set_rows(SamplerState(num_rows, V, CPU), specs_by_row(seqs, rows))


def specs_by_row(seqs: list[Sequence], rows: list[int]) -> dict[int, SamplingSpec]:
    return dict(zip(rows, map(sampling_spec, seqs), strict=True))


class TestSamplerState:
    ROWS = (5, 0, 7, 2, 1, 3, 4, 6, 9, 8, 10)

    def test_samples_as_from_the_sequences(self) -> None:
        """The words as the answer grows are those of a row that is filled from all tokens anew, as after preemption, at each step."""
        seqs = sequences(EVERY_RULE, [])
        state, rows = state_for(seqs, list(self.ROWS)), int32(*self.ROWS)
        for step in range(12):
            logits = 3 * torch.randn(len(seqs), V, generator=torch.manual_seed(step))
            positions = torch.tensor([seq.num_tokens for seq in seqs], dtype=torch.int32)
            anew = SamplingRows(len(seqs), V, CPU, Sampler())
            anew.set({row: sampling_spec(seq) for row, seq in enumerate(seqs)})
            fresh = state_for(seqs, list(self.ROWS))
            adjusted, expected = (one.adjust(logits, rows, positions) for one in (state, fresh))
            assert torch.equal(adjusted, expected)
            tokens = state.sample(logits, rows, positions)
            sampled = anew.sample(logits, range(len(seqs)), positions.tolist())
            assert tokens.tolist() == sampled.token_ids
            state.record(tokens, rows, positions)
            for seq, token in zip(seqs, tokens.tolist(), strict=True):
                seq.append_token(token)

    def test_a_mask_is_that_of_a_sample(self) -> None:
        """By its place in the step, whatever its row. It stays until it is replaced, or a call brings others."""
        state = SamplerState(4, V, CPU)
        set_rows(state, {row: SamplingSpec(temperature=0.0, has_grammar=row != 1) for row in (0, 3, 1)})
        logits, rows, positions = torch.zeros(3, V), int32(0, 3, 1), int32(3, 3, 3)
        one, other = (torch.from_numpy(mask_of(ids, V))[None] for ids in ([9], [40, 119]))
        state.set_masks(int32(0, 1, 2), one.expand(3, -1))
        assert state.sample(logits, rows, positions).tolist() == [9, 9, 0], "a row without a grammar has no mask"
        state.set_masks(int32(1), other)
        for _ in range(2):
            assert state.sample(logits, rows, positions).tolist() == [9, 40, 0]
        assert state.sample(logits, rows, positions, masks=torch.cat([other, one, one])).tolist() == [40, 9, 0]

    @settings(max_examples=20)
    @given(st.lists(st.sets(st.integers(0, V - 1)), min_size=1, max_size=4))
    def test_masks_hold_every_token(self, allowed: list[set[int]]) -> None:
        masks, rows = torch.from_numpy(np.stack([mask_of(ids, V) for ids in allowed])), int32(*range(len(allowed)))
        state = SamplerState(len(allowed), V, CPU)
        set_rows(state, {row: SamplingSpec(has_grammar=True) for row in rows.tolist()})
        adjusted = state.adjust(torch.zeros(len(allowed), V), rows, rows, masks)
        assert [set((row == 0).nonzero().flatten().tolist()) for row in adjusted] == allowed

    def test_a_new_owner_finds_nothing_of_the_old(self) -> None:
        state = state_for(sequences([EVERY_RULE[1]] * 2, [4, 5]), [0, 1])
        other = state.lines[1].clone()
        set_rows(state, specs_by_row(sequences([{"presence_penalty": 1.0}], []), [0]))
        assert state.lines[0].nonzero().flatten().tolist() == [WORDS_AT + token for token in (10, 11, 12)]
        assert torch.equal(state.lines[1], other)
        set_rows(state, specs_by_row(sequences([{}], []), [0]))  # plain: its words are not read, and need no clearing
        assert state.fields[0, RowField.FLAGS] == 0

    def test_tokens_go_where_they_are_wanted(self) -> None:
        state = state_for(sequences([{"temperature": 0.0}] * 2, []), [3, 1])
        out, keep = torch.full((5,), -1), torch.full((9,), -1)
        logits = torch.eye(V)[[17, 40, 0]].half()
        tokens = state.sample(logits, int32(3, 1, 8), int32(3, 3, 0), out, keep)  # the last is padding
        assert tokens.tolist() == [17, 40, 0] == out[:3].tolist()
        assert keep.tolist() == [-1, 40, -1, 17, -1, -1, -1, -1, 0]
        assert logits.equal(torch.eye(V)[[17, 40, 0]].half())

    def test_only_tokens_of_the_answer_are_counted_and_a_count_ends(self) -> None:
        state = state_for(sequences([EVERY_RULE[1], EVERY_RULE[1], {}], []), [0, 1, 2])
        words = state.lines[:, WORDS_AT:]
        words[0, 50] = IN_PROMPT | COUNT
        state.record(torch.tensor([50, 50, 50]), int32(0, 1, 2), int32(9, 9, 9), torch.tensor([True, False, True]))
        assert words[:3, 50].tolist() == [IN_PROMPT | COUNT, 0, 0]
        state.record(torch.tensor([50, 51]), int32(1, 0), int32(10, 9))
        assert words[:2, 50:52].tolist() == [[IN_PROMPT | COUNT, 1], [1, 0]]


BAD_WORDS = st.lists(st.lists(st.integers(30, 33), min_size=1, max_size=5), min_size=1, max_size=6)


class TestBadWords:
    def forbidden(self, state: SamplerState, row: int) -> set[int]:
        return set((state.lines[row, WORDS_AT : WORDS_AT + V] & COMPLETES).nonzero().flatten().tolist())

    @settings(max_examples=50)
    @given(BAD_WORDS, st.lists(st.integers(30, 33), max_size=20), st.integers(0, 20))
    def test_what_would_end_one_is_forbidden(self, words: list[list[int]], answer: list[int], known: int) -> None:
        """Whether the host knew the tokens when the row got its owner, or the device drew them: the same are forbidden."""
        known = min(known, len(answer))
        spec = spec_of(SamplingParams(), [30, 31, 32, 33], answer[:known], bad_words=words)
        state = SamplerState(1, V, CPU)
        state.lines.fill_(-1)  # what the row held before
        set_rows(state, {0: spec})
        for n in range(known, len(answer) + 1):
            expected = {word[-1] for word in words if ends_with([*answer[:n]], word[:-1])}
            assert self.forbidden(state, 0) == expected == set(sampling_row.about_to_end(words, answer[:n]))
            if n < len(answer):
                state.record(torch.tensor(answer[n : n + 1]), int32(0), int32(4 + n))

    def test_as_many_and_as_long_as_fit(self) -> None:
        """One word takes all the room, behind an answer that is longer than what is kept of it; then many short ones."""
        longest = [(7 * i) % V for i in range(sampling_row.MAX_BAD_TOKENS)]
        state, answer = SamplerState(1, V, CPU), [5, *longest[:-2]]
        for words, expected in (
            ([longest], {longest[-1]}),
            ([[longest[-2], i % V, 3] for i in range(MAX_BAD_WORDS - 1)] + [[9]], {9}),
        ):
            set_rows(state, {0: spec_of(SamplingParams(), [8], answer, bad_words=words)})
            assert self.forbidden(state, 0) == set() | ({9} & expected)
            state.record(torch.tensor([longest[-2]]), int32(0), int32(1 + len(answer)))
            assert self.forbidden(state, 0) == expected


def ends_with(answer: list[int], run: list[int]) -> bool:
    return not run or (len(run) <= len(answer) and answer[len(answer) - len(run) :] == run)


class TestLogprobs:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_sampled_token_then_the_most_likely(self, dtype: torch.dtype) -> None:
        logits = torch.randn(2, V, generator=torch.manual_seed(0)).to(dtype)
        found = gather_logprobs(logits, torch.tensor([19, 7]), 4).to_host()
        for i, token in enumerate([19, 7]):
            logprobs = logits[i].float().log_softmax(-1)
            order = sorted(range(V), key=lambda t, i=i: (-float(logits[i, t]), t))
            ids, values, ranks = zip(*found.of(i, 4), strict=True)
            assert ids == (token, *order[:4])
            assert values == pytest.approx(logprobs[list(ids)].tolist())
            assert ranks == (int((logprobs >= logprobs[token]).sum()), 1, 2, 3, 4)
            assert found.of(i, 2) == found.of(i, 4)[:3]

    def test_ties_take_the_lowest_id_and_a_small_vocabulary_has_no_more(self) -> None:
        found = gather_logprobs(torch.tensor([[-1.0, 2.0, -1.0]]), torch.tensor([2]), 5)
        assert [(id_, rank) for id_, _, rank in found.of(0, 5)] == [(2, 3), (1, 1), (0, 2), (2, 3)]
