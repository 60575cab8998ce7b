"""Load checkpoints into models: only safetensors, one tensor at a time, and no name may be left over."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from tqdm import tqdm

from folovllm.distributed.group import Group
from folovllm.distributed.sharding import keep_experts_whole, local_config, shard_merged, shard_named
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.linear import FLOATS, PLAIN, LinearBase, LinearMethod, Plain
from folovllm.layers.sharded import sharded
from folovllm.model_config import head_dim_of
from folovllm.models.files import SIZES, printable, read_json, reading
from folovllm.models.llama import LlamaForCausalLM
from folovllm.models.registry import PLAIN_LAYERS, build_model, get_model_class
from folovllm.plugins import EXTRA_TENSORS, is_installed, named
from folovllm.setup import EngineSetup

NO_ROOM = "allocate memory|Storage size calculation overflowed"  # of torch's messages on a CPU
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
IN_FLOATS = (".weight", "proj.bias", "weight_scale", "weight_scale_inv")  # unless the linear method says otherwise
STORED = {  # torch's names of dtypes: safetensors'
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int8": "I8", "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3",
}  # fmt: skip
PIECE = 32 << 20  # bytes that are pinned at a time
IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a constant that old Llama checkpoints carry

LinearMethods = dict[str, LinearMethod]  # by the name of a module
Taker = Callable[
    [LlamaForCausalLM, str, torch.Tensor], None
]  # gives a tensor of this name to its layer; may raise ValueError
Tensors = Iterable[tuple[str, torch.Tensor]]  # by the names of a checkpoint
Shard = Callable[
    [str, Any], torch.Tensor
]  # a tensor's name, and the tensor (or a `StoredTensor`) -> the part to keep, in the model's order


class StoredTensor:
    """A tensor that is still in its file. Indexing reads what is indexed, and nothing else."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored
        self.shape = torch.Size(stored.get_shape())

    def __getitem__(self, index: Any) -> torch.Tensor:
        """As a tensor's, with slices."""
        return cast(torch.Tensor, self._stored[index])


def load_native_model(
    setup: EngineSetup,
    layers: LayerSet = PLAIN_LAYERS,
    into: LlamaForCausalLM | None = None,
    weights: Path | Tensors | None = None,
) -> LlamaForCausalLM:
    """Build the model on its device, then load its weights, or initialize them with `random_weights`.

    A model that exists (`into`) gets the `weights` of another checkpoint.
    """
    model = into or built(setup, setup.hf_config, layers)
    if setup.config.random_weights and weights is None:
        init_random_weights(model, setup.config.seed)
    else:
        load_model(model, setup.path if weights is None else weights, use_tqdm=setup.config.use_tqdm and into is None)
    return model


def built(setup: EngineSetup, hf_config: Any, layers: LayerSet) -> LlamaForCausalLM:
    """Return the empty model, or a rank's part of it. Raises ValueError, which names the folder, for one that cannot be or has no room."""
    with reading(f"the model in {setup.path}"):
        try:
            return build_model(hf_config, setup.dtype, setup.device, setup.max_model_len, layers)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError | NotImplementedError) or not re.search(NO_ROOM, str(error)):
                raise
            sizes = {k: v for k, v in vars(hf_config).items() if k.endswith(SIZES) and type(v) is int}
            name = max(sizes, key=sizes.__getitem__)
            raise ValueError(
                f"its weights do not fit into memory; its largest size is {name}, {sizes[name]:,}"
            ) from error


def load_sharded_model(
    setup: EngineSetup,
    group: Group,
    layers: LayerSet = PLAIN_LAYERS,
    into: LlamaForCausalLM | None = None,
    weights: Path | Tensors | None = None,
) -> LlamaForCausalLM:
    """As `load_native_model`, the rank's part of the model. Only this part of the checkpoint is read.

    `setup` and `layers` are those of the whole model. Random weights are sharded too: they do not depend on the number of ranks.
    """
    expert_parallel = bool(setup.config.extras.get("enable_expert_parallel"))
    config = local_config(setup.hf_config, group.size, expert_parallel)
    shard = partial(shard_named, head_dim=head_dim_of(setup.hf_config), rank=group.rank, size=group.size)
    shard = partial(shard_merged, hf_config=setup.hf_config, shard=shard)
    shard = partial(
        get_model_class(setup.hf_config).shard, setup.hf_config, rank=group.rank, size=group.size, usual=shard
    )
    if expert_parallel:
        shard = partial(keep_experts_whole, shard=shard)
    part = sharded(layers, group, setup.vocab_size)
    model = into or built(setup, config, part)
    if setup.config.random_weights and weights is None:
        whole = build_model(setup.hf_config, setup.dtype, "meta", setup.max_model_len, replace(layers, counters=None))
        init_random_weights(model, setup.config.seed, whole, shard)
    else:
        show = setup.config.use_tqdm and group.rank == 0 and into is None
        load_model(model, setup.path if weights is None else weights, use_tqdm=show, shard=shard)
    return model


