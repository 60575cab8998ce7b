"""`compile=True`: other code for the same layers, the same answers."""

from functools import partial
from typing import Any

import pytest
import torch

from folovllm.config import EngineConfig
from folovllm.layers.layernorm import RMSNorm
from folovllm.sample.compiled import CompiledSampler
from folovllm.sample.sampler import Sampler, SamplingBatch
from tests.helpers import tiny_checkpoint
from tests.workloads import KINDS, answered, make_engine, mixed_requests, serve, workload

FIELDS: dict[str, Any] = {"milestone": "m6", "max_num_seqs": 4}
ENGINES: list[dict[str, Any]] = [{}, {"milestone": "m2"}]


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> None:
    torch._dynamo.reset()  # what it compiles is kept by function, not by engine


@pytest.mark.slow
@pytest.mark.parametrize("fields", ENGINES, ids=str)
def test_compiled_engines_answer_as_plain_ones(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through dynamo alone: a code generator would take minutes here and is not what is under test."""
    graphs: list[str] = []
    backend = partial(torch.compile, backend=lambda module, _: graphs.append(str(module.graph)) or module)
    monkeypatch.setattr(torch, "compile", backend)
    checkpoint = tiny_checkpoint(num_hidden_layers=1)
    load = answered(checkpoint, [request for kind in KINDS for request in mixed_requests(kind, 3)])
    engine = make_engine(checkpoint, compile=True, **FIELDS | fields)
    load.check(serve(engine, load.requests))
    for traces_of in ("rsqrt", "silu", "cat", "argmax"):  # norm, activation, rotation, draw
        assert any(traces_of in graph for graph in graphs), traces_of


def test_the_compiled_draw_is_the_same() -> None:
    """One row or several, filtered or not, through the tracer: token by token what the plain sampler draws."""
    plain, compiled = Sampler(), CompiledSampler()
    compiled._sample = torch.compile(plain.sample, dynamic=True, backend="eager")
    for num_rows, filtered in ((3, False), (1, False), (4, True)):
        filters = [torch.full((num_rows,), x) for x in (0.05, 20, 0.9)] if filtered else [None] * 3
        temperature = torch.linspace(0, 1.5, num_rows)
        seeds, positions = torch.arange(num_rows) * 10**12 + 7, torch.arange(num_rows) + 3
        batch = SamplingBatch(temperature, seeds, positions, False, *filters, [])
        logits = 3 * torch.randn(num_rows, 259, generator=torch.Generator().manual_seed(num_rows))
        assert compiled.sample(logits, batch).tolist() == plain.sample(logits, batch).tolist()


def test_hugging_faces_model_is_not_ours_to_compile() -> None:
    with pytest.raises(ValueError, match="native"):
        EngineConfig(milestone="m1", compile=True)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("num_filters", [0, 2, 3])
def test_the_generated_draw_over_a_whole_vocabulary(num_rows: int, num_filters: int) -> None:
    """A row so long that its sums are split among programs, which a small model's is not."""
    filters = [torch.full((num_rows,), x, device="cuda") for x in (0.05, 20, 0.9)[:num_filters]]
    filters += [None] * (3 - num_filters)
    seeds, positions = torch.arange(2 * num_rows, device="cuda").view(2, -1) + 3
    batch = SamplingBatch(torch.full_like(seeds, 0.6, dtype=torch.float32), seeds, positions, False, *filters, [])
    logits = torch.randn(num_rows, 151_936, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    assert CompiledSampler().sample(logits, batch).tolist() == Sampler().sample(logits, batch).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_compiled_for_a_gpu(kind: str) -> None:
    load = workload(kind, count=6)
    fields = FIELDS | {"max_num_seqs": 16, "dtype": "float32", "attention_backend": "triton", "device": "cuda"}
    engine = make_engine(tiny_checkpoint(), compile=True, **fields)
    runner = engine.executor._worker.runner
    layers = [m for m in runner.model.modules() if isinstance(m, RMSNorm)]
    assert layers and all(type(layer).__name__ == "CompiledRMSNorm" for layer in layers)
    assert isinstance(runner._step_sampler._sampler, CompiledSampler)
    load.check(serve(engine, load.requests), tol=0.05)
