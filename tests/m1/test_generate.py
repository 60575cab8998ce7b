"""M1's answers: those of transformers' own `generate`, the softmax's, and a seed's, whatever runs beside."""

import copy
import pickle
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from itertools import pairwise

import pytest
import torch

from folovllm import LLM, SamplingParams
from folovllm.outputs import RequestOutput
from tests import helpers
from tests.helpers import assert_tokens_equal, assert_varied, hf_greedy, hf_logits, hf_model, prompts, tiny_checkpoint
from tests.workloads import run_to_end

PATH = tiny_checkpoint()
MIXED = prompts([1, 2, 3, 7, 16, 150])
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, max_tokens=8, seed=7, ignore_eos=True)


@pytest.fixture(scope="module", params=["hf", "native"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(PATH), milestone="m1", model_impl=request.param, use_tqdm=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def hf() -> Iterator[LLM]:
    with LLM(str(PATH), milestone="m1", use_tqdm=False) as llm:
        yield llm


def run(llm: LLM, prompts: object, params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def hf_generate(prompt: list[int], **options: object) -> list[int]:
    """transformers' own loop. Without the mask it would take id 0 in a prompt for padding."""
    ids = torch.tensor([prompt])
    model = hf_model(PATH)
    options |= {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answer: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    return answer


@cache
def _greedily(prompt: tuple[int, ...]) -> tuple[list[int], torch.Tensor]:
    return hf_greedy(PATH, prompt, 12)


def greedily(prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """transformers' tokens and their logits."""
    return _greedily(tuple(prompt))


def test_greedy_and_its_text(llm: LLM) -> None:
    outputs = run(llm, MIXED, GREEDY)
    assert_varied(tokens(outputs)[3:])
    for prompt, output in zip(MIXED, outputs, strict=True):
        assert_tokens_equal(output["token_ids"], *greedily(prompt))
        assert output["text"] == llm.tokenizer.decode(output["token_ids"], skip_special_tokens=True)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_is_transformers_generate_token_for_token(hf: LLM, penalty: float) -> None:
    outputs = tokens(run(hf, MIXED, replace(GREEDY, repetition_penalty=penalty)))
    assert outputs == [hf_generate(prompt, repetition_penalty=penalty) for prompt in MIXED]


def test_draws_follow_the_models_softmax(hf: LLM) -> None:
    """200 first tokens of one prompt against top_k = 6 of the reference's softmax."""
    params = [SamplingParams(n=50, temperature=2.0, top_k=6, max_tokens=1, seed=seed) for seed in range(4)]
    drawn = torch.tensor(tokens(run(hf, [MIXED[4]] * 4, params))).flatten()
    values, ids = (hf_logits(PATH, MIXED[4])[-1] / 2.0).topk(6)
    counts = drawn.bincount(minlength=helpers.VOCAB_SIZE)[ids].double()
    assert counts.sum() == 200
    expected = values.softmax(0).double() * 200
    assert ((counts - expected).square() / expected).sum() < 20.5  # 5 degrees of freedom, p = 0.001


def test_a_seed_gives_the_same_tokens_alone_and_among_others(llm: LLM) -> None:
    alone = [tokens(run(llm, p, replace(SAMPLED, seed=i)))[0] for i, p in enumerate(MIXED[:3])]
    together = run(llm, MIXED[:3], [replace(SAMPLED, seed=i) for i in range(3)])
    assert tokens(together) == alone
    backwards = run(llm, MIXED[2::-1], [replace(SAMPLED, seed=i) for i in range(2, -1, -1)])
    assert tokens(backwards) == alone[::-1]


def test_requests_without_a_seed_draw_their_own(hf: LLM) -> None:
    outputs = tokens(run(hf, [MIXED[3]] * 3, replace(SAMPLED, seed=None)))
    assert len({tuple(o) for o in outputs}) == 3
    fresh = [LLM(str(PATH), milestone="m1", seed=5, use_tqdm=False) for _ in range(2)]
    one, other = (tokens(run(llm, MIXED[3], replace(SAMPLED, seed=None))) for llm in fresh)
    assert one == other, "the engine's seed decides what they draw"


def test_n_answers_differ_and_the_first_is_that_of_n_1(llm: LLM) -> None:
    (output,) = run(llm, MIXED[3], replace(SAMPLED, n=3))
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    assert output["token_ids"] == tokens(run(llm, MIXED[3], SAMPLED))[0]
    assert output.metrics.num_generated_tokens == 24


def test_logprobs_are_the_references(llm: LLM) -> None:
    (output,) = run(llm, MIXED[3], replace(GREEDY, max_tokens=6, logprobs=3))
    answer = output.outputs[0]
    assert answer.logprobs is not None and len(answer.logprobs) == 6
    reference = hf_logits(PATH, [*MIXED[3], *answer.token_ids])[len(MIXED[3]) - 1 :].log_softmax(-1)
    for token, row, expected in zip(answer.token_ids, answer.logprobs, reference[:6], strict=True):
        assert list(row) == expected.topk(3).indices.tolist() and next(iter(row)) == token
        assert [entry.rank for entry in row.values()] == [1, 2, 3]
        assert [e.logprob for e in row.values()] == pytest.approx([float(expected[id_]) for id_ in row], abs=1e-3)
        assert row[token].decoded_token == llm.tokenizer.decode([token])
    total = sum(r[t].logprob for r, t in zip(answer.logprobs, answer.token_ids, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total)
    assert run(llm, MIXED[3], replace(GREEDY, max_tokens=1))[0].outputs[0].cumulative_logprob is None


class TestStreaming:
    def stream(self, llm: LLM, params: SamplingParams) -> list[RequestOutput]:
        llm.engine.add_request("s", "Once upon a time", params)
        return run_to_end(llm.engine)

    def test_deltas_add_up(self, llm: LLM) -> None:
        whole = run(llm, "Once upon a time", GREEDY)[0].outputs[0]
        outputs = self.stream(llm, GREEDY)
        assert [len(o["token_ids"]) for o in outputs] == list(range(1, 13)), "a report a token"
        parts = [o.outputs[0] for o in outputs]
        assert "".join(p.delta_text for p in parts) == whole.text == parts[-1].text
        assert [t for p in parts for t in p.delta_token_ids] == whole.token_ids
        assert [o.finished for o in outputs] == [False] * 11 + [True]
        assert [p.finish_reason for p in parts] == [None] * 11 + ["length"]
        for before, after in pairwise(parts):
            assert after.text.startswith(before.text), "text was taken back"
        assert [o.metrics.num_generated_tokens for o in outputs] == list(range(1, 13)), "what was handed out changed"
        assert outputs[0].metrics.finish_time is None

    def test_what_was_handed_out_can_be_sent_and_compared(self, llm: LLM) -> None:
        outputs = self.stream(llm, replace(GREEDY, logprobs=1, max_tokens=4))
        for output in outputs:
            assert pickle.loads(pickle.dumps(output)) == output == copy.deepcopy(output)
        assert asdict(outputs[1])["outputs"][0]["token_ids"] == outputs[-1]["token_ids"][:2]
        assert "text=" in repr(outputs[0]) and outputs[0] != outputs[1]

    def test_what_was_handed_out_may_be_changed(self, llm: LLM) -> None:
        llm.engine.add_request("s", "Once upon a time", replace(GREEDY, logprobs=1))
        while llm.engine.has_unfinished_requests():
            for output in llm.engine.step():
                tokens = list(output["token_ids"])
                output.prompt_token_ids.append(0)
                output["token_ids"].clear()
                output["logprobs"].clear()
        assert tokens == run(llm, "Once upon a time", GREEDY)[0]["token_ids"]

    def test_special_tokens_where_asked_for(self, hf: LLM) -> None:
        any_token = replace(SAMPLED, temperature=50.0, top_k=-1, top_p=1.0, allowed_token_ids=[64, 65, 257, 258])
        with_special = self.stream(hf, replace(any_token, skip_special_tokens=False))[-1]
        without = self.stream(hf, any_token)[-1]
        assert with_special["token_ids"] == without["token_ids"]
        assert any(t > 255 for t in without["token_ids"]) and "<|" in with_special["text"]
        assert "<|" not in without["text"]
