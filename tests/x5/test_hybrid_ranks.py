"""Hybrid models on two ranks: each has whole key heads of linear attention, the value heads that they serve, and their states."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from folovllm.config import EngineConfig
from folovllm.electives.hybrid.state_layer import STATES
from folovllm.engine.setup import set_up
from folovllm.executor.messages import decode_step, encode_step
from folovllm.models.loader import load_native_model
from folovllm.models.sharded_loader import load_sharded_model
from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.packed import PackedStep, StepPacker, unpack_extras
from folovllm.step.schedule import SamplingSpec, ScheduledSequence, SchedulerOutput
from tests.m6.ranks import ThreadGroup, on_ranks
from tests.workloads import make_engine, serve
from tests.x4.checkpoints import assert_ranks_have_experts
from tests.x5.checkpoints import FAMILIES, hybrid_checkpoint, stacked_checkpoint
from tests.x5.test_delta_kernels import batch_of
from tests.x5.test_hybrid_models import seeded

SNAPSHOTS = {"block_size": 4, "num_kv_blocks": 40, "max_num_batched_tokens": 20, "snapshot_interval": 8}


@pytest.mark.parametrize(("family", "is_random"), [*((family, False) for family in FAMILIES), ("qwen3_next", True)])
def test_linear_layers_of_two_ranks_add_up(family: str, is_random: bool) -> None:
    """Two ranks, which are threads: after a step of a decode and a prompt, the sum is what one rank has, and so are the states."""
    one = EngineConfig(model=str(hybrid_checkpoint(family)), device="cpu", use_tqdm=False, random_weights=is_random)
    setup = set_up(replace(one, tensor_parallel_size=2))
    whole: Any = load_native_model(set_up(one)).model.layers[1]
    x = torch.randn(9, setup.hf_config.hidden_size, generator=torch.Generator().manual_seed(0))

    def run(layer: Any) -> torch.Tensor:
        layer.states = tuple(torch.zeros(2, *shape) for shape, _ in layer.state_shapes())
        answer: torch.Tensor = layer(x, a_step())
        return answer

    def work(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        part: Any = load_sharded_model(setup, group).model.layers[1]
        return run(part.self_attn), part.self_attn.states[1]

    with torch.inference_mode():
        expected = run(whole.self_attn)
        parts = on_ranks(2, work)
    for summed, _ in parts:
        torch.testing.assert_close(summed, expected, rtol=1e-4, atol=1e-4)
    together = torch.cat([state for _, state in parts], dim=1)
    torch.testing.assert_close(together, whole.self_attn.states[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_two_ranks_take_their_experts_from_stacks(expert_parallel: bool) -> None:
    assert_ranks_have_experts(stacked_checkpoint(), expert_parallel)


def a_step() -> ForwardBatch:
    return batch_of([1, 8], [0, 0], [1, 0])


@pytest.mark.parametrize("width", [[], [1]], ids=["any step", "decodes"])
def test_copies_of_states_reach_another_process(width: list[int]) -> None:
    """In a step of a prompt, and in one of decodes alone, which has another layout."""
    tokens = np.arange(1, dtype=np.int32)
    sampling = None if width else SamplingSpec()
    scheduled, copies = ScheduledSequence(0, 0, 7, 8, tokens, (), 0, 1, sampling), [[0, -1 if width else 5, 3]]
    extras = {STATES: np.array(copies, np.int32)}
    step = StepPacker(1, width).pack(SchedulerOutput((scheduled,), extras=extras))
    assert step.is_decode == bool(width)
    sent = decode_step(encode_step(step))
    assert isinstance(sent, PackedStep)
    assert {owner: matrix.tolist() for owner, matrix in unpack_extras(sent.extras).items()} == {STATES: copies}


@pytest.mark.usefixtures("warm")
def test_two_processes_answer_as_transformers() -> None:
    """Copies of states travel in the packed step: prefixes are found, sequences give way, and the text is that of M1."""
    load = seeded()
    engine = make_engine(load.model, milestone="m6", tensor_parallel_size=2, **SNAPSHOTS)
    try:
        for arrival in ("random_steps", "at_once"):  # the second time prefixes are found
            load.check(serve(engine, load.requests, arrival))
        kv = engine.scheduler.kv
        assert kv is not None and kv.stats.tokens_hit > 0
    finally:
        engine.close()
