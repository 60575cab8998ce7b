"""Sleep: an engine that is not needed gives its memory back, and wakes without a new start.

A tensor keeps its place in the model, and its storage is emptied. So all views of it, in layers and in the loader's mapping, stay
what they are. Captured steps have the addresses themselves: they are captured again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from folovllm.layers.attention import Attention
from folovllm.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from folovllm.rollouts.weights import Weights, Worker, as_source, inner_runner, load_weights
from folovllm.worker.graph_runner import GraphRunner

if TYPE_CHECKING:
    from folovllm.engine.llm_engine import LLMEngine


@dataclass(slots=True)
class Emptied:
    """A storage that was emptied: how large it was, and a copy on the host, if there is one."""

    storage: torch.UntypedStorage
    num_bytes: int
    copy: torch.UntypedStorage | None

    def fill(self) -> None:
        """Allocate the storage again, and copy back what there is."""
        self.storage.resize_(self.num_bytes)
        if self.copy is not None:
            self.storage.copy_(self.copy)


def sleep(engine: LLMEngine, level: int = 1) -> None:
    """Free the KV cache, captured steps, and the weights: level 1 keeps a copy on the host, level 2 keeps none.

    On a CPU the host is where the weights are, so level 1 frees the cache alone. The engine takes no requests until `wake_up`.

    Raises:
        ValueError: the level is unknown, the engine sleeps already, or serves requests.
    """
    if level not in (1, 2):
        raise ValueError(f"level must be 1 or 2, not {level!r}")
    if engine.is_sleeping:
        raise ValueError("the engine sleeps already: wake it up first")
    engine.require_idle()
    engine.step()  # takes in a step whose requests were aborted
    if engine.setup.config.enable_prefix_caching:
        engine.reset_prefix_cache()
    engine.executor.collective_rpc(empty, level)
    engine.is_sleeping = True


def wake_up(engine: LLMEngine, weights: Weights | None = None) -> None:
    """Allocate all again. After level 2 the weights are loaded from where they came at the start, or are those given here.

    Raises:
        ValueError: the engine does not sleep; or the weights do not fit, and it sleeps on.
    """
    engine.require_open()
    if not engine.is_sleeping:
        raise ValueError("the engine does not sleep")
    source = None if weights is None else as_source(engine, weights, Path())
    engine.executor.collective_rpc(fill, source)
    engine.is_sleeping = False


def empty(worker: Worker, level: int) -> None:
    """Empty the storages of a rank's model and cache."""
    runner = inner_runner(worker)
    on_device = worker_is_on_gpu(worker)
    with worker.current:
        if isinstance(worker.runner, GraphRunner):
            worker.runner.forget_graphs()
        kept = set() if level == 2 else {*map(key_of, runner.model.parameters())}
        emptied = []
        for tensor in tensors_of(runner.model):
            storage = tensor.untyped_storage()
            discarded = isinstance(tensor, torch.nn.Parameter) and key_of(tensor) not in kept
            if on_device or discarded:
                emptied.append(Emptied(storage, storage.nbytes(), None if discarded else storage.cpu()))
        cache = runner.kv_cache.untyped_storage()
        emptied.append(Emptied(cache, cache.nbytes(), None))
        for each in emptied:
            each.storage.resize_(0)
        worker.state["emptied"], worker.state["level"] = emptied, level
        gc.collect()
        if on_device:
            torch.cuda.empty_cache()


def fill(worker: Worker, weights: Any) -> None:
    """Allocate the storages of a rank again, fill them, and capture steps anew."""
    runner = inner_runner(worker)
    with worker.current:
        for each in worker.state["emptied"]:
            each.fill()
        if worker.state["level"] == 2 or weights is not None:
            load_weights(worker, weights)
        else:
            for layer in runner.model.model.layers:
                cast(LlamaDecoderLayer, layer).weights_loaded()  # some note addresses
        if isinstance(worker.runner, GraphRunner):
            worker.runner.forget_graphs()
            worker.runner.capture_again()


def worker_is_on_gpu(worker: Worker) -> bool:
    """Whether the rank's device has memory of its own."""
    return inner_runner(worker).kv_cache.is_cuda


def key_of(tensor: torch.Tensor) -> int:
    """Return what two tensors of one storage share."""
    return tensor.untyped_storage()._cdata


def tensors_of(model: LlamaForCausalLM) -> Iterator[torch.Tensor]:
    """Yield one tensor of each storage of a model: parameters, buffers, and what linear methods keep beside them."""
    seen: set[int] = set()
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not isinstance(module, Attention):  # its cache is the runner's
            own += [tensor for value in vars(module).values() for tensor in tensors_in(value)]
        for tensor in own:
            if (key := key_of(tensor)) not in seen:
                seen.add(key)
                yield tensor


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield a tensor itself, or those that a record holds."""
    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from tensors_in(getattr(value, each.name, None))
