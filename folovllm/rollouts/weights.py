"""Weights in place: an engine that serves gets other weights without a new start, and tells its own.

The names are those of the checkpoint. Packed layers and ranks take their parts through the loader's own mapping.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file

from folovllm.layers.linear import LinearBase, Plain
from folovllm.models.llama import LlamaForCausalLM
from folovllm.models.loader import SINGLE, Tensors, checkpoint_places
from folovllm.outputs import RequestOutput
from folovllm.rollouts.generation import next_generation
from folovllm.worker.gpu_worker import GPUWorker
from folovllm.worker.graph_runner import GraphRunner
from folovllm.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from folovllm.engine.llm_engine import LLMEngine

Worker = GPUWorker[Any, Any]
Weights = str | Path | Mapping[str, torch.Tensor] | Tensors
InFlight = Literal["wait", "abort", "keep"]  # vLLM's words


def update_weights(engine: LLMEngine, weights: Weights, in_flight: InFlight = "wait") -> list[RequestOutput]:
    """Give the model other weights, all of them, and begin a new generation of cached prefixes.

    Args:
        weights: a folder with a checkpoint, or tensors by the checkpoint's names, on any device and in any float dtype. What is
            iterated over may come from elsewhere, one tensor at a time (`folovllm.rollouts.transfer`).
        in_flight: what becomes of running requests. "wait" finishes them with the old weights, "abort" ends them, and "keep"
            lets them go on: their later tokens come from the new weights, over K/V of the old ones.

    Returns:
        The outputs that "wait" and "abort" produced meanwhile.

    Raises:
        ValueError: weights are missing, left over, or of another shape. Some may have been copied by then: update again.
    """
    if in_flight not in ("wait", "abort", "keep"):
        raise ValueError(f'in_flight must be "wait", "abort" or "keep", not {in_flight!r}')
    require_awake(engine)
    outputs = end_requests(engine, in_flight)
    with tempfile.TemporaryDirectory() as folder:
        engine.executor.collective_rpc(load_weights, as_source(engine, weights, Path(folder)))
    next_generation(engine)
    return outputs


def require_awake(engine: LLMEngine) -> None:
    """Raise RuntimeError if the engine was closed, ValueError if it sleeps: then its weights are nowhere."""
    engine.require_open()
    if engine.is_sleeping:
        raise ValueError("the engine sleeps: wake it up first, with other weights if you like (wake_up(weights))")


def end_requests(engine: LLMEngine, in_flight: InFlight) -> list[RequestOutput]:
    """Do what `in_flight` says; returns the outputs."""
    if in_flight == "abort":
        return engine.abort_request(engine.request_ids)
    outputs: list[RequestOutput] = []
    while in_flight == "wait" and engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def as_source(engine: LLMEngine, weights: Weights, folder: Path) -> Path | list[tuple[str, torch.Tensor]] | Tensors:
    """Return the weights as every rank can read them: several ranks in processes of their own read a file in `folder`."""
    if isinstance(weights, str | Path):
        return Path(weights)
    named = weights.items() if isinstance(weights, Mapping) else weights
    if engine.setup.config.tensor_parallel_size == 1:
        return named
    save_file({name: tensor.detach().contiguous().cpu() for name, tensor in named}, folder / SINGLE)
    return folder


def load_weights(worker: Worker, weights: Path | Tensors | None) -> None:
    """Load `weights` into a rank's model, None: those of its start. Steps that were captured go on with them.

    A quantized layer may repack its weights, so it is created anew, and steps are captured again.
    """
    runner = inner_runner(worker)
    quantized = [m for m in linear_layers(runner.model) if not isinstance(m.linear_method, Plain)]
    with worker.current, torch.no_grad():
        for layer in quantized:
            create_again(layer, runner.model.lm_head.weight)
        runner.load_weights(weights)
        if quantized and isinstance(worker.runner, GraphRunner):
            worker.runner.forget_graphs()
            worker.runner.capture_again()


def create_again(layer: LinearBase, like: torch.Tensor) -> None:
    """Give a layer empty parameters as a checkpoint fills them, on the device and for the dtype of `like`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(like.dtype)
    try:
        with like.device:
            layer.linear_method.create(layer)
    finally:
        torch.set_default_dtype(before)


def get_weights(engine: LLMEngine) -> dict[str, torch.Tensor]:
    """Return the weights by the checkpoint's names. They are the engine's own memory: copy what must outlast an update.

    Where a norm was folded into the product behind it, so it is here: the norm's weights are ones.

    Raises:
        ValueError: the model is in several parts, quantized or not ours.
    """
    require_awake(engine)
    if engine.setup.config.tensor_parallel_size > 1:
        raise ValueError("get_weights needs the whole model: leave tensor_parallel_size at 1, or read the checkpoint")
    (weights,) = engine.executor.collective_rpc(own_weights)
    return weights


def own_weights(worker: Worker) -> dict[str, torch.Tensor]:
    """Return the weights of a rank's model. Raises ValueError if they are quantized, or not ours."""
    model = inner_runner(worker).model
    if any(not isinstance(m.linear_method, Plain) for m in linear_layers(model)):
        raise ValueError("get_weights: quantized weights are kept in another form than the checkpoint's: read that")
    return {name: place.view for name, place in checkpoint_places(model).items()}


def linear_layers(model: LlamaForCausalLM) -> Iterable[LinearBase]:
    """Return the linear layers."""
    return [module for module in model.modules() if isinstance(module, LinearBase)]


def inner_runner(worker: Worker) -> ModelRunner:
    """Return what owns the model of a worker. Raises ValueError for M1's runners, which keep it in another way."""
    runner = worker.runner.inner if isinstance(worker.runner, GraphRunner) else worker.runner
    if not isinstance(runner, ModelRunner):
        raise ValueError("weights are updated, and sleep is possible, from milestone m2 on")
    return runner
