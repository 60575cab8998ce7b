"""Nothing is compiled once requests are served: the start has met every variant of every kernel."""

from types import SimpleNamespace
from typing import Any

import pytest

from folovllm.worker.warm_up import doublings, long_prompts, small_steps
from tests.m6.traffic import ENGINES, assert_nothing_is_compiled_after_the_start, assert_the_start_meets_every_variant


def test_doublings() -> None:
    assert [doublings(n) for n in (1, 2, 3, 4, 20)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 8, 16, 20]]


@pytest.mark.parametrize(
    ("max_model_len", "budget", "max_num_seqs", "lengths"),
    [(8192, 16_384, 4, [4096]), (1000, 16_384, 8, [1000] * 4 + [96]), (1000, 16_384, 3, [1000] * 3),
     (8192, 2048, 4, [2048]), (600, 1000, 4, [600, 400])],
)  # fmt: skip
def test_long_prompts(max_model_len: int, budget: int, max_num_seqs: int, lengths: list[int]) -> None:
    """The step is as large as a long one can be, and each share fits into the context, and all into the rows."""
    setup = SimpleNamespace(max_model_len=max_model_len, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    assert long_prompts(setup) == lengths


@pytest.mark.parametrize("fields", [{"quantization_config": {"quant_method": "fp8"}}, {"num_experts": 128}, {}])
def test_products_that_change_with_the_number_of_tokens(fields: dict[str, Any]) -> None:
    """Codes and experts have other kernels for more tokens, up to the largest step; every power of two comes, as it can."""
    setup = SimpleNamespace(
        max_model_len=1000, max_num_batched_tokens=5000, max_num_seqs=8, block_size=16,
        attention=SimpleNamespace(long_prompts=False), hf_config=SimpleNamespace(**fields),
    )  # fmt: skip
    sizes = {step.num_tokens for step in small_steps(setup)}
    assert {size for size in sizes if size > 256} == ({512, 1024, 2048, 4096, 5000} if fields else set())


@pytest.mark.slow
def test_the_start_meets_every_variant() -> None:
    assert_the_start_meets_every_variant("tests.m6.traffic")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ENGINES)
def test_nothing_is_compiled_after_the_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_nothing_is_compiled_after_the_start(ENGINES[name], monkeypatch)
