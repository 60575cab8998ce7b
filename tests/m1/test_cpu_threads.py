"""How many threads torch gets: one for a small model, more where they help, what the user says if he says so."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from folovllm import LLM, SamplingParams
from folovllm.config import EngineConfig
from folovllm.engine import cpu_threads, time_threads
from folovllm.engine.cpu_threads import choose_threads, most_threads, use_threads
from folovllm.engine.setup import EngineSetup, set_up
from tests.helpers import tiny_checkpoint


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A machine of 8 cores; what is asked of torch is noted, not done."""
    asked = [8]
    monkeypatch.setattr(cpu_threads, "_process", cpu_threads._Process())
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(time_threads, "num_cores", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: asked[-1])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    yield asked


def small(**fields: Any) -> EngineSetup:
    return set_up(EngineConfig(model=str(tiny_checkpoint()), device="cpu", use_tqdm=False, **fields))


def large(**fields: Any) -> EngineSetup:
    """A set-up whose products are worth a measurement."""
    setup = small(**fields)
    return replace(setup, hf_config=SimpleNamespace(hidden_size=1024, intermediate_size=3072))


def products_take(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> list[tuple[int, int]]:
    """Make up what a product takes with so many threads; returns the shapes of the weights that are timed."""
    shapes: list[tuple[int, int]] = []

    def seconds_of(x: torch.Tensor, weight: torch.Tensor) -> float:
        shapes.append((weight.shape[0], weight.shape[1]))
        return seconds[torch.get_num_threads()]

    monkeypatch.setattr(time_threads, "seconds_of", seconds_of)
    return shapes


class TestTheEnginesChoice:
    @pytest.mark.parametrize("milestone", ["m1", pytest.param("m6", marks=pytest.mark.m6)])
    def test_the_embedded_model_gets_one(self, threads: list[int], milestone: str) -> None:
        """Hugging Face's model as well as ours: torch's default made both up to a hundred times slower."""
        with LLM(milestone=milestone, max_model_len=64, kv_cache_memory=1 << 22, device="cpu", use_tqdm=False) as llm:
            assert threads == [8, 1] and llm.engine.num_threads == 1
            assert llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)

    @pytest.mark.parametrize(("seconds", "cores", "chosen"), [
        ({1: 1.0, 2: 0.6, 4: 0.4, 8: 0.38}, 8, 4),  # as many as help
        ({1: 1.0, 2: 0.5, 4: 0.3, 6: 0.2}, 6, 6),  # no power of two
        ({1: 1.0, 2: 0.9}, 8, 1),  # on a tie fewer
    ])  # fmt: skip
    def test_a_larger_one_gets_as_many_as_help(
        self, seconds: dict[int, float], cores: int, chosen: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        products_take(monkeypatch, seconds)
        assert choose_threads(large(), cores) == chosen

    def test_a_busy_machine_in_most_rounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two threads that wait for each other in three rounds of five are not faster, however short the others."""
        rounds = iter([1.0, 0.5, 1.0, 9.0, 1.0, 9.0, 1.0, 0.5, 1.0, 9.0])
        monkeypatch.setattr(time_threads, "seconds_of", lambda *_: next(rounds))
        assert choose_threads(large(), 2) == 1

    def test_the_largest_product_is_timed_or_a_part_of_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shapes = products_take(monkeypatch, {1: 1.0, 2: 1.0})
        choose_threads(large(), 2)
        choose_threads(replace(large(), hf_config=SimpleNamespace(hidden_size=4096, intermediate_size=12288)), 2)
        assert set(shapes) == {(3072, 1024), (1024, 4096)}

    def test_ranks_share_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each has half of the product, and at most half of the threads."""
        shapes = products_take(monkeypatch, {1: 1.0, 2: 0.5, 4: 0.3})
        assert choose_threads(large(milestone="m6", tensor_parallel_size=2), 8) == 8
        assert set(shapes) == {(1536, 1024)}
        assert choose_threads(small(milestone="m6", tensor_parallel_size=2), 8) == 2
        assert choose_threads(small(milestone="m6", tensor_parallel_size=2), 1) == 1

    def test_no_more_than_a_container_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A quota is not felt in a measurement so short; and torch counts the machine's cores."""
        products_take(monkeypatch, {1: 1.0, 2: 0.5, 4: 0.25})
        monkeypatch.setattr(time_threads, "num_cores", lambda: 2)
        assert use_threads(large()) == 2


class TestWhatTheUserSays:
    def test_it_is_done(self, threads: list[int], caplog: pytest.LogCaptureFixture) -> None:
        assert use_threads(small(num_threads=3)) == 3 and threads == [8, 3]
        assert "num_threads" not in caplog.text

    def test_more_than_there_are_cores(self, threads: list[int]) -> None:
        with pytest.raises(ValueError, match="num_threads 9 is more than the 8 cores"):
            use_threads(small(num_threads=9))
        assert threads == [8]

    def test_torchs_number_is_an_upper_bound(self, threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        """What `OMP_NUM_THREADS` made it, or a call of torch's; what an engine made it is none."""
        products_take(monkeypatch, {1: 1.0, 2: 0.5, 4: 0.25})
        use_threads(small())
        assert threads[-1] == 1 and most_threads() == 8
        threads.append(4)  # the user's own call
        assert use_threads(large()) == 4
        use_threads(small())
        assert most_threads() == 4

    def test_on_a_gpu_nothing_changes(self, threads: list[int]) -> None:
        on_gpu = replace(large(), device=torch.device("cuda", 0))
        assert use_threads(on_gpu) is None and threads == [8]
        assert use_threads(replace(on_gpu, config=replace(on_gpu.config, num_threads=2))) == 2