def load_model(
    model: LlamaForCausalLM, path: Path | Tensors, use_tqdm: bool = True, shard: Shard | None = None
) -> None:
    """Fill `model` from the checkpoint in folder `path`, straight into its (merged) parameters.

    Each tensor is read from the memory-mapped file and copied where it belongs, converted to the parameter's dtype on
    the way, so the weights are never in memory twice. With `shard`, only the part that it picks is read; without, the model
    may `reorder` its rows. Instead of a path, names and tensors may be given. A model that is full gets other weights in
    place: addresses of plain weights stay.

    Raises:
        ValueError: no safetensors here, a damaged file, or a weight that is missing, left over, of another shape, coded
            otherwise than its linear method has it, or not finite (the message names it).
    """
    places = checkpoint_places(model)
    linear_methods = {name.rpartition(".")[0]: place.linear_method for name, place in places.items()}  # of each module
    shard = shard or model.reorder
    part = None if shard is None else partial(part_of, places, shard)
    source = f"the checkpoint in {path}" if isinstance(path, Path) else "the given set of weights"
    if isinstance(path, Path):
        tensors = read_tensors(checkpoint_files(path), linear_methods, part, model.own_name)
    else:
        tensors = given_tensors(path, linear_methods, part, model.own_name)
    embedding = model.model.embed_tokens.weight
    tied, copied_head = model.lm_head.weight is embedding, None
    with tqdm(total=len(places), desc="Loading weights", unit="tensor", disable=not use_tqdm) as progress:
        for name, tensor in tensors:
            with reading(source, name):
                if tied and name == "lm_head.weight":
                    copied_head = tensor
                elif is_ignored(name, linear_methods):
                    linear_methods.get(name.rpartition(".")[0], PLAIN).check_ignored(name, tensor)
                elif name not in places and (taker := taker_of(name)) is not None:
                    taker(model, name, tensor)
                elif not is_empty_bias(name, tensor, places, linear_methods):
                    copy_weight(name, arranged(name, tensor, places), places)
                    progress.update()
    if places:
        raise ValueError(f"{source} lacks {some_of(map(model.stored_name, places))}")
    if copied_head is not None and not _same(copied_head, embedding):
        raise ValueError(
            f"{source} holds a 'lm_head.weight' of its own: set tie_word_embeddings to false in its config"
        )
    model.weights_loaded()


@dataclass(frozen=True, slots=True)
class Place:
    """Where one of the checkpoint's tensors goes: a view of a parameter or of a part of it."""

    view: torch.Tensor
    linear_method: LinearMethod = PLAIN


def checkpoint_places(model: LlamaForCausalLM) -> dict[str, Place]:
    """Where each of the checkpoint's tensors goes, by its name.

    The checkpoint has a tensor for each projection, our layers have merged ones. So for each module of
    `model.named_modules()`:

    - a `LinearBase` says with `module.places()`, for each kind ("weight", perhaps "bias"), one view for each of its parts.
      The parts' names are in `model.packed_modules_mapping`, by the last word of the module's name: "qkv_proj" ->
      ["q_proj", "k_proj", "v_proj"]. A layer that is not merged is not in it, and is its own only part. The name of a
      tensor is that of its part, beside the merged layer, then the kind: "model.layers.0.self_attn.q_proj.weight". The
      view's place is `Place(view, module.linear_method)`.
    - any other module has its own parameters (`module.named_parameters(recurse=False)`): "model.norm.weight". Their place is
      `Place(parameter.data)`, and a parameter that was there already (tied weights) has no second one.
    """
    places: dict[str, Place] = {}
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        if isinstance(module, LinearBase):
            parent, _, leaf = module_name.rpartition(".")
            parts = [f"{parent}.{part}" for part in model.packed_modules_mapping.get(leaf, [leaf])]
            for kind, views in module.places().items():
                places |= {
                    f"{p}.{kind}": Place(view, module.linear_method) for p, view in zip(parts, views, strict=True)
                }
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                places[f"{module_name}.{kind}"] = Place(parameter.data)
                seen.add(id(parameter))
    return places


def part_of(places: dict[str, Place], shard: Shard, name: str, tensor: Any) -> torch.Tensor:
    """Return the part of a checkpoint's tensor that `shard` keeps; its linear method knows how the tensor is laid out."""
    if name not in places and taker_of(name) is not None:
        return tensor[:] if tensor.shape else tensor[...]
    linear_method = places[name].linear_method if name in places else PLAIN
    return linear_method.shard(name.rpartition(".")[2], tensor, partial(shard, name))


