"""The snippets that README and design show, as they stand there. The latest preset is M1 here."""

from __future__ import annotations

import sys

import pytest

from tests.helpers import tiny_checkpoint

MODEL = str(tiny_checkpoint())


@pytest.fixture(autouse=True)
def m1_is_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("folovllm.config.LATEST", "m1")


def test_generate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, with more tokens: the bar beside the answer, which shows both speeds, is drawn ten times a second."""
    from folovllm import LLM, SamplingParams

    llm = LLM(MODEL, milestone="m1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # elsewhere there is no bar
    out = llm.generate(["Hello", "1+1=?"], SamplingParams(temperature=0.6, max_tokens=100, ignore_eos=True))[0]
    answer = out.outputs[0]
    assert isinstance(answer.text, str) and len(answer.token_ids) == 100 and answer.finish_reason == "length"
    assert out.metrics.ttft is not None and out.metrics.ttft > 0
    shown = capsys.readouterr().err
    assert "Generating" in shown and "2/2" in shown
    assert "prefill=" in shown and "decode=" in shown and "tok/s" in shown


def test_one_string_one_list_of_ids_many_of_either() -> None:
    from folovllm import LLM, SamplingParams

    llm, params = LLM(MODEL, use_tqdm=False, max_model_len=32), SamplingParams(temperature=0, max_tokens=4)
    ids = llm.tokenizer.encode("Hello")
    results = [llm.generate(p, params, use_tqdm=False) for p in ("Hello", ["Hello"], ids, [ids])]
    assert all(len(outputs) == 1 for outputs in results)
    assert len({tuple(outputs[0]["token_ids"]) for outputs in results}) == 1
    assert llm.generate("Hello", use_tqdm=False)[0].finished, "without params it samples"


def test_an_unknown_name_is_an_attribute_error() -> None:
    import folovllm

    assert set(folovllm.__all__) == {"LLM", "EngineConfig", "RequestOutput", "SamplingParams"}
    with pytest.raises(AttributeError, match="nothing"):
        folovllm.nothing  # noqa: B018
