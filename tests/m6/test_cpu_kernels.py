"""The kernels for a CPU, beside float64 and the layers in torch; and what happens where no compiler is."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from folovllm import build
from folovllm.attention.backends.abstract import AttentionConfig
from folovllm.attention.backends.cpu_paged import CpuPagedBackend
from folovllm.attention.backends.torch_paged import TorchPagedBackend
from folovllm.build import make_engine
from folovllm.config import EngineConfig
from folovllm.kernels.cpu import library
from folovllm.kernels.cpu.ops import MAX_ROWS, CpuKernels
from folovllm.kernels.preparation import Preparation
from folovllm.layers.attention import Attention
from folovllm.layers.layernorm import RMSNorm
from folovllm.layers.rotary_embedding import RotaryEmbedding
from folovllm.models.cpu_layers import CpuRMSNorm, cpu_layers
from tests import contract
from tests.helpers import Driver, assert_as_accurate, assert_logits_equal, hf_logits, prompts, tiny_checkpoint
from tests.workloads import serve, workload

FOLDER = Path(tempfile.gettempdir()) / f"folovllm-tests-{os.getuid()}" / "cpu"  # compiled once per machine
COMPILER = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs Linux and g++"
)
DTYPES = pytest.mark.parametrize("dtype", library.NUMBERS, ids=lambda dtype: str(dtype).removeprefix("torch."))


def kernels(dtype: torch.dtype) -> CpuKernels:
    loaded = library.load(dtype, FOLDER)
    assert loaded is not None, "the compiler is there, and does not take the source"
    return CpuKernels(loaded, dtype)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(actual: torch.Tensor, truth: torch.Tensor, terms: torch.Tensor, roundings: int = 1) -> None:
    """`actual` is `truth` (float64), but for a few roundings to its dtype and those of a sum of `terms` in float32."""
    allowed = roundings * torch.finfo(actual.dtype).eps * truth.abs() + 2e-6 * terms
    assert bool(((actual.double() - truth).abs() <= allowed).all())


@COMPILER
@DTYPES
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (15, 3), (16, 4), (77, 9), (576, 70), (40, 1030)])
def test_linear(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    """Any number of rows, with and without bias and residual, and rows that lie apart; no row's bits depend on the others."""
    cpu, weight = kernels(dtype), normal(outputs, inputs, dtype=dtype)
    apart, bias = normal(9, inputs + 3, dtype=dtype, seed=1)[:, :inputs], normal(outputs, dtype=dtype, seed=2)
    residual = normal(9, outputs, dtype=dtype, seed=3)
    product = apart.double() @ weight.double().T
    terms = apart.double().abs() @ weight.double().abs().T + 1
    for rows in range(1, 10):
        x, expected = apart[:rows], product[:rows]
        assert_rounded(cpu.linear(x, weight), expected, terms[:rows])
        added = cpu.linear(x, weight, bias, residual[:rows].contiguous())
        assert_rounded(added, expected + bias.double() + residual[:rows].double(), 2 * terms[:rows])
        alone = [cpu.linear(row[None], weight, bias) for row in x]
        assert torch.equal(cpu.linear(x, weight, bias), torch.cat(alone)), f"{rows} rows"
    before = cpu.linear(apart, weight)
    torch.set_num_threads(2)
    try:
        assert torch.equal(cpu.linear(apart, weight), before), "threads share the outputs, and nothing within one"
    finally:
        torch.set_num_threads(1)


@COMPILER
@DTYPES
def test_few_rows_are_the_kernels(dtype: torch.dtype) -> None:
    cpu, most = kernels(dtype), MAX_ROWS[dtype]
    weight = normal(8, 16, dtype=dtype)
    assert [cpu.multiplies(normal(rows, 16, dtype=dtype), weight) for rows in (1, most, most + 1)] == [
        True,
        True,
        False,
    ]
    other = torch.float16 if dtype == torch.float32 else torch.float32
    assert not cpu.multiplies(normal(1, 16, dtype=other), weight.to(other))