def copy_weight(name: str, tensor: torch.Tensor, places: dict[str, Place]) -> None:
    """Copy one tensor of the checkpoint to its place and cross that off."""
    place = take_place(name, tensor.shape, places)
    copy_in_pieces(place.view, tensor)
    require_finite(name, place.view)


def copy_in_pieces(view: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor; from the host to a GPU piece by piece through pinned memory.

    While the GPU fetches a piece, all of the host's threads read the next one from its file. Copied whole, one thread of the
    driver would do both.
    """
    if not view.is_cuda or tensor.is_cuda or not tensor.dim():
        view.copy_(tensor)
        return
    rows = max(1, PIECE * len(tensor) // max(1, tensor.nbytes))
    for part, piece in zip(view.split(rows), tensor.split(rows), strict=True):
        part.copy_(piece.to(part.dtype).pin_memory(), non_blocking=True)


def take_place(name: str, shape: torch.Size, places: dict[str, Place]) -> Place:
    """Return the place of a tensor of this shape, crossed off. Raises ValueError if there is none, or it is of another shape."""
    place = places.pop(name, None)
    if place is None:
        raise ValueError(f"the checkpoint holds {name!r}, for which the model has no place (or had it twice)")
    if place.view.shape != shape:
        raise ValueError(f"{name!r} has shape {list(shape)}, the model expects {list(place.view.shape)}")
    return place


def arranged(name: str, tensor: torch.Tensor, places: dict[str, Place]) -> torch.Tensor:
    """Return a tensor of the checkpoint as its place takes it; its linear method knows how.

    Codes are put in order where the model is: 30 billion of 4 bits would keep a CPU busy for most of a minute.
    """
    place = places.get(name)
    if place is None or isinstance(place.linear_method, Plain):
        return tensor
    return place.linear_method.arrange(name.rpartition(".")[2], tensor.to(place.view.device), place.view.shape)


def taker_of(name: str) -> Taker | None:
    """Return what takes a tensor for which the model has no place, such as a scale of an FP8 cache; None if nobody knows it."""
    takers = (named(place)(name) for place in EXTRA_TENSORS if is_installed(place))
    return next((taker for taker in takers if taker is not None), None)


def is_ignored(name: str, linear_methods: LinearMethods) -> bool:
    """Whether a checkpoint may hold a tensor that no model here needs."""
    module, _, kind = name.rpartition(".")
    return name.endswith(IGNORED_SUFFIX) or (module in linear_methods and kind in linear_methods[module].ignores)


def is_empty_bias(name: str, tensor: torch.Tensor, places: dict[str, Place], linear_methods: LinearMethods) -> bool:
    """Whether it is a bias of zeros for a quantized layer that has none, as writers of GPTQ checkpoints leave them."""
    module, _, kind = name.rpartition(".")
    quantized = module in linear_methods and not isinstance(linear_methods[module], Plain)
    return kind == "bias" and quantized and name not in places and not tensor.any()


def require_finite(name: str, weight: torch.Tensor) -> None:
    """Raise ValueError if a weight holds NaN or infinity: every answer would be the first token, again and again.

    Asked when a model is loaded, so that no step pays for it; extremes take one pass, as the copy did, and no memory.
    """
    if weight.dtype == torch.float8_e4m3fn:  # it has no infinity, and two bytes that are NaN
        finite = (weight.view(torch.uint8) & 0x7F).amax() != 0x7F
    else:
        finite = torch.stack(weight.aminmax()).isfinite().all()
    if not finite:
        dtype = str(weight.dtype).removeprefix("torch.")
        raise ValueError(f"{name!r} holds NaN or infinity as {dtype}: the file is damaged, or needs another dtype")


def require_usable(name: str, tensor: Any, linear_method: LinearMethod) -> None:
    """Raise ValueError if a given weight is no tensor, holds no numbers, or other ones than its linear method takes."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name!r} is a {type(tensor).__name__}, and must be a tensor")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name!r} is sparse, and must be a tensor of all its numbers")
    if tensor.is_meta:
        raise ValueError(f"{name!r} is on the device meta, where a tensor holds no numbers")
    wanted, dtype = linear_method.stored(name.rpartition(".")[2]), str(tensor.dtype).removeprefix("torch.")
    if STORED.get(dtype) not in wanted:
        raise ValueError(f"{name!r} holds numbers of {dtype}, and the model takes {' or '.join(wanted)}")


def require_float_weights(files: list[Path]) -> None:
    """Raise ValueError at the first weight stored in another kind of number; only the files' headers are read."""
    for file in files:
        with opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118  # a handle is no dict
                require_stored(name, handle.get_slice(name).get_dtype(), {})


