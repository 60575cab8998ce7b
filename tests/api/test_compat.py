"""Snippets of the texts that this course grew from run with their import line changed at most."""

from __future__ import annotations

import pytest

from folovllm.outputs import RequestOutput
from tests.helpers import tiny_checkpoint
from tests.workloads import run_to_end

PATH = str(tiny_checkpoint())


@pytest.fixture(autouse=True, params=["m1", pytest.param("m6", marks=pytest.mark.m6)])
def latest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippets name no milestone: they run on the first, as when the texts were written, and on today's."""
    monkeypatch.setattr("folovllm.config.LATEST", request.param)


def test_engine_with_a_model_config() -> None:
    from folovllm import EngineConfig, LLMEngine, ModelConfig, SamplingParams

    with pytest.raises(ValueError, match="put device into it"):
        LLMEngine(EngineConfig(model=PATH), device="cpu")
    engine = LLMEngine(ModelConfig(model=PATH, dtype="float32", max_model_len=16, trust_remote_code=True), device="cpu")
    params = SamplingParams(temperature=0, max_tokens=4)
    assert len(engine.generate("Hello", SamplingParams(max_tokens=99))["token_ids"]) <= 11, "5 of 16 are the prompt's"
    output = engine.generate("Hello", params)
    assert isinstance(output, RequestOutput), "one prompt, one output"
    outputs = engine.generate(["Hello", "Hi"], params)
    assert isinstance(outputs, list) and len(outputs) == 2, "a list for a list"
    assert isinstance(engine.generate(["Hello"], params), list)
    assert isinstance(engine.generate([5, 6, 7], params), RequestOutput), "token ids are one prompt"
    assert output["token_ids"] == outputs[0]["token_ids"] == output.outputs[0].token_ids


def test_llm_as_nano_vllm_has_it() -> None:
    from folovllm import LLM, SamplingParams

    llm = LLM(PATH, enforce_eager=True, tensor_parallel_size=1)
    params = SamplingParams(temperature=0.6, max_tokens=8)
    outputs = llm.generate(["Hello, Nano-vLLM."], params)
    assert outputs[0]["text"] == outputs[0].outputs[0].text
    assert outputs[0]["token_ids"] == outputs[0].outputs[0].token_ids
    metrics = outputs[0].metrics
    assert metrics["ttft"] == metrics.ttft and metrics["tpot"] == metrics.tpot
    assert metrics["total_time"] == metrics.latency and metrics["throughput"] == metrics.tokens_per_second > 0


def test_what_nano_vllm_calls_otherwise_is_named() -> None:
    from folovllm.compat import LLM

    with pytest.raises(ValueError, match="say block_size"):
        LLM(PATH, kvcache_block_size=256)
    with pytest.raises(ValueError, match="say num_kv_blocks"):
        LLM(PATH, num_kvcache_blocks=8)
    LLM(PATH, num_kvcache_blocks=-1, use_tqdm=False).close()  # its own default: as many as fit


def test_return_outputs() -> None:
    from folovllm.compat import LLMEngine, ModelConfig, SamplingParams

    engine, params = LLMEngine(ModelConfig(model=PATH)), SamplingParams(max_tokens=3)
    assert engine.generate("Hello", params, return_outputs=True)["finish_reason"] == "length"  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="return_outputs=False is not supported here"):
        engine.generate("Hello", params, return_outputs=False)  # type: ignore[call-overload]


def test_requests_and_steps_are_the_engines() -> None:
    """nano-vLLM numbers its requests itself and steps its `LLM`: here each has a name, and `LLM.engine` steps."""
    from folovllm.compat import LLM, SamplingParams

    engine, params = LLM(PATH, use_tqdm=False).engine, SamplingParams(temperature=0, max_tokens=3, logprobs=0)
    with pytest.raises(ValueError, match="a prompt is a string"):
        engine.add_request("Hello", params)  # type: ignore[arg-type]
    engine.add_request("0", "Hello", params)
    answer = run_to_end(engine)[-1].outputs[0]
    assert answer.logprobs is not None and len(answer.token_ids) == 3
    assert answer.cumulative_logprob == pytest.approx(
        sum(row[token].logprob for row, token in zip(answer.logprobs, answer.token_ids, strict=True))
    )


def test_dictionary_access_knows_what_it_does_not_know() -> None:
    from folovllm import LLM, SamplingParams

    output = LLM(PATH, use_tqdm=False).generate("Hello", SamplingParams(max_tokens=2), use_tqdm=False)[0]
    for record, name in ((output, "nonsense"), (output, "_field"), (output.metrics, "nonsense")):
        with pytest.raises(KeyError):
            record[name]
    assert output["request_id"] == output.request_id and output["finish_reason"] == "length"