@COMPILER
@DTYPES
@pytest.mark.parametrize("size", [5, 16, 70])
def test_rms_norm(dtype: torch.dtype, size: int) -> None:
    """Each rounding is where the plain layer has it."""
    with torch.inference_mode():
        plain, own = RMSNorm(size).to(dtype), CpuRMSNorm(size, kernels=kernels(dtype)).to(dtype)
        own.weight.copy_(plain.weight.copy_(normal(size, dtype=dtype)))
        x, residual = normal(3, size, dtype=dtype, seed=1), normal(3, size, dtype=dtype, seed=2)
        (normed, total), (expected, expected_total) = own(x, residual), plain(x, residual)
        assert torch.equal(total, expected_total)
        assert_rounded(normed, expected.double(), 1 + 0 * expected.double(), roundings=2)
        assert_rounded(own(x), plain(x).double(), 1 + 0 * expected.double(), roundings=2)


@COMPILER
@DTYPES
@pytest.mark.parametrize("normed", [False, True], ids=["llama", "qwen3"])
def test_prepare(dtype: torch.dtype, normed: bool) -> None:
    """Queries turned, keys and values in their slots and nowhere else; a token of slot -1 is in none."""
    heads, kv_heads, size, block = 3, 2, 6, 4
    qkv = normal(4, (heads + 2 * kv_heads) * size, dtype=dtype)
    rope = RotaryEmbedding(torch.tensor([1.0, 0.3, 0.01]), 50)
    positions, slots = torch.tensor([0, 7, 49, 3]), torch.tensor([19, 0, -1, 6])
    cache = torch.full((2, 5, kv_heads, block, size), 7.0, dtype=dtype).transpose(2, 3)
    after = cache.clone()
    weights = [normal(size, dtype=dtype, seed=seed) for seed in (1, 2)] if normed else []
    query, key, value = qkv.view(4, -1, size).split([heads, kv_heads, kv_heads], dim=1)
    with torch.inference_mode():
        if normed:
            norms = [RMSNorm(size).to(dtype) for _ in weights]
            for norm, weight in zip(norms, weights, strict=True):
                norm.weight.copy_(weight)
            query, key = norms[0](query), norms[1](key)
        query, key = rope(positions, query, key)
    TorchPagedBackend.store(None, key, value, after, slots)  # type: ignore[arg-type]  # it needs nothing of its own
    needed = Preparation(rope.cos_sin_cache, *weights, eps=1e-6)
    actual = kernels(dtype).prepare(qkv, needed, positions, slots, cache)
    tol = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual, query, rtol=tol, atol=2 * tol)
    torch.testing.assert_close(cache[0], after[0], rtol=tol, atol=2 * tol)
    assert torch.equal(cache[1], after[1])


