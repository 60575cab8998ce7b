"""Sleep gives memory back, and an engine that wakes is the one that fell asleep."""

import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from folovllm import LLM, SamplingParams
from folovllm.electives.rollouts.sleep import tensors_of
from tests.helpers import tiny_checkpoint
from tests.x5.checkpoints import hybrid_checkpoint
from tests.x6.test_weights import PROMPT, engine, shuffled, tokens

MIB = 1 << 20


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("overrides", [{"milestone": "m3"}, {}])
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


def test_parts_wake_one_after_the_other() -> None:
    with engine(tiny_checkpoint()) as llm:
        before = tokens(llm)
        llm.sleep(2)
        with pytest.raises(ValueError, match="tags must be among weights, kv_cache, not 'wheels'"):
            llm.wake_up(tags=["wheels"])
        llm.wake_up(tags=["weights"])
        with pytest.raises(ValueError, match="wake it up first"):
            tokens(llm)
        llm.wake_up(tags=["kv_cache"])
        assert tokens(llm) == before


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


@pytest.mark.parametrize("level", [1, 2])
def test_after_a_failed_wake_up_the_next_loads_all_weights(tmp_path: Path, level: int) -> None:
    other = shuffled(tiny_checkpoint(), tmp_path)
    weights = load_file(other / "model.safetensors")
    del weights["model.norm.weight"]
    with engine(tiny_checkpoint()) as llm:
        before = tokens(llm)
        llm.sleep(level)
        with pytest.raises(ValueError, match=r"lacks model\.norm\.weight"):
            llm.wake_up(weights)
        assert llm.engine.refusal
        llm.wake_up()
        assert tokens(llm) == before, "weights of the failed call are left in the model"
        llm.sleep(level)
        with pytest.raises(ValueError, match=r"lacks model\.norm\.weight"):
            llm.wake_up(weights)
        llm.wake_up(other)
        with engine(other) as fresh:
            assert tokens(llm) == tokens(fresh)


def test_copies_on_the_host_are_freed_when_it_is_awake() -> None:
    with engine(tiny_checkpoint()) as llm:
        (worker,) = llm.engine.executor.collective_rpc(lambda worker: worker)
        llm.sleep(1)
        assert worker.state["freed"]
        llm.wake_up()
        assert not worker.state["freed"]


@pytest.mark.usefixtures("warm")
def test_two_ranks_get_weights_and_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes, to which weights go in a file: from a folder, from tensors, and at waking up. No file is left."""
    first = tiny_checkpoint("phi3")  # its checkpoint is packed as our layers are
    other = shuffled(first, tmp_path)
    weights = load_file(first / "model.safetensors")
    files = set(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    with engine(other, milestone="m3") as llm:
        expected = tokens(llm)
    with engine(first, tensor_parallel_size=2) as llm:
        before = tokens(llm)
        llm.update_weights(other)
        assert tokens(llm) == expected != before
        llm.update_weights(weights)
        assert tokens(llm) == before
        for level, given in ((1, None), (2, None), (2, weights)):
            llm.sleep(level)
            llm.wake_up(given)
            assert tokens(llm) == before
    assert {*tmp_path.iterdir()} == files


@pytest.mark.parametrize("level", [1, 2])
def test_a_hybrid_model_frees_its_states_and_wakes_as_it_was(level: int) -> None:
    with engine(hybrid_checkpoint("qwen3_5_text")) as llm:
        before = tokens(llm)
        states = llm.engine.executor.collective_rpc(runner_of)[0].states
        sizes = [tensor.untyped_storage().nbytes() for tensor in states.tensors]
        assert all(sizes)
        llm.sleep(level)
        assert not any(tensor.untyped_storage().nbytes() for tensor in states.tensors)
        llm.wake_up()
        assert [tensor.untyped_storage().nbytes() for tensor in states.tensors] == sizes
        assert tokens(llm) == before


def test_it_does_not_sleep_twice_nor_over_requests() -> None:
    with engine(tiny_checkpoint()) as llm:
        with pytest.raises(ValueError, match="does not sleep"):
            llm.wake_up()
        with pytest.raises(ValueError, match="level must be 1 or 2"):
            llm.sleep(3)
        llm.engine.add_request("a", PROMPT, SamplingParams(max_tokens=4))
        with pytest.raises(ValueError, match="serves requests"):
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
    """Within 5% of what this process held before the engine began; other processes may use the card."""
    reserved = torch.cuda.memory_reserved()
    with LLM(use_tqdm=False) as llm:
        before = tokens(llm)
        in_use = torch.cuda.memory_reserved() - reserved
        llm.sleep(level)
        left = torch.cuda.memory_reserved() - reserved
        assert left < 0.05 * in_use, f"{left / MIB:.0f} MiB of {in_use / MIB:.0f} are still in use"
        llm.wake_up()
        assert tokens(llm) == before


@pytest.mark.parametrize("named", [False, True])
def test_a_model_that_has_gone_does_not_wake_up(named: bool, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint(), tmp_path, dirs_exist_ok=True)
    with engine(tmp_path) as llm:
        before = tokens(llm)
        llm.sleep(level=2)
        (tmp_path / "config.json").rename(tmp_path / "gone.json")
        with pytest.raises(ValueError, match=r"there is no config\.json"):
            llm.wake_up(tmp_path if named else None)
        (tmp_path / "gone.json").rename(tmp_path / "config.json")
        llm.wake_up()
        assert tokens(llm) == before
