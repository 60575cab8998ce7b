"""What Python costs in a step: the clock stands exactly while the device is waited for, and the engine stays as it was."""

from __future__ import annotations

import time
from typing import Any

import pytest

from folovllm.bench import host_time
from folovllm.bench.contenders import parse_contenders
from folovllm.bench.host_time import WaitClock, step_times, watched
from folovllm.bench.throughput import bench_latency
from folovllm.sampling_params import SamplingParams
from tests.helpers import tiny_checkpoint
from tests.m6.devices import DEVICE
from tests.workloads import assert_nothing_left, make_engine


def drafts(count: int) -> dict[str, Any]:
    return {
        "method": "draft_model",
        "model": str(tiny_checkpoint()),
        "num_speculative_tokens": count,
        "adaptive": False,
    }


PRESETS: list[tuple[dict[str, Any], list[int]]] = [  # what is measured: sequences in a step
    ({"milestone": "m1"}, [1]),
    ({"milestone": "m1", "model_impl": "native"}, [1]),
    ({"milestone": "m2", "max_num_seqs": 4}, [1, 4]),
    ({"milestone": "m6", "max_num_seqs": 4}, [1, 4]),
    ({"milestone": "m6", "max_num_seqs": 4, "async_scheduling": False}, [1, 4]),
    # Drafts that are always right: no step has one token of each sequence then, and a short context ends soon.
    ({"milestone": "m6", "max_num_seqs": 4, "speculative_config": drafts(2), "max_model_len": 128}, [1, 4]),
    ({"milestone": "m6", "max_num_seqs": 4, "speculative_config": drafts(16), "max_model_len": 64}, []),
]


def engine_of(**fields: Any) -> Any:
    return make_engine(tiny_checkpoint(), **{"device": DEVICE} | fields)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are measured: nobody reads the times."""
    monkeypatch.setattr(host_time, "STEPS", 6)


@pytest.mark.parametrize(("preset", "sizes"), PRESETS, ids=str)
def test_every_engine_tells_its_own_time_from_the_devices(
    preset: dict[str, Any], sizes: list[int], few_steps: None
) -> None:
    """One of several ranks: `test_tensor_parallel.py`."""
    engine = engine_of(**preset)
    times = step_times(engine)
    assert [time.num_seqs for time in times] == sizes
    assert all(time.host > 0 and time.waiting > 0 for time in times)
    assert_nothing_left(engine)
    engine.close()


def test_a_slow_model_is_waited_for_and_a_slow_scheduler_is_not(
    monkeypatch: pytest.MonkeyPatch, few_steps: None
) -> None:
    """50 ms more in one or the other, and only that figure grows."""

    def slowed(work: Any) -> Any:
        return lambda *args, **kwargs: (time.sleep(0.05), work(*args, **kwargs))[1]

    engine = engine_of(milestone="m6", max_num_seqs=2, device="cpu")
    model, scheduler = engine.executor._worker.runner.model, engine.scheduler
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", slowed(model.forward))
        (slow_model,) = step_times(engine, (1,))
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "schedule", slowed(scheduler.schedule))
        (slow_host,) = step_times(engine, (1,))
    assert slow_model.waiting > 0.05 > slow_model.host
    assert slow_host.host > 0.05 > slow_host.waiting


def test_nothing_stays_watched() -> None:
    engine = engine_of(milestone="m6", max_num_seqs=2)
    clock = WaitClock()
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4))
    with watched(engine, clock):
        engine.step()
        engine.step()
    engine.step()  # takes in the step that was started on the clock
    seen = clock.seconds
    while engine.has_unfinished_requests():
        engine.step()
    assert clock.seconds == seen > 0


def test_a_small_cache_bounds_the_batch() -> None:
    """20 blocks of 16 tokens: room for five sequences of up to 55 tokens."""
    engine = engine_of(milestone="m5", max_num_seqs=16, num_kv_blocks=20, block_size=16)
    assert [time.num_seqs for time in step_times(engine, (256,))] == [5]
    assert engine.stats().preemptions == 0


def test_it_is_in_the_result(few_steps: None) -> None:
    model = str(tiny_checkpoint(max_position_embeddings=1024, num_hidden_layers=1))
    common = {"model": model, "device": "cpu", "use_tqdm": False, "max_num_seqs": 4}
    result = bench_latency(parse_contenders("m6", common), repeats=1)
    metrics = result.runs[0].metrics
    for name in ("Python a step, 1 sequence", "waiting a step, 1 sequence", "Python a step, 4 sequences"):
        assert metrics[name].unit == "ms" and metrics[name].median > 0 and not metrics[name].higher_is_better
    assert metrics["start-up"].median > 0
