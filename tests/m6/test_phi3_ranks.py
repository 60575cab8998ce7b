"""Phi-3's checkpoints hold merged layers: two ranks cut each of their parts."""

from __future__ import annotations

from folovllm.build import make_engine
from folovllm.config import EngineConfig
from tests.helpers import tiny_checkpoint
from tests.workloads import MAX_MODEL_LEN, answered, mixed_requests, serve


def test_two_ranks_answer_as_one() -> None:
    load = answered(tiny_checkpoint("phi3"), mixed_requests("greedy", 6))
    config = EngineConfig(
        model=str(load.model), max_model_len=MAX_MODEL_LEN, device="cpu", use_tqdm=False, tensor_parallel_size=2
    )
    engine = make_engine(config)
    try:
        load.check(serve(engine, load.requests))
    finally:
        engine.close()
