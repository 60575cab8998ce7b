"""Load checkpoints into models: only safetensors, one tensor at a time, and no name may be left over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tqdm import tqdm

from folovllm.engine.setup import EngineSetup
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.linear import FLOATS, PLAIN, LinearBase, LinearMethod, Plain
from folovllm.models.files import read_json, reading
from folovllm.models.llama import LlamaForCausalLM
from folovllm.models.messages import some_of, torch_names
from folovllm.models.registry import PLAIN_LAYERS, build_model

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
WEIGHT_NAMES = (".weight", "proj.bias", "weight_scale", "weight_scale_inv")  # "attn.bias" of old checkpoints is a mask

LinearMethods = dict[str, LinearMethod]  # by the name of a module
Tensors = Iterable[tuple[str, torch.Tensor]]  # by the names of a checkpoint
Shard = Callable[[str, Any], torch.Tensor]  # a tensor's name, and the tensor as it is stored -> the part to keep


def load_native_model(
    setup: EngineSetup,
    layers: LayerSet = PLAIN_LAYERS,
    into: LlamaForCausalLM | None = None,
    weights: Path | Tensors | None = None,
) -> LlamaForCausalLM:
    """Build the model on its device, then load its weights. A model that exists (`into`) gets other `weights`."""
    model = into or built(setup, setup.hf_config, layers)
    if setup.config.random_weights and weights is None:
        from folovllm.models.random_weights import init_random_weights

        init_random_weights(model, setup.config.seed, checkpoint_places(model))
    else:
        load_model(model, setup.path if weights is None else weights, use_tqdm=setup.config.use_tqdm and into is None)
    return model


def built(setup: EngineSetup, hf_config: Any, layers: LayerSet) -> LlamaForCausalLM:
    """Return the empty model, or a rank's shard of it. Raises ValueError, which names the folder."""
    with reading(f"the model in {setup.path}"):
        return build_model(hf_config, setup.dtype, setup.device, setup.max_model_len, layers)


def load_model(
    model: LlamaForCausalLM, path: Path | Tensors, use_tqdm: bool = True, shard: Shard | None = None
) -> None:
    """Fill `model` from the checkpoint in folder `path`, or from names and tensors, straight into its (merged) parameters.

    Each tensor is copied from the memory-mapped file where it belongs, so the weights are never in memory twice. With
    `shard`, only the part that it picks is read. A model that is full gets other weights in place: addresses stay.

    Raises:
        ValueError: no safetensors here, a damaged file, or a weight that is missing, left over, of another shape or kind of
            number, or not finite (the message names it).
    """
    places = checkpoint_places(model)
    linear_methods = {name.rpartition(".")[0]: place.linear_method for name, place in places.items()}  # of each module
    part = None  # as at M1; M6: a rank's shard, X5: another order
    if (shard := shard or model.reorder) is not None:
        from folovllm.models.extra_tensors import part_of

        part = partial(part_of, places, linear_methods, shard)
    if isinstance(path, Path):
        source, tensors = f"the checkpoint in {path}", read_tensors(path, linear_methods, part, model.local_tensors)
    else:
        from folovllm.models.given_tensors import given_tensors

        source, tensors = "the given set of weights", given_tensors(path, linear_methods, part, model.local_tensors)
    extra = []
    hidden = None if use_tqdm else True
    with tqdm(total=len(places), desc="Loading weights", unit="tensor", disable=hidden, delay=1) as progress:
        for name, tensor in tensors:
            if name not in places:  # no place is left: a tied head that is stored twice, or an elective's tensor
                extra.append((name, tensor))
                continue
            with reading(source, name):
                copy_weight(name, tensor, places)
            progress.update()
    if places:  # `copy_weight` has crossed off the others
        raise ValueError(f"{source} lacks {some_of(map(model.checkpoint_name, places))}")
    if extra:
        from folovllm.models.extra_tensors import load_extra

        with reading(source):
            load_extra(model, extra, linear_methods)  # raises ValueError for a name that nothing knows
    model.weights_loaded()


@dataclass(frozen=True, slots=True)
class Destination:
    """Where one of the checkpoint's tensors goes: a view of a parameter or of a part of it."""

    view: torch.Tensor
    linear_method: LinearMethod = PLAIN


def checkpoint_places(model: LlamaForCausalLM) -> dict[str, Destination]:
    """Where each of the checkpoint's tensors goes, by its name.

    The checkpoint has a tensor for each projection, our layers have merged ones. So for each module of
    `model.named_modules()`:

    - a `LinearBase` says with `module.weight_views()`, for each kind ("weight", perhaps "bias"), one view for each of its parts.
      The parts' names are in `model.packed_modules_mapping`, by the last word of the module's name: "qkv_proj" ->
      ["q_proj", "k_proj", "v_proj"]. A layer that is not merged is not in it, and is its own only part. The name of a
      tensor is that of its part, beside the merged layer, then the kind: "model.layers.0.self_attn.q_proj.weight". The
      view's destination is `Destination(view, module.linear_method)`.
    - any other module has its own parameters (`module.named_parameters(recurse=False)`): "model.norm.weight". Their destination is
      `Destination(parameter.data)`, and a parameter that was there already (tied weights) has no second one.
    """
    places: dict[str, Destination] = {}
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        if isinstance(module, LinearBase):
            parent, _, leaf = module_name.rpartition(".")
            parts = [f"{parent}.{part}" for part in model.packed_modules_mapping.get(leaf, [leaf])]
            for kind, views in module.weight_views().items():
                places |= {
                    f"{p}.{kind}": Destination(view, module.linear_method) for p, view in zip(parts, views, strict=True)
                }
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                places[f"{module_name}.{kind}"] = Destination(parameter.data)
                seen.add(id(parameter))
    return places