def require_stored(name: str, dtype: str, linear_methods: LinearMethods) -> None:
    """Raise ValueError if a weight's numbers are other codes than its linear method, or none, has. Masks are allowed."""
    module, _, kind = name.rpartition(".")
    wanted = linear_methods.get(module, PLAIN).stored(kind)
    if name.endswith(IN_FLOATS) and wanted == FLOATS and dtype not in FLOATS:
        raise ValueError(f"{name!r} is stored as {dtype}: quantized weights that config.json does not speak of")
    if wanted != FLOATS and dtype not in wanted:
        raise ValueError(f"{name!r} is stored as {dtype}, and config.json makes it {' or '.join(wanted)}")


def checkpoint_files(path: Path) -> list[Path]:
    """List the files of the checkpoint: those that its index names, else the single one."""
    index = path / INDEX
    files = [path / name for name in (sorted(indexed_names(index)) if index.is_file() else [SINGLE])]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ValueError(
            f"no {', '.join(absent)} in {path}: only safetensors are loaded, never pickles (.bin, .pt), which can run "
            "code. If the checkpoint has no safetensors, convert it with transformers' save_pretrained"
        )
    return files


def indexed_names(index: Path) -> set[str]:
    """The files that an index names, each of them beside it: a downloaded folder must not open what lies elsewhere."""
    with reading(index):
        names = set(read_json(index)["weight_map"].values())
        if outside := [name for name in names if Path(name).name != name or name == ".."]:
            raise ValueError(f"it names {outside[0]!r}, which must be the name of a file in the same folder")
    return names


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file, memory-mapped. Raises ValueError, with its name, for whatever goes wrong while it is read."""
    with reading(file), safe_open(file, framework="pt") as handle:
        yield handle


def read_tensors(
    files: list[Path], linear_methods: LinearMethods, shard: Shard | None, own_name: Callable[[str], str | None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor, one after the other, each a view of the memory-mapped file until it is copied.

    `own_name` says what the model calls a tensor; where that is None it is not read.
    """
    for file in files:
        with opened(file) as handle:
            for stored_name in handle.keys():  # noqa: SIM118  # a handle is no dict
                if (name := own_name(stored_name)) is None:
                    continue
                with reading(file, stored_name):
                    stored = handle.get_slice(stored_name)
                    require_stored(name, stored.get_dtype(), linear_methods)
                    if shard is None or is_ignored(name, linear_methods):
                        tensor = handle.get_tensor(stored_name)
                    else:
                        tensor = shard(name, StoredTensor(stored))
                yield name, tensor


def given_tensors(
    tensors: Tensors, linear_methods: LinearMethods, shard: Shard | None, own_name: Callable[[str], str | None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """As `read_tensors`, of tensors in memory."""
    for given_name, tensor in map(as_named, tensors):
        if (name := own_name(given_name)) is not None:
            if not is_ignored(name, linear_methods):
                require_usable(given_name, tensor, linear_methods.get(name.rpartition(".")[0], PLAIN))
            yield name, tensor if shard is None else shard(name, tensor)


def as_named(given: Any) -> tuple[str, Any]:
    """Return a name and what should be its tensor. Raises ValueError if this is no such pair."""
    if not isinstance(given, tuple | list) or len(given) != 2 or not isinstance(given[0], str):
        raise ValueError(
            f"the given set of weights must hold pairs of a name and a tensor, not {printable(repr(given), 100)}"
        )
    return given[0], given[1]


def init_random_weights(
    model: LlamaForCausalLM, seed: int, whole: LlamaForCausalLM | None = None, shard: Shard | None = None
) -> None:
    """Fill the model with random weights on its own device, to time a geometry: N(0, 0.02), and ones in the norms.

    Where `model` is a part, `whole` (of which only shapes matter) is what is made up, and `shard` cuts each tensor.
    """
    places, shard = checkpoint_places(model), shard or model.reorder
    generator = torch.Generator(model.lm_head.weight.device).manual_seed(seed)
    some = model.lm_head.weight
    for name, full in checkpoint_places(model if whole is None else whole).items():
        tensor = torch.empty(full.view.shape, dtype=full.view.dtype, device=some.device)
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            full.linear_method.fill(name.rpartition(".")[2], tensor, generator)
        if name in places:  # else another rank's
            places[name].view.copy_(tensor if shard is None else part_of(places, shard, name, tensor))
    model.weights_loaded()


def _same(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether two [V, H] hold the same. They are compared in pieces, so that neither is copied whole."""
    pieces = zip(tensor.split(4096), parameter.split(4096), strict=False)
    return tensor.shape == parameter.shape and all(torch.equal(a.to(b), b) for a, b in pieces)


def some_of(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
