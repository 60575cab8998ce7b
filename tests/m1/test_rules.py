"""What a request allows, forbids or makes likelier: beside transformers' processors, and in answers."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor

from folovllm.engine.bad_words import bad_word_tokens
from folovllm.engine.llm_engine import LLMEngine
from folovllm.sample.rows import SamplingRows
from folovllm.sample.sampler import Sampler
from folovllm.sample.sampling_row import MAX_BAD_TOKENS
from folovllm.sampling_params import SamplingParams
from folovllm.step.schedule import SamplingSpec
from tests.helpers import tiny_checkpoint, tiny_tokenizer
from tests.sampling import adjusted, state_of
from tests.workloads import make_engine

V = 70
CPU = torch.device("cpu")
TOKENS = st.integers(0, V - 1)
FEW = st.integers(3, 5)  # so that words do occur


def ruled(logits: torch.Tensor, spec: SamplingSpec) -> torch.Tensor:
    """What the rules of a request make of the logits [V] of its next token."""
    return adjusted(logits[None], state_of(spec, vocab_size=len(logits)), [len(spec.history)])[0]


class TestRules:
    def test_a_worked_case(self) -> None:
        """Of the tokens 1, 2 and 3, 2 is forbidden behind 5, and 3 gets half a point."""
        spec = SamplingSpec(
            allowed=(1, 2, 3), bad_words=((5, 2),), bias=((3, 0.5),), history=np.array([9, 5], np.int32)
        )
        out = ruled(torch.zeros(6), spec)
        assert out.tolist() == [-np.inf, 0, -np.inf, 0.5, -np.inf, -np.inf]

    @settings(max_examples=40)
    @given(st.lists(st.lists(FEW, min_size=1, max_size=4), min_size=1, max_size=5), st.lists(FEW, max_size=9))
    def test_bad_words_as_transformers_does(self, words: list[list[int]], answer: list[int]) -> None:
        """Its processor looks into the prompt, too; ours, as vLLM's, at the answer alone: so here is no prompt."""
        reference, ids = NoBadWordsLogitsProcessor(words, eos_token_id=None), torch.tensor([answer], dtype=torch.int64)
        theirs = reference(ids, torch.zeros(1, V))[0]
        spec = SamplingSpec(bad_words=tuple(map(tuple, words)), history=np.array(answer, np.int32))
        assert torch.equal(ruled(torch.zeros(V), spec), theirs)
        prompt = SamplingSpec(bad_words=spec.bad_words, history=spec.history, num_prompt_tokens=len(answer))
        never = set(ruled(torch.zeros(V), prompt).isneginf().nonzero().flatten().tolist())
        assert never == {word[0] for word in words if len(word) == 1}

    @settings(max_examples=40)
    @given(st.dictionaries(TOKENS, st.floats(-100, 100), min_size=1, max_size=6))
    def test_bias_as_transformers_does(self, bias: dict[int, float]) -> None:
        logits = torch.randn(1, V)
        reference = SequenceBiasLogitsProcessor([[[t], float(np.float16(x))] for t, x in bias.items()])
        theirs = reference(torch.zeros(1, 0, dtype=torch.int64), logits)
        assert torch.allclose(ruled(logits[0], SamplingSpec(bias=tuple(bias.items()))), theirs[0])

    @settings(max_examples=40)
    @given(st.sets(TOKENS, min_size=1))
    def test_what_is_allowed_keeps_its_logit(self, allowed: set[int]) -> None:
        logits = torch.randn(V)
        out = ruled(logits, SamplingSpec(allowed=tuple(allowed)))
        assert set(out.isfinite().nonzero().flatten().tolist()) == allowed
        assert torch.equal(out[list(allowed)], logits[list(allowed)])

    def test_in_the_order_of_vllm(self) -> None:
        """A penalty looks at the biased logit; what is forbidden stays so, whatever is added to it."""
        history = np.array([0], np.int32)
        spec = SamplingSpec(
            temperature=0.0, bias=((0, 4.0), (2, 100.0)), allowed=(0, 1), repetition_penalty=2.0, history=history
        )
        logits = torch.tensor([-1.0, 1.25, 9.0])
        assert ruled(logits, spec).tolist() == [1.5, 1.25, -np.inf]
        rows = SamplingRows(1, 3, CPU, Sampler())
        rows.set({0: spec})
        assert rows.sample(logits[None], [0], [1]).token_ids == [0]

    def test_the_next_owner_of_a_row_has_its_own(self) -> None:
        rows = SamplingRows(2, V, CPU, Sampler())
        rows.set({0: SamplingSpec(temperature=0.0, allowed=(3,)), 1: SamplingSpec(temperature=0.0, bias=((4, 9.0),))})
        assert rows.sample(torch.zeros(2, V), [0, 1], [5, 5]).token_ids == [3, 4]
        rows.set({0: SamplingSpec(temperature=0.0), 1: SamplingSpec(temperature=0.0)})
        assert rows.sample(torch.zeros(2, V), [0, 1], [5, 5]).token_ids == [0, 0]
        rows.set({1: SamplingSpec(temperature=0.0, bias=((4, 9.0),))})
        assert rows.sample(torch.zeros(2, V), [0, 1], [5, 5]).token_ids == [0, 4], "also beside one that has rules"


