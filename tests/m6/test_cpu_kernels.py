"""The kernels for a CPU, beside float64 and the layers in torch; and what happens where no compiler is."""

import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from folovllm.attention.backends.abstract import AttentionConfig
from folovllm.attention.backends.torch_naive import TorchNaiveBackend
from folovllm.kernels.cpu import library
from folovllm.kernels.cpu.ops import MAX_ROWS, CpuKernels, Heads
from folovllm.layers.layernorm import RMSNorm
from folovllm.layers.rotary_embedding import RotaryEmbedding
from folovllm.models import kernel_layers
from folovllm.models.cpu_layers import cpu_layers
from tests import contract
from tests.helpers import Driver, assert_as_accurate, assert_logits_equal, hf_logits, prompts, tiny_checkpoint
from tests.workloads import make_engine, serve, workload

FOLDER = Path(tempfile.gettempdir()) / f"folovllm-tests-{os.getuid()}" / "cpu"  # compiled once per machine
HAS_COMPILER = sys.platform == "linux" and shutil.which(os.environ.get("CXX", "g++")) is not None
DTYPES = pytest.mark.parametrize("dtype", library.NUMBERS, ids=lambda dtype: str(dtype).removeprefix("torch."))


def compiled(test: Any) -> Any:
    """Marks a test of what a compiler makes, which takes it seconds."""
    return pytest.mark.slow(pytest.mark.skipif(not HAS_COMPILER, reason="needs Linux and g++")(test))


def folder() -> Path:
    return FOLDER


def kernels(dtype: torch.dtype) -> CpuKernels:
    loaded = library.load(dtype, folder)
    assert loaded is not None, "the compiler is there, and does not take the source"
    return CpuKernels(loaded, dtype)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(actual: torch.Tensor, truth: torch.Tensor, terms: torch.Tensor, roundings: int = 1) -> None:
    """`actual` is `truth` (float64), but for a few roundings to its dtype and those of a sum of `terms` in float32."""
    allowed = roundings * torch.finfo(actual.dtype).eps * truth.abs() + 2e-6 * terms
    assert bool(((actual.double() - truth).abs() <= allowed).all())


@compiled
@DTYPES
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (15, 3), (16, 4), (77, 9), (576, 70), (40, 1030)])
def test_multiply(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    """Any number of rows, and rows that lie apart; a row's bits depend neither on the others nor on threads."""
    cpu, weight, bias = kernels(dtype), normal(outputs, inputs, dtype=dtype), normal(outputs, dtype=dtype, seed=2)
    apart = normal(9, inputs + 3, dtype=dtype, seed=1)[:, :inputs]
    expected = apart.double() @ weight.double().T
    terms = apart.double().abs() @ weight.double().abs().T + 1
    alone = torch.cat([cpu.multiply(row[None], weight, bias) for row in apart])
    for rows in range(1, 10):
        assert_rounded(cpu.multiply(apart[:rows], weight), expected[:rows], terms[:rows])
        added = cpu.multiply(apart[:rows], weight, bias)
        assert_rounded(added, expected[:rows] + bias.double(), 2 * terms[:rows])
        assert torch.equal(added, alone[:rows]), f"{rows} rows"
    torch.set_num_threads(2)
    try:
        assert torch.equal(cpu.multiply(apart, weight, bias), alone)
    finally:
        torch.set_num_threads(1)


@compiled
@DTYPES
def test_few_rows_are_the_kernels(dtype: torch.dtype) -> None:
    cpu = kernels(dtype)
    weight, other = normal(8, 16, dtype=dtype), torch.float16 if dtype == torch.float32 else torch.float32
    served = [cpu.multiplies(normal(rows, 16, dtype=dtype), weight) for rows in (1, MAX_ROWS, MAX_ROWS + 1)]
    assert served == [True, True, False]
    assert not cpu.multiplies(normal(1, 16, dtype=other), weight.to(other))


BORDERS = contract.Case("at the borders of blocks", tuple((n, 1) for n in (0, 1, 14, 15, 16, 31, 32, 100)))


@compiled
@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "size", "block"), [(4, 2, 32, 16), (9, 3, 64, 16), (3, 1, 40, 1)])
def test_attention(dtype: torch.dtype, heads: int, kv_heads: int, size: int, block: int) -> None:
    """Beside torch, with heads that are normed and turned; K and V are in their slots, and nothing else has changed."""
    config = AttentionConfig(heads, kv_heads, size, dtype, torch.device("cpu"), block, max_num_seqs=8)
    p = contract.make_problem(config, BORDERS)
    rope = RotaryEmbedding(torch.linspace(1, 0.01, size // 2), 200)
    norms = [RMSNorm(size).to(dtype) for _ in range(2)]
    with torch.inference_mode():
        for norm in norms:
            norm.weight.copy_(normal(size, dtype=dtype, seed=5))
        query, key = rope(p.batch.positions, norms[0](p.query), norms[1](p.key))
        naive, after = TorchNaiveBackend(config), p.kv_cache.clone()
        naive.store(key, p.value, after, p.batch.slot_mapping)
        expected = naive.forward(query, after, p.batch)
    weights = [norm.weight.data_ptr() for norm in norms]
    described = Heads(heads, kv_heads, size, size**-0.5, 1e-6, *weights, rope.cos_sin_cache.data_ptr())
    qkv = torch.cat((p.query, p.key, p.value), dim=1).flatten(1)
    actual = kernels(dtype).attention(described, p.kv_cache, p.batch, qkv).view_as(expected)
    tol = contract.TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, rtol=0, atol=tol)
    torch.testing.assert_close(p.kv_cache, after, rtol=tol, atol=tol, equal_nan=True)
    assert torch.equal(p.kv_cache[1].nan_to_num(), after[1].nan_to_num())


@compiled
def test_padding_stores_nothing_and_gets_zeros() -> None:
    """A sequence of length 0 and slot -1; those beside it have the bits that they have without."""
    config = AttentionConfig(4, 2, 32, torch.float32, torch.device("cpu"), 16, max_num_seqs=8)
    cpu, p, table = kernels(torch.float32), contract.make_problem(config, BORDERS), torch.ones(200, 32)
    heads = Heads(4, 2, 32, 32**-0.5, 0.0, None, None, table.data_ptr())
    qkv = torch.cat((p.query, p.key, p.value), dim=1).flatten(1)
    together = cpu.attention(heads, p.kv_cache, p.batch, qkv)
    p.batch.seq_lens[3], p.batch.slot_mapping[3] = 0, -1
    before, qkv[3] = p.kv_cache.clone(), torch.nan
    beside = cpu.attention(heads, p.kv_cache, p.batch, qkv)
    others = [i for i in range(8) if i != 3]
    assert torch.equal(beside[others], together[others]) and not beside[3].any()
    contract.assert_same_cache(p.kv_cache, before)


@compiled
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "gemma3_text"])
def test_models(family: str, calls: list[int]) -> None:
    """Prompts in pieces, then decodes beside each other, along the same tokens, beside the layers in torch."""
    path, tokens = tiny_checkpoint(family), dict(enumerate(prompts([24, 12])))
    steps = [{0: tokens[0][:17]}, {1: tokens[1][:3], 0: tokens[0][17:18]}]
    steps += [{0: [tokens[0][18 + i]], 1: [tokens[1][3 + i]]} for i in range(6)]
    truth = logits_of(Driver(path, "torch_paged"), steps)
    assert not calls
    assert_logits_equal(truth[:17], hf_logits(path, tokens[0][:17]))
    assert_logits_equal(logits_of(driver(path, torch.float32), steps), truth)
    rival = logits_of(Driver(path, "torch_paged", dtype=torch.bfloat16), steps)
    assert_as_accurate(logits_of(driver(path, torch.bfloat16), steps), rival, truth)
    assert calls == ([] if family == "gemma3_text" else [2] * 2 * 3 * 6), "its layers do more: they have products alone"


