"""Log-probabilities of prompts: transformers' own, at every preset, in chunks, after preemption. Of two ranks: `test_tensor_parallel.py`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from folovllm.engine.llm_engine import LLMEngine
from folovllm.models.llama import LlamaForCausalLM
from folovllm.outputs import RequestOutput
from folovllm.sample import logprobs
from folovllm.sampling_params import RequestOutputKind, SamplingParams
from folovllm.worker.hf_model_runner import HFModelRunner
from tests.helpers import hf_logits, prompts, tiny_checkpoint
from tests.workloads import Request, make_engine, serve

GREEDY = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
ENGINES: dict[str, dict[str, Any]] = {
    "m1": {"max_num_seqs": None},
    "m1, our model": {"model_impl": "native", "max_num_seqs": None},
    "m2": {},
    "m3, preemption": {"block_size": 4, "num_kv_blocks": 34},
    "m5, chunks": {"max_num_batched_tokens": 14, "long_prefill_token_threshold": 9},
    "m6": {},
    "m6, preemption and chunks": {"block_size": 4, "num_kv_blocks": 34, "max_num_batched_tokens": 14},
    "m6, one step at a time": {"async_scheduling": False},
}


def engine(name: str, **more: Any) -> LLMEngine:
    return make_engine(tiny_checkpoint(), **{"milestone": name[:2], "max_num_seqs": 24} | ENGINES[name] | more)


def requests() -> list[Request]:
    """Each prompt twice, so that the second finds it in the cache; some ask, with and without more of their answer."""
    params = [replace(GREEDY, prompt_logprobs=(0, 2, None)[i % 3], logprobs=(None, 1)[i % 2]) for i in range(12)]
    return [Request(p, own) for p, own in zip(prompts([1, 40, 9, 17, 33, 3], seed=11) * 2, params, strict=True)]


def check(output: RequestOutput, prompt: list[int], count: int | None, family: str = "qwen3") -> None:
    if count is None:
        assert output.prompt_logprobs is None
        return
    first, *rows = output.prompt_logprobs or [{}]
    expected = hf_logits(tiny_checkpoint(family), prompt).float().log_softmax(-1)  # [T, V]
    assert first is None and len(rows) == len(prompt) - 1
    for row, token, own in zip(rows, prompt[1:], expected, strict=False):
        chosen, *others = row.values()
        assert (chosen.token_id, chosen.decoded_token is None) == (token, False)
        assert chosen.rank == pytest.approx(int((own > own[token] + 1e-3).sum()) + 1, abs=2)  # of nearly equal ones any
        top = own.topk(count).values.tolist()
        assert sorted((x.logprob for x in row.values()), reverse=True)[:count] == pytest.approx(top, abs=1e-3)
        assert all(x.logprob == pytest.approx(float(own[x.token_id]), abs=1e-3) for x in row.values())
        assert len(row) - count in (0, 1) and len(others) <= count


@pytest.mark.parametrize("name", ENGINES)
def test_they_are_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All prompts are in the cache, from answers without scores."""
    monkeypatch.setattr(logprobs, "SCORED_AT_ONCE", 5 * 259)
    served = engine(name)
    plain = [replace(request, params=GREEDY) for request in requests()]
    answers = [output.outputs[0].token_ids for output in serve(served, plain)]
    for output, request, answer in zip(serve(served, requests()), requests(), answers, strict=True):
        check(output, request.prompt, request.params.prompt_logprobs)
        assert output.outputs[0].token_ids == answer
        assert (output.outputs[0].logprobs is None) == (request.params.logprobs is None)
        assert len(output.outputs[0].logprobs or answer) == len(answer)
    assert (served.stats().preemptions > 0) == ("preemption" in name)
    served.close()


def noting(own: Callable[..., torch.Tensor], sizes: list[int]) -> Callable[..., torch.Tensor]:
    """`own`, which makes logits; of how many tokens, goes to `sizes`."""

    def noted(*args: Any) -> torch.Tensor:
        logits = own(*args)
        sizes.append(logits.numel() // 259)
        return logits

    return noted


@pytest.mark.parametrize("name", ["m1", "m1, our model", "m2", "m6"])
def test_logits_of_a_few_tokens_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the prompt is: logits [T, V] of a real vocabulary take more memory than the model."""
    monkeypatch.setattr(logprobs, "SCORED_AT_ONCE", 7 * 259)
    served, sizes = engine(name), []
    for owner, method in ((LlamaForCausalLM, "compute_logits"), (HFModelRunner, "_logits")):
        monkeypatch.setattr(owner, method, noting(getattr(owner, method), sizes))
    (prompt,) = prompts([60], seed=3)
    (output,) = serve(served, [Request(prompt, replace(GREEDY, prompt_logprobs=1))])
    check(output, prompt, 1)
    assert max(sizes) == 7 and 60 + 4 <= sum(sizes) <= 60 + 5  # of the prompt's, and of each draw; a graph is captured


def test_what_is_cached_is_computed_again_and_what_was_scored_is_not() -> None:
    served = engine("m6")
    (prompt,) = prompts([40], seed=4)
    serve(served, [Request(prompt, GREEDY)])
    scored, plain = serve(served, [Request(prompt, replace(GREEDY, prompt_logprobs=0)), Request(prompt, GREEDY)])
    assert (scored.num_cached_tokens, plain.num_cached_tokens) == (0, 32)
    check(scored, prompt, 0)


def test_several_answers_and_streams() -> None:
    """One row of the prompt's for all answers; in deltas they come once."""
    served = engine("m6", max_num_batched_tokens=14)
    (prompt,) = prompts([40], seed=5)
    params = replace(GREEDY, prompt_logprobs=1, n=3, temperature=1.0, seed=1)
    (output,) = serve(served, [Request(prompt, params)])
    check(output, prompt, 1)
    assert len(output.outputs) == 3
    for kind, times in ((RequestOutputKind.DELTA, 1), (RequestOutputKind.CUMULATIVE, None)):
        served.add_request("r", prompt, replace(params, output_kind=kind))
        shown = []
        while served.has_unfinished_requests():
            shown += [output.prompt_logprobs is not None for output in served.step()]
        assert shown[-1] == (times is None) and sum(shown) == (times or sum(shown)) and any(shown)


def test_as_many_as_the_engine_gives() -> None:
    served = engine("m6", max_logprobs=3)
    with pytest.raises(ValueError, match="prompt_logprobs is 4"):
        served.add_request("r", [1, 2], SamplingParams(prompt_logprobs=4))
    with pytest.raises(ValueError, match="prompt_logprobs must be 0 or more"):
        SamplingParams(prompt_logprobs=-1)
    assert SamplingParams(prompt_logprobs=True).prompt_logprobs == 1
