"""`compile=True`: other code for the same layers, the same answers."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from folovllm.config import EngineConfig
from folovllm.engine.overlap import make_engine
from folovllm.layers.layernorm import RMSNorm
from tests.helpers import tiny_checkpoint
from tests.workloads import MAX_MODEL_LEN, serve, workload


def test_compiled_layers_answer_as_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through dynamo alone: a code generator would take a minute here and is not what is under test."""
    calls = []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=lambda graph, _: calls.append(1) or graph))
    load = workload("greedy", count=6)
    fields = {"milestone": "m6", "max_model_len": MAX_MODEL_LEN, "device": "cpu", "use_tqdm": False, "max_num_seqs": 4}
    engine = make_engine(EngineConfig(model=str(tiny_checkpoint()), compile=True, **fields))
    load.check(serve(engine, load.requests))
    assert len(calls) >= 3  # at least one graph of each kind of layer


def test_hugging_faces_model_is_not_ours_to_compile() -> None:
    with pytest.raises(ValueError, match="native"):
        EngineConfig(milestone="m1", compile=True)


@pytest.mark.gpu
def test_compiled_for_a_gpu() -> None:
    load = workload("greedy", count=6)
    fields = {"milestone": "m6", "max_model_len": MAX_MODEL_LEN, "use_tqdm": False, "dtype": "float32"}
    engine = make_engine(EngineConfig(model=str(tiny_checkpoint()), compile=True, attention_backend="triton", **fields))
    layers = [m for m in engine.executor._worker.runner.model.modules() if isinstance(m, RMSNorm)]
    assert layers and all("forward" in vars(layer) for layer in layers)
    load.check(serve(engine, load.requests), tol=0.05)
