"""How many blocks the memory holds, and what is said when it holds too few."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from folovllm import LLM
from folovllm.config import EngineConfig
from folovllm.engine.setup import set_up
from folovllm.layers.attention import attention_layers
from folovllm.worker import device_tables
from folovllm.worker.kv_memory import most_blocks_of_a_sequence, num_blocks_that_fit
from tests.helpers import tiny_checkpoint
from tests.workloads import make_engine

BYTES_PER_TOKEN = 2 * 3 * 2 * 32 * 4  # K and V, L, Hkv, D, float32


def blocks(**overrides: Any) -> int:
    options = {"milestone": "m3", "device": "cpu", "max_model_len": 100, "block_size": 16, "max_num_seqs": 8}
    setup = set_up(EngineConfig(model=str(tiny_checkpoint()), **options | overrides))
    assert setup.kv_bytes_per_token == BYTES_PER_TOKEN
    return num_blocks_that_fit(setup, lambda: pytest.fail("nothing to measure on CPU"))


@pytest.mark.parametrize("options", [
    pytest.param({}, marks=pytest.mark.m6),
    pytest.param({"speculative_config": {"method": "ngram"}}, marks=pytest.mark.x3),
])  # fmt: skip
def test_tables_of_rows_that_do_not_fit_are_refused_before_they_are_made(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is counted is what M6's runner allocates, which reports it here."""
    options = {"device": "cpu", "max_num_seqs": 300, **options}
    monkeypatch.setattr(device_tables, "free_memory", lambda device: 10**6)
    with pytest.raises(ValueError, match=r"the tables of 300 sequences take .* lower max_num_seqs") as refused:
        LLM(str(tiny_checkpoint()), use_tqdm=False, **options)
    monkeypatch.setattr(device_tables, "free_memory", lambda device: 10**12)
    with LLM(str(tiny_checkpoint()), use_tqdm=False, **options) as llm:
        runner = llm.engine.core.executor._worker.runner
        held = [runner._row_sampler.fields, runner._row_sampler.lines, runner._row_sampler.masks, runner._logits]
        num_bytes = sum(tensor.nbytes for tensor in [*held, runner._tables.block_tables])
    assert f"{num_bytes:,} bytes" in str(refused.value)


def test_as_many_as_the_memory_holds() -> None:
    assert blocks(kv_cache_memory=20 * 16 * BYTES_PER_TOKEN) == 20
    assert blocks(kv_cache_memory=21 * 16 * BYTES_PER_TOKEN - 1) == 20
    assert blocks(num_kv_blocks=9, kv_cache_memory=1) == 9, "or as many as are asked for"
    assert blocks() == 8 * 7  # the default is a gigabyte, and 8 sequences of 100 tokens need 7 blocks each


