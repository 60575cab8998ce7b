"""Drafts on a GPU: captured steps and chains, the kernels that sample and pair, and a row's words after a rejected draft token."""

from dataclasses import replace
from random import Random

import pytest
import torch

from folovllm.attention.backends.abstract import BackendUnavailable
from folovllm.llm import LLM
from folovllm.sampling_params import SamplingParams
from tests.helpers import prompts, tiny_checkpoint
from tests.m6.traffic import assert_nothing_is_compiled_after_the_start, watch_compiling
from tests.workloads import Request, serve
from tests.x3.engines import Pair, make_engine, speculation_of
from tests.x3.test_eagle3 import GREEDY, Drafted, check_drafts, eagle, few_head, letters_head
from tests.x3.test_lossless import demanding, without_memory
from tests.x3.traffic import HEAD
from tools.train_tiny.documents import prompt
from tools.train_tiny.stories import request_and_story

pytestmark = pytest.mark.gpu


LAYOUTS = [{"milestone": "m5"}, {"milestone": "m6"}, {"milestone": "m6", "enforce_eager": True}]


@pytest.mark.parametrize("drafts", ["right", "often", "random", "a head's"])
@pytest.mark.parametrize("backend", ["torch_paged", "triton"])
@pytest.mark.parametrize("fields", LAYOUTS)
def test_texts_agree_until_rounding_decides(fields: dict[str, object], backend: str, drafts: str) -> None:
    requests = [replace(r, params=replace(r.params, logprobs=None, prompt_logprobs=None)) for r in demanding() * 3]
    fields = {"device": "cuda", "dtype": "float32", "attention_backend": backend, "max_num_seqs": 8, **fields}
    try:
        pair = Pair.of(requests, **fields)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    engine = make_engine(**pair.fields, **eagle(letters_head())) if drafts == "a head's" else pair.engine(drafts)
    assert pair.share_of_equal(serve(engine, requests)) >= 0.9
    assert speculation_of(engine).num_draft_tokens > 50


@pytest.mark.parametrize("num_seqs", [1, 8])
def test_grammars_and_filters_are_sampled_at_once(num_seqs: int) -> None:
    """More samples than rows, in float32: some rows have filters, some masks."""
    fields = {"milestone": "m6", "device": "cuda", "dtype": "float32", "max_num_seqs": num_seqs}
    pair = Pair.of(without_memory() * 3, **fields)
    engine = pair.engine("right", k=7)
    assert pair.share_of_equal(serve(engine, pair.requests)) >= 0.9
    assert speculation_of(engine).num_accepted > 50


def test_nothing_is_compiled_after_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with drafts of every size meet kernels that are there, as in `tests/m6/test_warm_up.py`."""
    pair = Pair.of(demanding(), milestone="m6", device="cuda", attention_backend="triton")
    compiled = watch_compiling(monkeypatch)
    engine = pair.engine("often", k=5)
    assert len(compiled) >= 9, f"the hook saw {compiled}"
    compiled.clear()
    serve(engine, pair.requests)
    assert not compiled and speculation_of(engine).num_draft_tokens > 20


@pytest.mark.parametrize("fields", LAYOUTS)
def test_drafts_are_those_of_the_definition(fields: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of them: products are rounded in another order, and a draft that was a close call is not compared."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr("tests.x3.test_eagle3.CLOSE", 0.05)
    load = [Request(one, replace(GREEDY, max_tokens=30)) for one in prompts([9, 4, 31, 17, 22], seed=3)]
    drafted = Drafted().watch(monkeypatch)
    fields = {"device": "cuda", "dtype": "float32", "attention_backend": "triton", **fields}
    engine = make_engine(**fields, **eagle(few_head()))
    outputs = serve(engine, load)
    assert check_drafts(drafted, few_head(), tiny_checkpoint(), load, outputs) > 60
    assert speculation_of(engine).num_accepted > 10


def test_with_a_head_nothing_is_compiled_after_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_nothing_is_compiled_after_the_start({"model": "stories-5m", "speculative_config": HEAD}, monkeypatch)


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_the_embedded_head_is_right_nearly_always(batch: int) -> None:
    """In bfloat16, at every width: 3.3 tokens a step at least."""
    with LLM("stories-5m", device="cuda", max_num_seqs=batch, use_tqdm=False, speculative_config=HEAD) as llm:
        rng = Random(99)
        asked = [prompt(request_and_story(rng)[0]) for _ in range(max(16, batch))]
        llm.generate(asked, SamplingParams(temperature=0, max_tokens=150))
        made = speculation_of(llm.engine)
    assert 1 + made.num_accepted / made.num_drafts >= 3.3
