"""Weights in place: an engine that serves gets other weights without a new start, and returns its own.

The names are those of the checkpoint. Packed layers and ranks take their parts through the loader's own mapping.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file

from folovllm.electives.rollouts.generation import next_generation
from folovllm.layers.linear import PLAIN, LinearBase, Plain
from folovllm.models.extra_tensors import is_empty_bias, is_ignored, repacked, weight_loader_of
from folovllm.models.files import load_hf_config, read_json, reading, resolve_model
from folovllm.models.gemma3 import Gemma3RMSNorm
from folovllm.models.given_tensors import as_named, require_usable
from folovllm.models.llama import LlamaForCausalLM
from folovllm.models.loader import (
    SINGLE,
    Destination,
    Tensors,
    checkpoint_places,
    pop_destination,
    require_finite,
)
from folovllm.models.messages import some_of
from folovllm.models.registry import build_model, default_dtype, quantization_hook
from folovllm.worker.gpu_worker import GPUWorker
from folovllm.worker.graph_runner import GraphRunner
from folovllm.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from folovllm.engine.llm_engine import LLMEngine
    from folovllm.engine.setup import EngineSetup
    from folovllm.outputs import RequestOutput

ASLEEP = "the engine sleeps and takes no requests: wake it up first"  # `LLMEngine.refusal`
QUANTIZED = "quantization_config"
QUANTIZED_DTYPES = (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn)  # of codes
Worker = GPUWorker[Any, Any]
Weights = str | Path | Mapping[str, torch.Tensor] | Tensors
InFlight = Literal["wait", "abort", "keep"]  # vLLM's words


def update_weights(engine: LLMEngine, weights: Weights, in_flight: InFlight = "wait") -> None:
    """Give the model other weights, all of them, and begin a new generation of cached prefixes.

    Whatever happens, later requests find no K/V of before: a failure may leave some of the weights changed.

    Args:
        weights: a checkpoint, named as a model is (`EngineConfig.model`), or a folder with its tensors alone; or tensors by the
            checkpoint's names, on any device and in any float dtype (codes in their own). What is iterated over may come from
            elsewhere, one tensor at a time (`folovllm.electives.rollouts.transfer`). A head that drafts gets the tensors of a
            checkpoint for it (`mtp.`), all of them, if these are among the weights. Without them its drafts fit less well.
        in_flight: what becomes of running requests. "wait" finishes them with the old weights, "abort" ends them, and "keep"
            lets them go on: their later tokens come from the new weights, over K/V of the old ones. What they report meanwhile
            comes from the engine's next steps, also after a failure.

    Raises:
        ValueError: a checkpoint is quantized otherwise than the model, and nothing has changed; or weights are missing, left
            over, or of another shape. Some may have been copied by then: update again. Of a mapping, what is missing or of another
            shape is found before anything is changed or ended.
    """
    if not isinstance(weights, str | Path | Iterator):
        weights = dict(map(as_named, entries(weights)))  # all are there, so all are checked before one is copied
    with readable(engine, weights) as source:
        if in_flight not in ("wait", "abort", "keep"):
            raise ValueError(f'in_flight must be "wait", "abort" or "keep", not {in_flight!r}')
        require_awake(engine)
        if isinstance(weights, Mapping) and engine.setup.config.tensor_parallel_size == 1:
            engine.executor.collective_rpc(require_fitting, engine.setup, weights)
        end_requests(engine, in_flight)
        try:
            engine.executor.collective_rpc(load_weights, source)
        finally:
            next_generation(engine)


def require_fitting(worker: Worker, setup: EngineSetup, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError if these leave out one of the model's weights, do not fit one, or are no numbers of its kind."""
    runner = inner_runner(worker)
    if (head := getattr(runner, "head", None)) is not None and head.is_in_checkpoint:
        require_fitting_head(head, weights)
    model = runner.model
    if quantized_layers(model):  # repacked, so its places are not those of a checkpoint
        model = build_model(setup.hf_config, setup.dtype, "meta")
    places = checkpoint_places(model)
    methods = {name.rpartition(".")[0]: place.linear_method for name, place in places.items()}
    own = [(given, *named) for given, tensor in weights.items() for named in model.local_tensors(given, tensor)]
    for given, name, tensor in own:
        is_tied = name == "lm_head.weight" and model.lm_head.weight is model.model.embed_tokens.weight
        if name in places:
            require_usable(given if tensor is weights[given] else name, tensor, places[name].linear_method)
            require_place(name, tensor, places)
        elif not (is_tied or is_ignored(name, methods) or weight_loader_of(name)):
            require_usable(given, tensor, PLAIN)
            if not is_empty_bias(name, tensor, methods.get(name.rpartition(".")[0], PLAIN)):
                pop_destination(given, torch.Size(), {})
    if places:
        raise ValueError(f"the given set of weights lacks {some_of(map(model.checkpoint_name, places))}")


