"""Snippets of the texts that this course grew from run with their import line changed at most."""

from __future__ import annotations

import pytest

from folovllm.outputs import RequestOutput
from tests.helpers import tiny_checkpoint

PATH = str(tiny_checkpoint())


@pytest.fixture(autouse=True)
def m1_is_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("folovllm.config.LATEST", "m1")


def test_engine_with_a_model_config() -> None:
    from folovllm import LLMEngine, ModelConfig, SamplingParams

    engine = LLMEngine(ModelConfig(model=PATH, dtype="float32"), device="cpu")
    params = SamplingParams(temperature=0, max_tokens=4)
    output = engine.generate("Hello", params)
    assert isinstance(output, RequestOutput), "one prompt, one output"
    outputs = engine.generate(["Hello", "Hi"], params)
    assert isinstance(outputs, list) and len(outputs) == 2, "a list for a list"
    assert isinstance(engine.generate(["Hello"], params), list)
    assert isinstance(engine.generate([5, 6, 7], params), RequestOutput), "token ids are one prompt"
    assert output["token_ids"] == outputs[0]["token_ids"] == output.outputs[0].token_ids


def test_engine_takes_the_fields_of_the_config() -> None:
    from folovllm.compat import LLMEngine, ModelConfig, SamplingParams

    config = ModelConfig(model=PATH, dtype="float32", max_model_len=16, trust_remote_code=True)
    output = LLMEngine(config, device="cpu", model_impl="native").generate("Hello", SamplingParams(max_tokens=99))
    assert isinstance(output, RequestOutput)
    assert output.metrics.num_prompt_tokens + output.metrics.num_generated_tokens <= 16


def test_llm_as_nano_vllm_has_it() -> None:
    from folovllm import LLM, SamplingParams

    llm = LLM(PATH, enforce_eager=True, tensor_parallel_size=1)
    params = SamplingParams(temperature=0.6, max_tokens=8)
    outputs = llm.generate(["Hello, Nano-vLLM."], params)
    assert outputs[0]["text"] == outputs[0].outputs[0].text
    assert outputs[0]["token_ids"] == outputs[0].outputs[0].token_ids
    assert outputs[0].metrics["ttft"] == outputs[0].metrics.ttft


def test_dictionary_access_knows_what_it_does_not_know() -> None:
    from folovllm import LLM, SamplingParams

    output = LLM(PATH, use_tqdm=False).generate("Hello", SamplingParams(max_tokens=2), use_tqdm=False)[0]
    for record, name in ((output, "nonsense"), (output, "_field"), (output.metrics, "nonsense")):
        with pytest.raises(KeyError):
            record[name]
    assert output["request_id"] == output.request_id and output["finish_reason"] == "length"