class TestBadWords:
    def test_at_the_start_and_after_a_space(self) -> None:
        """Where the space is a token of its own, the second way is the first one behind it."""
        assert bad_word_tokens(tiny_tokenizer(), ["ab", " ab", "c"]) == ((64, 65), (66,))

    def test_other_tokens_after_a_space(self) -> None:
        class Words:
            def encode(self, text: str, add_special_tokens: bool) -> list[int]:
                assert not add_special_tokens
                return {"cat": [1, 2], " cat": [3], "dog": [4], " dog": [5], "a b": [6, 7], " a b": [8, 7]}[text]

        found = bad_word_tokens(Words(), ["cat", " dog", "a b", "dog"])
        assert found == ((1, 2), (3,), (4,), (5,), (6, 7), (8, 7))

    @pytest.mark.parametrize("words", [["x"] * 129, ["x" * (1 + MAX_BAD_TOKENS)], [f"{i:03}" * 3 for i in range(120)]])
    def test_too_many(self, words: list[str]) -> None:
        with pytest.raises(ValueError, match="bad_words are too many: at most 128 ways to write them, with 1024"):
            bad_word_tokens(tiny_tokenizer(), words)


@pytest.fixture(scope="module", params=["hf", "native"])
def engine(request: pytest.FixtureRequest) -> LLMEngine:
    return make_engine(tiny_checkpoint(), milestone="m1", model_impl=request.param)


class TestAnswers:
    LETTERS = (64, 65, 66)  # a, b, c

    def ask(self, engine: LLMEngine, **fields: Any) -> tuple[str, list[int]]:
        params = SamplingParams(**{"max_tokens": 25, "ignore_eos": True, "temperature": 8.0, "seed": 3} | fields)
        output = engine.generate([[5, 6, 7]], params)[0]
        return output.outputs[0].text, output.outputs[0].token_ids

    def test_no_bad_word(self, engine: LLMEngine) -> None:
        words = ["ab", "cca", "bcb", "aaaa"]
        text, _ = self.ask(engine, allowed_token_ids=list(self.LETTERS))
        assert {*text} == {*"abc"} and any(word in text for word in words)
        text, _ = self.ask(engine, allowed_token_ids=list(self.LETTERS), bad_words=words)
        assert len(text) == 25 and not any(word in text for word in words)

    def test_a_bias_moves_the_choice(self, engine: LLMEngine) -> None:
        assert self.ask(engine, temperature=0, logit_bias={17: 100})[1] == [17] * 25
        assert 17 not in self.ask(engine, logit_bias={17: -100})[1]
