"""Sleep gives memory back, and an engine that wakes is the one that fell asleep."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from folovllm import LLM, SamplingParams
from folovllm.rollouts.sleep import tensors_of
from tests.helpers import tiny_checkpoint
from tests.x6.test_weights import PROMPT, engine, shuffled, tokens

MIB = 1 << 20


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("overrides", [{"milestone": "m3"}, {}, {"tensor_parallel_size": 2}])
@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_wakes_as_it_was(overrides: dict[str, Any], level: int) -> None:
    with engine(tiny_checkpoint(), **overrides) as llm:
        before = tokens(llm)
        for _ in range(2):
            llm.sleep(level)
            with pytest.raises(ValueError, match="wake it up first"):
                llm.generate([PROMPT], use_tqdm=False)
            llm.wake_up()
            assert tokens(llm) == before


def test_level_2_wakes_with_other_weights(tmp_path: Path) -> None:
    other = shuffled(tiny_checkpoint(), tmp_path)
    with engine(other) as llm:
        expected = tokens(llm)
    with engine(tiny_checkpoint()) as llm:
        tokens(llm)
        llm.sleep(2)
        llm.wake_up(other)
        assert tokens(llm) == expected


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_is_returned() -> None:
    cache = 128 * MIB
    with engine(tiny_checkpoint(), num_kv_blocks=None, kv_cache_memory=cache, max_num_seqs=2048) as llm:
        runner = llm.engine.executor.collective_rpc(runner_of)[0]
        runner.kv_cache.fill_(1.0)  # so that the system has given all of it
        size = runner.kv_cache.untyped_storage().nbytes()
        assert size > 64 * MIB
        weights = sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(runner.model))
        gc.collect()
        before = resident()
        llm.sleep(2)
        assert before - resident() > 0.95 * size
        assert all(parameter.untyped_storage().nbytes() == 0 for parameter in runner.model.parameters())
        llm.wake_up()
        assert sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(runner.model)) == weights


def runner_of(worker: Any) -> Any:
    return worker.runner.inner


def test_it_does_not_sleep_twice_nor_over_requests() -> None:
    with engine(tiny_checkpoint()) as llm:
        with pytest.raises(ValueError, match="does not sleep"):
            llm.wake_up()
        with pytest.raises(ValueError, match="level must be 1 or 2"):
            llm.sleep(3)
        llm.engine.add_request("a", PROMPT, SamplingParams(max_tokens=4))
        with pytest.raises(ValueError, match="requests of its own"):
            llm.sleep()
        llm.engine.abort_request("a")
        llm.sleep()
        with pytest.raises(ValueError, match="sleeps already"):
            llm.sleep()
        with pytest.raises(ValueError, match="wake it up first"):
            llm.get_weights()


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_a_gpu_gets_its_memory_back(level: int) -> None:
    """Within 5% of what was in use before the engine began."""
    torch.cuda.init()
    free_before, _ = torch.cuda.mem_get_info()
    with LLM(use_tqdm=False) as llm:
        before = tokens(llm)
        in_use = free_before - torch.cuda.mem_get_info()[0]
        llm.sleep(level)
        left = free_before - torch.cuda.mem_get_info()[0]
        assert left < 0.05 * in_use, f"{left / MIB:.0f} MiB of {in_use / MIB:.0f} are still in use"
        llm.wake_up()
        assert tokens(llm) == before
