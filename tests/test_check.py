"""The main job at each milestone: `make check`. The embedded model answers as transformers does, and the server speaks."""

import pytest

from folovllm import LLM, SamplingParams
from folovllm.models.files import ASSETS
from tests.helpers import hf_greedy
from tests.x1.background import Background

PROMPTS = ["Once upon a time", "Lily and Tom went to the park. The sun was", "The cat", "One day, a little bird"]
ANSWER = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.mark.parametrize("milestone", ["m1", "m2", "m3", "m4", "m5", "m6"])
def test_the_embedded_model_answers_as_transformers_does(milestone: str) -> None:
    llm = LLM(milestone=milestone, dtype="float32", max_model_len=128)
    outputs = llm.generate(PROMPTS, ANSWER, use_tqdm=False)
    llm.close()
    for output in outputs:
        expected, _ = hf_greedy(ASSETS / "stories-5m", output.prompt_token_ids, ANSWER.max_tokens or 0)
        assert list(output.outputs[0].token_ids) == expected, f"{milestone} answers {output.prompt!r} otherwise"


def test_a_client_of_the_server_gets_the_same() -> None:
    llm = LLM(max_model_len=128)
    (expected,) = llm.generate(PROMPTS[:1], ANSWER, use_tqdm=False)
    llm.close()
    with Background(max_model_len=128) as server:
        body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 16, "ignore_eos": True}
        status, answer = server.ask("/v1/completions", body)
        assert status == 200, answer
        assert answer["choices"][0]["text"] == expected.outputs[0].text