def copy_weight(name: str, tensor: torch.Tensor, places: dict[str, Destination]) -> None:
    """Copy one tensor of the checkpoint to its place and cross that off."""
    place = places.get(name)
    if place is not None and not isinstance(place.linear_method, Plain):
        from folovllm.models.extra_tensors import repacked

        tensor = repacked(name, tensor, place.linear_method, place.view)
    place = pop_destination(name, tensor.shape, places)
    if place.view.is_cuda and not tensor.is_cuda and tensor.dim():
        from folovllm.models.extra_tensors import copy_in_pieces

        copy_in_pieces(place.view, tensor)
    else:
        place.view.copy_(tensor)
    require_finite(name, place.view)


def pop_destination(name: str, shape: torch.Size, places: dict[str, Destination]) -> Destination:
    """Return the place of a tensor of this shape, crossed off. Raises ValueError if it has another shape, or there is none."""
    place = places.pop(name, None)
    if place is None:
        raise ValueError(f"the weights hold {name!r}, for which the model has no place (or had it twice)")
    if place.view.shape != shape:
        raise ValueError(f"{name!r} has shape {list(shape)}, the model expects {list(place.view.shape)}")
    return place


def require_finite(name: str, weight: torch.Tensor) -> None:
    """Raise ValueError if a weight holds NaN or infinity: every answer would be the first token, again and again."""
    if weight.dtype == torch.float8_e4m3fn:  # it has no infinity, and two bytes that are NaN
        finite = (weight.view(torch.uint8) & 0x7F).amax() != 0x7F
    else:
        finite = torch.stack(weight.aminmax()).isfinite().all()
    if not finite:
        dtype = str(weight.dtype).removeprefix("torch.")
        raise ValueError(f"{name!r} holds NaN or infinity as {dtype}: the weights are damaged, or need another dtype")


def require_float_weights(files: list[Path]) -> None:
    """Raise ValueError at the first weight stored in another kind of number; only the files' headers are read."""
    for file in files:
        with opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118  # a handle is no dict
                require_stored(name, handle.get_slice(name).get_dtype(), {})


def require_stored(name: str, dtype: str, linear_methods: LinearMethods) -> None:
    """Raise ValueError if a weight's numbers are not what its linear method stores. A mask ("attn.bias" of old checkpoints) may be of any."""
    module, _, kind = name.rpartition(".")
    wanted = linear_methods.get(module, PLAIN).stored(kind)
    if dtype in wanted or (wanted == FLOATS and not name.endswith(WEIGHT_NAMES)):  # the latter is a mask
        return
    said, *names = torch_names([dtype, *wanted])
    if wanted == FLOATS:
        raise ValueError(f"{name!r} is stored as {said}: quantized weights that config.json does not speak of")
    raise ValueError(f"{name!r} is stored as {said}, and config.json makes it {' or '.join(names)}")


def checkpoint_files(path: Path) -> list[Path]:
    """List the files of the checkpoint: those that its index names, else the single one."""
    index, names = path / INDEX, {SINGLE}
    if index.is_file():
        with reading(index):
            names = set(read_json(index)["weight_map"].values())
            # A downloaded folder must not open what lies elsewhere.
            if outside := [name for name in names if Path(name).name != name or name == ".."]:
                raise ValueError(f"it names {outside[0]!r}, which must be the name of a file in the same folder")
    files = [path / name for name in sorted(names)]
    if absent := [file.name for file in files if not file.is_file()]:
        says = "only safetensors are loaded, never pickles (.bin, .pt), which can run code"
        convert = "If the checkpoint has no safetensors, convert it with transformers' save_pretrained"
        raise ValueError(f"no {', '.join(absent)} in {path}: {says}. {convert}")
    return files


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file, memory-mapped. Raises ValueError, with its name, for whatever goes wrong while it is read."""
    with reading(file), safe_open(file, framework="pt") as handle:
        yield handle


def read_tensors(
    path: Path, linear_methods: LinearMethods, part: Shard | None, local_tensors: Callable[..., Tensors]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor, one after the other, each a view of the memory-mapped file. `local_tensors` says what the model calls it."""
    for file in checkpoint_files(path):
        with opened(file) as handle:
            for stored_name in handle.keys():  # noqa: SIM118  # a handle is no dict
                with reading(file, stored_name):
                    dtype = handle.get_slice(stored_name).get_dtype()
                    for name, tensor in local_tensors(stored_name, handle.get_tensor(stored_name)):
                        require_stored(name, dtype, linear_methods)
                        yield name, tensor if part is None else part(name, tensor)