@pytest.mark.m5
def test_a_prefix_cache_remembers_more_than_runs_at_once(most_cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one sequence at a time, too, the pool is what memory allows, up to a bound; asked for, it is what was asked."""
    monkeypatch.setattr("folovllm.worker.kv_memory.MOST_CACHED", most_cached)
    for max_num_seqs in (1, 8):
        options = {"milestone": "m5", "max_num_seqs": max_num_seqs}
        assert blocks(**options, kv_cache_memory=300 * 16 * BYTES_PER_TOKEN) == 300
        assert blocks(**options, kv_cache_memory=1 << 40) == 65_536
        assert blocks(**options, num_kv_blocks=70_000) == 70_000
    monkeypatch.setattr("folovllm.worker.kv_memory.MOST_CACHED", 10)
    assert blocks(milestone="m5", max_num_seqs=8) == 8 * 7, "never less than all sequences can use"


@pytest.mark.x4
def test_where_every_layer_slides_a_sequence_needs_its_window_and_two_steps() -> None:
    """With prompts in chunks: blocks of 4, a window of 12, 16 tokens a step. Whole prompts need the whole context."""
    options = {"milestone": "m5", "device": "cpu", "max_model_len": 100, "block_size": 4, "max_num_batched_tokens": 16}
    setup = set_up(EngineConfig(model=str(tiny_checkpoint("mistral", sliding_window=12)), **options))
    assert most_blocks_of_a_sequence(setup) == 9  # 16 tokens under way and 16 more touch at most 9 blocks
    whole = replace(setup, config=replace(setup.config, enable_chunked_prefill=False))
    assert most_blocks_of_a_sequence(whole) == 25
    assert most_blocks_of_a_sequence(replace(setup, config=replace(setup.config, builders="prefix_cache"))) == 25


def test_exactly_one_sequence_is_enough_and_less_is_an_error_that_says_what_would_fit() -> None:
    assert blocks(kv_cache_memory=7 * 16 * BYTES_PER_TOKEN) == 7
    with pytest.raises(ValueError, match=r"room for 96 tokens.* max_model_len 100: lower max_model_len to 96 or less"):
        blocks(kv_cache_memory=7 * 16 * BYTES_PER_TOKEN - 1)
    with pytest.raises(ValueError, match=r"num_kv_blocks \(at least 7; a block of 16 tokens takes 24,576 bytes\)"):
        blocks(num_kv_blocks=6)
    with pytest.raises(ValueError, match=r"room for 0 tokens, less than one sequence of max_model_len \d+: raise"):
        blocks(kv_cache_memory=1)


def test_what_the_error_proposes_works() -> None:
    with pytest.raises(ValueError) as error:
        blocks(kv_cache_memory=5 * 16 * BYTES_PER_TOKEN)
    (fits,) = map(int, re.findall(r"lower max_model_len to (\d+)", str(error.value)))
    assert blocks(kv_cache_memory=5 * 16 * BYTES_PER_TOKEN, max_model_len=fits) == 5


def test_the_engine_allocates_what_was_counted() -> None:
    engine = make_engine(tiny_checkpoint(), milestone="m3", kv_cache_memory=12 * 16 * BYTES_PER_TOKEN)
    assert engine.stats().kv_blocks_total == 12
    assert engine.stats().kv_bytes_total == 12 * 16 * BYTES_PER_TOKEN
    cache = engine.executor._worker.runner.kv_cache
    assert cache.shape == (3, 2, 12, 2, 16, 32)
    assert cache.nbytes == engine.stats().kv_bytes_total


def test_on_a_gpu_the_peak_of_a_step_is_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a card of 1,000 blocks' bytes 90% may be filled; others use 100 blocks, the model 200, a step at most 150 more."""
    block = 16 * BYTES_PER_TOKEN
    state = SimpleNamespace(allocated=200 * block, peak=200 * block, profiled=0)

    def profile() -> None:
        state.peak, state.profiled = 350 * block, state.profiled + 1

    fakes = {
        "empty_cache": lambda: None, "synchronize": lambda device: None,
        "reset_peak_memory_stats": lambda device: setattr(state, "peak", state.allocated),
        "memory_allocated": lambda device: state.allocated, "max_memory_allocated": lambda device: state.peak,
        "mem_get_info": lambda device: (700 * block, 1000 * block),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    config = EngineConfig(milestone="m3", max_model_len=100, max_num_seqs=1000)
    setup: Any = SimpleNamespace(
        config=config, device=torch.device("cuda"), max_model_len=100, block_size=16, max_num_seqs=1000,
        kv_bytes_per_token=BYTES_PER_TOKEN, hf_config=SimpleNamespace(num_hidden_layers=1),
    )  # fmt: skip
    assert num_blocks_that_fit(setup, profile) == 900 - 300 - 150
    assert state.profiled == 1
    setup.max_num_seqs = 3
    assert num_blocks_that_fit(setup, profile) == 3 * 7


def test_more_than_there_is() -> None:
    with pytest.raises(ValueError, match=r"no memory for 1,000,000,000,000 blocks"):
        make_engine(tiny_checkpoint(), milestone="m3", num_kv_blocks=10**12)


def test_the_warm_up_leaves_no_cache_behind() -> None:
    """The layers hold views: as long as one of them is there, so is the memory."""
    runner = make_engine(tiny_checkpoint(), milestone="m3").executor._worker.runner
    runner.warmup_model()
    views = [layer.kv_cache for layer in attention_layers(runner.model)]
    assert views and all(view.untyped_storage().nbytes() == 0 for view in views)