@COMPILER
@DTYPES
def test_attention(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What every backend promises, at the borders of blocks, with prompts behind the decodes."""

    class Backend(CpuPagedBackend):
        def __init__(self, config: AttentionConfig) -> None:
            super().__init__(config, kernels(config.dtype))

    monkeypatch.setattr(contract, "get_backend", lambda _: Backend)
    cases = [*contract.CASES, contract.Case("heads of 40", contract.MIXED, head_dim=40)]
    for case in cases if dtype == torch.float32 else cases[3:5]:
        contract.check("", case, dtype, "cpu")


@COMPILER
def test_attention_of_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence of length 0 gets zeros, and the sequences beside it have the bits that they have alone."""
    case = contract.Case("decodes", ((5, 1), (16, 1), (40, 1)))
    config = AttentionConfig(4, 2, 32, torch.float32, torch.device("cpu"), 16, max_num_seqs=8)
    p, backend = contract.make_problem(config, case), CpuPagedBackend(config, kernels(torch.float32))
    backend.store(p.key, p.value, p.kv_cache, p.batch.slot_mapping)
    together = backend.forward(p.query, p.kv_cache, p.batch)
    p.batch.seq_lens[1] = p.batch.seq_lens_host[1] = 0
    beside = backend.forward(p.query, p.kv_cache, p.batch)
    assert torch.equal(beside[[0, 2]], together[[0, 2]]) and not beside[1].any()


@COMPILER
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_models(family: str) -> None:
    """Prompts in pieces, then decodes beside each other, along the same tokens: in float32 the reference's logits."""
    path = tiny_checkpoint(family)
    tokens = dict(enumerate(prompts([30, 21])))
    steps = [{0: tokens[0][:17]}, {1: tokens[1][:3], 0: tokens[0][17:18]}]
    steps += [{0: [tokens[0][18 + i]], 1: [tokens[1][3 + i]]} for i in range(12)]
    for dtype in (torch.float32, torch.bfloat16):
        ours, plain = driven(path, dtype, own=True), driven(path, dtype, own=False)
        logits: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for step in steps:
            for own, driver in ((True, ours), (False, plain)):
                logits[own] += [each for _, each in sorted(driver.step(step).items())]
        kept, rival = torch.cat(logits[True]), torch.cat(logits[False])
        if dtype == torch.float32:
            truth = rival
            reference = hf_logits(path, tokens[0][:17])
            assert_logits_equal(logits[True][0], reference)
            assert_logits_equal(kept, rival)
        else:
            assert_as_accurate(kept, rival, truth)


def driven(path: Path, dtype: torch.dtype, own: bool) -> Driver:
    """A model driven by hand, in the kernels or in plain torch."""
    if not own:
        return Driver(path, "torch_paged", dtype=dtype)
    cpu = kernels(dtype)
    driver = Driver(path, "torch_paged", dtype=dtype, layers=cpu_layers(cpu))
    driver.backend = CpuPagedBackend(driver.backend.config, cpu)
    for module in driver.model.modules():
        if isinstance(module, Attention):
            module.bind(driver.backend)
    return driver


# --- the whole engine -------------------------------------------------------------------------------------------------


@COMPILER
def test_the_engine_answers_as_m1_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """M6 takes the kernels for a large model, of which this one plays the part; M5 never does."""
    monkeypatch.setattr(build, "LARGE", 0)
    monkeypatch.setenv("FOLOVLLM_CACHE", str(FOLDER))
    rows: list[int] = []
    linear = CpuKernels.linear
    monkeypatch.setattr(
        CpuKernels, "linear", lambda self, x, *rest, **kw: rows.append(len(x)) or linear(self, x, *rest, **kw)
    )
    load = workload("greedy", count=6)
    fields: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": 6,
        "device": "cpu",
        "use_tqdm": False,
        "num_kv_blocks": 8,
    }
    engine = make_engine(EngineConfig(model=str(load.model), milestone="m6", **fields))
    load.check(serve(engine, load.requests))
    assert engine.stats().preemptions > 0
    assert {1, 2, 6} <= set(rows) and max(rows) <= MAX_ROWS[torch.float32]
    rows.clear()
    load.check(serve(make_engine(EngineConfig(model=str(load.model), milestone="m5", **fields)), load.requests[:1]))
    assert not rows


def test_a_small_model_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda *_: pytest.fail("nothing should be compiled"))
    make_engine(EngineConfig(model=str(tiny_checkpoint()), max_model_len=32, device="cpu", use_tqdm=False))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is compiled")
@pytest.mark.parametrize("wrong", ["compiler", "folder"])
def test_without_them_torch_computes(
    wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No compiler, or nowhere to keep what it makes: one sentence says why, and the engine works."""
    (file := tmp_path / "file").touch()
    monkeypatch.setattr(build, "LARGE", 0)
    monkeypatch.setenv("FOLOVLLM_CACHE", str(tmp_path if wrong == "compiler" else file))
    if wrong == "compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
    library.load.cache_clear()
    with caplog.at_level(logging.INFO, logger="folovllm"):
        engine = make_engine(EngineConfig(model=str(tiny_checkpoint()), max_model_len=32, device="cpu", use_tqdm=False))
    assert len(engine.generate([5, 6, 7]).outputs[0].token_ids) > 0
    assert len([record for record in caplog.records if "torch computes" in record.message]) == 1