def require_fitting_head(head: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError if these hold some weights of a `DraftHead` and leave one out, or do not fit one. They may hold none."""
    places = {head.checkpoint_name(name): place for name, place in checkpoint_places(head).items()}
    own = [(given, *part) for given, tensor in weights.items() for part in head.local_tensors(given, tensor)]
    for given, own_name, tensor in own:
        require_usable(given, tensor, PLAIN)
        if (name := head.checkpoint_name(own_name)) not in places:
            pop_destination(name, torch.Size(), {})
        require_place(name, tensor, places)
    if own and places:
        raise ValueError(f"the given set of weights lacks {some_of(places)}")


def require_place(name: str, tensor: torch.Tensor, places: dict[str, Destination]) -> None:
    """Raise ValueError if a tensor does not fit its place, which is crossed off, or is not finite there. Codes are compared where that takes no work."""
    place = places[name]
    shape = place.view.shape
    if isinstance(place.linear_method, Plain) or not tensor.numel():
        shape = tensor.shape
    elif place.view.is_meta:
        with suppress(NotImplementedError, RuntimeError):  # an order that hangs on the numbers
            shape = repacked(name, tensor, place.linear_method, place.view).shape
    pop_destination(name, shape, places)
    if tensor.is_floating_point():
        require_finite(name, tensor if tensor.dtype == torch.float8_e4m3fn else tensor.to(place.view.dtype))


def require_awake(engine: LLMEngine) -> None:
    """Raise RuntimeError if the engine was closed, ValueError if it sleeps: then its weights are nowhere."""
    engine.require_open()
    if engine.refusal == ASLEEP:
        raise ValueError("the engine sleeps: wake it up first, with other weights if you like (wake_up(weights))")


def end_requests(engine: LLMEngine, in_flight: InFlight) -> None:
    """Finish or abort the requests, or keep them. The outputs of each step wait for who calls `engine.step`."""
    undelivered: deque[list[RequestOutput]] = deque()
    try:
        while in_flight != "keep" and engine.request_ids:
            outputs = engine.loop.step() if in_flight == "wait" else engine.abort_request(engine.request_ids)
            if outputs:
                undelivered.append(outputs)
    finally:
        if undelivered:
            engine.loop = Undelivered(engine, undelivered)  # type: ignore[assignment]


class Undelivered:
    """Stands for an engine's loop until it has handed out the outputs of earlier steps."""

    def __init__(self, engine: LLMEngine, outputs: deque[list[RequestOutput]]) -> None:
        self._engine, self._loop, self._outputs = engine, engine.loop, outputs

    def step(self) -> list[RequestOutput]:
        """Return the outputs of the next of these steps."""
        outputs = self._outputs.popleft()
        if not self._outputs:
            self._engine.loop = self._loop
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Return True: there are outputs to hand out."""
        return True


@contextmanager
def readable(engine: LLMEngine, weights: Weights | None) -> Iterator[Path | Tensors | None]:
    """Yield the weights in a form that every rank can read: several ranks are processes, and read a file.

    After a failure it takes the rest of an iterator, because its sender waits until all is received (`folovllm.electives.rollouts.transfer`).
    """
    if weights is None:
        yield None
        return
    if isinstance(weights, str | Path):
        path = Path(weights) if os.path.isdir(weights) else resolve_model(str(weights))
        require_same_codes(engine, path)
        yield path
        return
    named = iter(entries(weights))
    try:
        if engine.setup.config.tensor_parallel_size == 1:
            yield named
            return
        with tempfile.TemporaryDirectory() as folder:
            save_file(dict(map(on_host, map(as_named, named))), Path(folder) / SINGLE)
            yield Path(folder)
    except Exception:
        for _ in named:
            pass
        raise


def entries(weights: Any) -> Iterable[Any]:
    """Return what is iterated over. Raises ValueError for what are no weights."""
    if isinstance(weights, Mapping):
        return weights.items()
    if not isinstance(weights, Iterable):
        raise ValueError(
            f"weights must be a folder, or tensors by the checkpoint's names, not {type(weights).__name__}"
        )
    return weights


def on_host(named: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    """Return the name and its tensor, contiguous and on the CPU (a copy unless it is that already). Raises ValueError if it holds no weights."""
    name, tensor = named
    if tensor.dtype not in QUANTIZED_DTYPES:
        require_usable(name, tensor, PLAIN)
    return name, tensor.detach().contiguous().cpu()


def require_same_codes(engine: LLMEngine, folder: Path) -> None:
    """Raise ValueError if a checkpoint is quantized otherwise than the model: its tensors may have the same names and shapes."""
    config, own, file = engine.setup.config, engine.setup.hf_config, folder / "config.json"
    if not file.is_file() or not (getattr(own, QUANTIZED, None) or read_json(file).get(QUANTIZED)):
        return
    given = load_hf_config(folder, config)
    if (quantization := quantization_hook(given, config)) is not None:
        given = quantization.configured(given, config)
    with reading(f"the model in {folder}"):
        built = [build_model(each, engine.setup.dtype, "meta") for each in (own, given)]
    before, after = ([m.linear_method for m in model.modules() if isinstance(m, LinearBase)] for model in built)
    if before != after:
        raise ValueError(
            f"the checkpoint in {folder} is not quantized as the engine's model is, whose layers stay as they are: "
            "make a new engine for it"
        )


def load_weights(worker: Worker, weights: Path | Tensors | None) -> None:
    """Load `weights` into a rank's model; None loads those of its start again. Captured steps read them from then on.

    A quantized layer may repack its weights, so it is created anew, and steps are captured again.
    """
    runner = inner_runner(worker)
    quantized = quantized_layers(runner.model)
    with worker.current, torch.no_grad():
        for layer in quantized:
            create_again(layer, runner.model.lm_head.weight)
        runner.load_weights(weights)
        if quantized and isinstance(worker.runner, GraphRunner):
            worker.runner.forget_graphs()
            worker.runner.capture_again()


def create_again(layer: LinearBase, like: torch.Tensor) -> None:
    """Give a layer the empty parameters that a checkpoint fills, on the device and for the dtype of `like`."""
    with like.device, default_dtype(like.dtype):
        layer.linear_method.create(layer)


def get_weights(engine: LLMEngine) -> dict[str, torch.Tensor]:
    """Return the weights by the checkpoint's names. They are the engine's own memory: copy what must outlast an update.

    What the engine keeps in another form is a copy: norms that add 1 (Gemma 3, Qwen3.5), projections in another order
    (Qwen3-Next). If a norm was folded into the product behind it, the norm's weights are ones here too. A head for drafts
    (`mtp.`) is not among them; an update that holds its tensors changes it, too.

    Raises:
        ValueError: the model is in several parts, quantized or not ours.
    """
    require_awake(engine)
    if engine.setup.config.tensor_parallel_size > 1:
        raise ValueError("get_weights needs the whole model: leave tensor_parallel_size at 1, or read the checkpoint")
    (weights,) = engine.executor.collective_rpc(own_weights)
    return weights


def own_weights(worker: Worker) -> dict[str, torch.Tensor]:
    """Return the weights of a rank's model. Raises ValueError as `get_weights`."""
    model = inner_runner(worker).model
    if quantized_layers(model):
        raise ValueError("get_weights: quantized weights are kept in another form than the checkpoint's: read that")
    return weights_of(model)


def weights_of(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Return a model's parameters by the checkpoint's names and as the checkpoint has them: views, where it keeps them in this form."""
    norms = {f"{name}.weight": m.stored for name, m in model.named_modules() if isinstance(m, Gemma3RMSNorm)}
    return {
        model.checkpoint_name(name): norms.get(name, model.stored_weight(name, place.view))
        for name, place in checkpoint_places(model).items()
    }


def quantized_layers(model: LlamaForCausalLM) -> list[LinearBase]:
    """Return the linear layers that keep their weights in another form than plain floats."""
    return [m for m in model.modules() if isinstance(m, LinearBase) and not isinstance(m.linear_method, Plain)]


def inner_runner(worker: Worker) -> ModelRunner:
    """Return what owns the model of a worker. Raises ValueError for M1's runners, which keep it in another way."""
    runner = worker.runner.inner if isinstance(worker.runner, GraphRunner) else worker.runner
    if not isinstance(runner, ModelRunner):
        raise ValueError("weights are updated, and sleep is possible, from milestone m2 on")
    return runner