@compiled
def test_a_sequence_has_the_same_bits_in_any_batch(calls: list[int]) -> None:
    path, tokens = tiny_checkpoint(), prompts([9, 22, 14, 5])
    one, all_at_once = driver(path, torch.float32), driver(path, torch.float32)
    for each in (one, all_at_once):
        for seq, ids in enumerate(tokens):
            each.step({seq: ids[:-3]})
    for i in (-3, -2, -1):
        together = all_at_once.step({seq: [ids[i]] for seq, ids in enumerate(tokens)})
        for seq, ids in enumerate(tokens):
            assert torch.equal(one.step({seq: [ids[i]]})[seq], together[seq])
    assert set(calls) == {1, 4}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each call of a decoder layer had."""
    calls: list[int] = []
    layer = CpuKernels.decoder_layer
    monkeypatch.setattr(CpuKernels, "decoder_layer", lambda *given: calls.append(given[3].num_seqs) or layer(*given))
    return calls


def driver(path: Path, dtype: torch.dtype) -> Driver:
    return Driver(path, "torch_paged", dtype=dtype, layers=cpu_layers(kernels(dtype)))


def logits_of(driver: Driver, steps: list[dict[int, list[int]]]) -> torch.Tensor:
    """After every token of all steps, [n, V]."""
    return torch.cat([logits for step in steps for _, logits in sorted(driver.step(step).items())])


@compiled
def test_the_engine_answers_as_m1_does(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    """M6 takes the kernels for a large model, of which this one plays the part; M5 never does."""
    monkeypatch.setattr(kernel_layers, "LARGE", 0)
    monkeypatch.setenv("FOLOVLLM_CACHE", str(FOLDER))
    load, own = workload("greedy", count=6), {"max_num_seqs": 6, "num_kv_blocks": 32, "block_size": 4}
    engine = make_engine(load.model, milestone="m6", **own)
    load.check(serve(engine, load.requests))
    assert engine.stats().preemptions > 0 and {1, 2} < set(calls)
    calls.clear()
    load.check(serve(make_engine(load.model, milestone="m5", **own), load.requests))
    assert not calls


def test_a_small_model_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda *_: pytest.fail("nothing should be compiled"))
    make_engine(tiny_checkpoint(), milestone="m6", max_model_len=32)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is compiled")
@pytest.mark.parametrize("wrong", ["compiler", "folder", "home"])
def test_without_them_torch_computes(
    wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No compiler, or nowhere to keep what it makes: one sentence says why, and the engine works."""
    (file := tmp_path / "file").touch()
    monkeypatch.setattr(kernel_layers, "LARGE", 0)
    monkeypatch.setenv("FOLOVLLM_CACHE", str(file if wrong == "folder" else tmp_path))
    if wrong == "compiler":
        monkeypatch.setenv("CXX", "no-such-compiler -m64")
    if wrong == "home":
        monkeypatch.setattr(kernel_layers, "cache_dir", Path("~no-such-user").expanduser)
    library.load.cache_clear()
    with caplog.at_level(logging.INFO, logger="folovllm"):
        engine = make_engine(tiny_checkpoint(), milestone="m6", max_model_len=32)
    assert len(engine.generate([5, 6, 7]).outputs[0].token_ids) > 0
    assert len([record for record in caplog.records if "torch computes" in record.message]) == 1
