"""Sleep: an engine that is not needed gives its memory back, and wakes without a new start.

A tensor keeps its place in the model, and its storage is freed. So all views of it, in layers and in the loader's mapping, stay
what they are. Captured steps have the addresses themselves: they are captured again.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from folovllm.electives.rollouts.weights import ASLEEP, Weights, Worker, inner_runner, load_weights, readable
from folovllm.layers.attention import Attention
from folovllm.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from folovllm.worker.graph_runner import GraphRunner

if TYPE_CHECKING:
    from folovllm.engine.llm_engine import LLMEngine


TAGS = ("weights", "kv_cache")  # vLLM's names of the parts that sleep


@dataclass(slots=True)
class FreedStorage:
    """A storage that was freed: of which part, how large it was, and a copy on the host, if there is one."""

    tag: str
    storage: torch.UntypedStorage
    num_bytes: int
    backup: torch.UntypedStorage | None

    def restore(self) -> None:
        """Allocate the storage again, and copy back what there is."""
        self.storage.resize_(self.num_bytes)
        if self.backup is not None:
            self.storage.copy_(self.backup)


def sleep(engine: LLMEngine, level: int = 1) -> None:
    """Free the KV cache, captured steps, and the weights: level 1 keeps a copy on the host, level 2 keeps none.

    On a CPU the host is where the weights are, so level 1 frees the cache alone. The engine takes no requests until `wake_up`.

    Raises:
        ValueError: the level is unknown, the engine sleeps already, or serves requests.
    """
    if level not in (1, 2):
        raise ValueError(f"level must be 1 or 2, not {level!r}")
    if engine.refusal == ASLEEP:
        raise ValueError("the engine sleeps already: wake it up first")
    engine.require_open()
    if engine.has_unfinished_requests():
        raise ValueError("the engine serves requests: let them end, or abort them, before it sleeps")
    engine.step()  # takes in a step whose requests were aborted
    if engine.setup.config.enable_prefix_caching:
        engine.forget_prefixes()
    engine.executor.collective_rpc(free_storages, level)
    engine.refusal = ASLEEP


def wake_up(engine: LLMEngine, weights: Weights | None = None, tags: Collection[str] | None = None) -> None:
    """Allocate all again. After level 2 the weights are loaded from where they came at the start, or are those given here.

    With `tags` only these parts wake, and the engine sleeps on until all have.

    Raises:
        ValueError: a tag is unknown; the engine does not sleep; or the weights do not fit, and it sleeps on. Some may have been copied by then, so
            the next call loads all weights, as after level 2.
    """
    tags = TAGS if tags is None else [tags] if isinstance(tags, str) else tags
    if unknown := [tag for tag in tags if tag not in TAGS]:
        raise ValueError(f"tags must be among {', '.join(TAGS)}, not {unknown[0]!r}")
    with readable(engine, weights) as source:
        engine.require_open()
        if engine.refusal != ASLEEP:
            raise ValueError("the engine does not sleep")
        folder = engine.setup.path if source is None else source
        if (
            isinstance(folder, Path)
            and isinstance(weights, str | Path | None)
            and not (folder / "config.json").is_file()
        ):
            raise ValueError(f"there is no config.json in {folder}: the model is not there any more")
        is_asleep = any(engine.executor.collective_rpc(restore_storages, source, tuple(tags)))
        engine.refusal = ASLEEP if is_asleep else ""


def free_storages(worker: Worker, level: int) -> None:
    """Free the storages of a rank's model, its cache and its states."""
    runner = inner_runner(worker)
    on_device = runner.kv_cache.is_cuda
    with worker.current:
        if isinstance(worker.runner, GraphRunner):
            worker.runner.forget_graphs()
        freed = []
        for tensor in tensors_of(runner.model):
            storage = tensor.untyped_storage()
            discarded = level == 2 and isinstance(tensor, torch.nn.Parameter)
            if on_device or discarded:
                backup = None if discarded else storage.cpu()
                freed.append(FreedStorage("weights", storage, storage.nbytes(), backup))
        for tensor in (runner.kv_cache, *(runner.states.tensors if runner.states else ())):
            storage = tensor.untyped_storage()
            freed.append(FreedStorage("kv_cache", storage, storage.nbytes(), None))
        for each in freed:
            each.storage.resize_(0)
        worker.state["freed"], worker.state["must_load"], worker.state["asleep"] = freed, level == 2, {*TAGS}
        gc.collect()
        if on_device:
            torch.cuda.empty_cache()


def restore_storages(worker: Worker, weights: Any, tags: tuple[str, ...]) -> bool:
    """Allocate these parts of a rank again and fill them. Once all are awake, capture steps anew. Returns whether a part sleeps on.

    The copies on the host are freed at the end.
    """
    runner, asleep = inner_runner(worker), worker.state["asleep"]
    with worker.current:
        for each in worker.state["freed"]:
            if each.tag in tags:
                each.restore()
        if "weights" in asleep.intersection(tags) or weights is not None:
            if worker.state["must_load"] or weights is not None:
                worker.state["must_load"] = True  # if this or another rank fails, the next call finds mixed weights
                load_weights(worker, weights)
            else:
                for layer in runner.model.model.layers:
                    cast(LlamaDecoderLayer, layer).weights_loaded()  # some note addresses
        if asleep <= {*tags} and isinstance(worker.runner, GraphRunner):
            worker.runner.forget_graphs()
            worker.runner.capture_again()
    worker.state["freed"] = [each for each in worker.state["freed"] if each.tag not in tags]
    asleep -= {*tags}
    return bool(asleep)


def tensors_of(model: LlamaForCausalLM) -> Iterator[torch.Tensor]:
    """Yield one tensor of each storage of a model: parameters, buffers, and what linear methods keep in other attributes."""
    seen: set[int] = set()
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not isinstance(module, Attention):  # its cache is the runner's
            own += [tensor for value in vars(module).values() for tensor in tensors_in(value)]
        for tensor in own:
            if (key := tensor.untyped_storage()._cdata) not in seen:
                seen.add(key)
                yield tensor


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield a tensor itself, or those that a record holds."""
    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from tensors_in(getattr(value, each.name, None))
