"""Drafts on a GPU: captured steps, the kernels that sample, and what a row's words say after a rejected draft token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from folovllm.attention.backends.abstract import BackendUnavailable
from tests.m6.traffic import kernels
from tests.workloads import serve
from tests.x3.engines import Pair, speculation_of
from tests.x3.test_lossless import demanding, without_memory

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("drafts", ["right", "often", "random"])
@pytest.mark.parametrize("backend", ["torch_paged", "triton"])
@pytest.mark.parametrize(
    "fields", [{"milestone": "m5"}, {"milestone": "m6"}, {"milestone": "m6", "enforce_eager": True}]
)
def test_texts_agree_until_rounding_decides(fields: dict[str, object], backend: str, drafts: str) -> None:
    requests = [replace(r, params=replace(r.params, logprobs=None, prompt_logprobs=None)) for r in demanding() * 3]
    fields = {"device": "cuda", "dtype": "float32", "attention_backend": backend, "max_num_seqs": 8, **fields}
    try:
        pair = Pair.of(requests, **fields)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    engine = pair.engine(drafts)
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
    import triton

    pair = Pair.of(demanding(), milestone="m6", device="cuda", attention_backend="triton")
    for kernel in kernels():
        kernel.device_caches.clear()
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **what: compiled.append(f"{what['repr']} {what['key']}")
    )
    engine = pair.engine("often", k=5)
    assert len(compiled) >= 9, f"the hook saw {compiled}"
    compiled.clear()
    serve(engine, pair.requests)
    assert not compiled and speculation_of(engine).num_draft_tokens > 20
