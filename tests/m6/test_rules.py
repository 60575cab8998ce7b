"""Whatever a request asks for, in any combination: every preset draws what M1's sampler draws."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from folovllm.engine.llm_engine import LLMEngine
from folovllm.sampling_params import SamplingParams
from tests.helpers import prompts, tiny_checkpoint
from tests.m6.test_overlap import assert_clean
from tests.workloads import Request, make_engine, serve

LETTERS = range(64, 70)  # the tokens of "a" to "f"
SMALL = {"block_size": 4, "num_kv_blocks": 32, "max_num_batched_tokens": 14}
ENGINES: dict[str, dict[str, Any]] = {
    "m2": {},
    "m5": SMALL,
    "m6": SMALL,
    "m6, a step at a time": SMALL | {"async_scheduling": False, "max_num_seqs": 2},
}
WORDS = st.lists(st.text("abcdef", min_size=1, max_size=4), max_size=5)
OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    "bad_words": WORDS.filter(lambda words: not {*"abcdef"} <= {*words}),
    "logit_bias": st.dictionaries(st.sampled_from(LETTERS), st.floats(-6, 6), min_size=1),
    "repetition_penalty": st.sampled_from([0.7, 1.4]),
    "frequency_penalty": st.sampled_from([-1.0, 0.6]),
    "top_k": st.integers(1, 5),
    "min_p": st.sampled_from([0.05, 0.3]),
    "min_tokens": st.integers(1, 6),
    "stop_token_ids": st.just([64, 66]),
    "logprobs": st.integers(0, 2),
    "prompt_logprobs": st.integers(0, 2),
}
FIXED = {
    "allowed_token_ids": st.just(list(LETTERS)) | st.none(),
    "temperature": st.sampled_from([0.0, 2.0, 6.0]),
    "seed": st.integers(0, 2**62),
}
PARAMS = st.fixed_dictionaries(FIXED, optional=OPTIONAL)


def is_possible(fields: dict[str, Any]) -> bool:
    """Whether there is always something that may be drawn: else each preset may take what it likes."""
    never = {*fields.get("bad_words", [])} | ({"a", "c"} if fields.get("min_tokens") else set())
    return fields["allowed_token_ids"] is None or any(
        letter not in never and not any(word.endswith(letter) for word in never) for letter in "abcdef"
    )


@cache
def engine(name: str) -> LLMEngine:
    return make_engine(tiny_checkpoint(), milestone=name[:2], **ENGINES.get(name, {}))


def answers(name: str, requests: list[Request]) -> list[Any]:
    found = []
    for output in serve(engine(name), requests):
        answer, prompt = output.outputs[0], [row and next(iter(row)) for row in output.prompt_logprobs or []]
        rows = [[(i, x.rank) for i, x in row.items()] for row in answer.logprobs or []]
        found.append((answer.token_ids, answer.finish_reason, rows, prompt))
    return found


@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(chosen=st.lists(PARAMS.filter(is_possible), min_size=3, max_size=5))
def test_every_preset_draws_what_m1_draws(chosen: list[dict[str, Any]]) -> None:
    params = [SamplingParams(max_tokens=8, ignore_eos=True, **fields) for fields in chosen]
    starts = prompts([1, 30, 9, 22, 13], seed=7)
    requests = [Request(prompt, own) for prompt, own in zip(starts, params, strict=False)]
    expected = answers("m1", requests)
    for name in ENGINES:
        assert answers(name, requests) == expected, name
        if name.startswith("m6"):
            assert_clean(engine(name))
