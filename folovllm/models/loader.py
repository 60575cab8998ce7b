"""Checkpoints into models: safetensors only, one tensor at a time, every name accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from folovllm.layers.linear import MergedColumnParallelLinear
from folovllm.models.json_files import read_json
from folovllm.models.llama import LlamaForCausalLM

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a constant that old Llama checkpoints carry
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of the dtypes whose numbers are the weights themselves

Shard = Callable[[str, Any], torch.Tensor]  # a tensor's name, and the tensor (or a `StoredTensor`) -> the part to keep


class StoredTensor:
    """A tensor that is still in its file: what is indexed is read, and nothing else."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored
        self.shape = torch.Size(stored.get_shape())

    def __getitem__(self, index: Any) -> torch.Tensor:
        """As a tensor's, with slices."""
        return cast(torch.Tensor, self._stored[index])


def load_model(model: LlamaForCausalLM, path: Path, use_tqdm: bool = True, shard: Shard | None = None) -> None:
    """Fill `model` from the checkpoint in folder `path`, straight into its (merged) parameters.

    Each tensor is read from the memory-mapped file and copied where it belongs, converted to the parameter's dtype on
    the way, so the weights are never in memory twice. With `shard`, only the part that it picks is read.

    Raises:
        ValueError: no safetensors here, a damaged file, or a weight that is missing, left over, of another shape, coded
            in 8 bits, or not finite (the message names it).
    """
    destinations = checkpoint_destinations(model)
    embedding = model.model.embed_tokens.weight
    tied, copied_head = model.lm_head.weight is embedding, None
    with tqdm(total=len(destinations), desc="Loading weights", unit="tensor", disable=not use_tqdm) as progress:
        for name, tensor in read_tensors(checkpoint_files(path), shard):
            if tied and name == "lm_head.weight":
                copied_head = tensor
            elif not name.endswith(IGNORED_SUFFIX):
                copy_weight(name, tensor, destinations)
                progress.update()
    if destinations:
        raise ValueError(f"the checkpoint in {path} lacks {_some(destinations)}")
    if copied_head is not None and not _same(copied_head, embedding):
        raise ValueError(f"{path} holds a 'lm_head.weight' of its own: set tie_word_embeddings to false in its config")


def checkpoint_destinations(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Where each of the checkpoint's tensors goes: its name -> a view of (a part of) one of our parameters.

    A merged parameter appears once for each of its parts, under the names that the checkpoint has for them.
    """
    destinations: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        module_name, _, kind = name.rpartition(".")
        parent, _, leaf = module_name.rpartition(".")
        parts = model.packed_modules_mapping.get(leaf)
        if parts is None:
            destinations[name] = parameter.data
            continue
        module = cast(MergedColumnParallelLinear, model.get_submodule(module_name))
        rows = torch.split(parameter.data, module.output_sizes)
        destinations |= {f"{parent}.{part}.{kind}": view for part, view in zip(parts, rows, strict=True)}
    return destinations


def copy_weight(name: str, tensor: torch.Tensor, destinations: dict[str, torch.Tensor]) -> None:
    """Copy one tensor of the checkpoint to its destination, look at what arrived, and cross that off."""
    destination = destinations.pop(name, None)
    if destination is None:
        raise ValueError(f"the checkpoint holds {name!r}, for which the model has no place (or had it twice)")
    if destination.shape != tensor.shape:
        raise ValueError(f"{name!r} has shape {list(tensor.shape)}, the model expects {list(destination.shape)}")
    destination.copy_(tensor)
    require_finite(name, destination)


def require_finite(name: str, weight: torch.Tensor) -> None:
    """Raise ValueError if a weight holds NaN or infinity: every answer would be the first token, again and again.

    Asked when a model is loaded, so that no step pays for it; extremes take one pass, as the copy did, and no memory.
    """
    extremes = torch.stack(weight.aminmax())
    if not extremes.isfinite().all():
        dtype = str(weight.dtype).removeprefix("torch.")
        raise ValueError(f"{name!r} holds NaN or infinity as {dtype}: the file is damaged, or needs another dtype")


def require_float_weights(files: list[Path]) -> None:
    """Raise ValueError at the first weight stored in another kind of number; only the files' headers are read."""
    for file in files:
        with opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118  # a handle is no dict
                require_float(name, handle.get_slice(name).get_dtype())


def require_float(name: str, dtype: str) -> None:
    """Raise ValueError if a weight's numbers are codes that something (a scale) must be applied to. Masks may be."""
    if name.endswith((".weight", "proj.bias")) and dtype not in FLOATS:
        raise ValueError(f"{name!r} is stored as {dtype}: quantized checkpoints are not supported, only plain floats")


def checkpoint_files(path: Path) -> list[Path]:
    """The files that make up the checkpoint: those its index names, else the single one."""
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
    try:
        names = list((read_json(index).get("weight_map") or {}).values())
    except (OSError, ValueError) as error:
        raise ValueError(f"{index} is damaged ({error}): download it again") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name == "..":
            raise ValueError(f"{index} names {name!r}: it must be the name of a file in the same folder")
    if not names:
        raise ValueError(f"{index} is damaged (its weight_map names no file): download it again")
    return set(names)


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file, memory-mapped. Raises ValueError where it is none, or where one of its tensors is not there."""
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or incomplete ({error}): download it again") from error


def read_tensors(files: list[Path], shard: Shard | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor, one after the other, each a view of the memory-mapped file until it is copied."""
    for file in files:
        with opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118  # a handle is no dict
                stored = handle.get_slice(name)
                require_float(name, stored.get_dtype())
                if shard is None or name.endswith(IGNORED_SUFFIX):
                    yield name, handle.get_tensor(name)
                else:
                    yield name, shard(name, StoredTensor(stored))


def init_random_weights(
    model: LlamaForCausalLM, seed: int, whole: LlamaForCausalLM | None = None, shard: Shard | None = None
) -> None:
    """Weights made up on the model's own device: N(0, 0.02) everywhere, ones in the norms. For timing a geometry.

    Where `model` is a part, `whole` (of which only shapes matter) is what is made up, and `shard` cuts each tensor.
    """
    destinations = checkpoint_destinations(model)
    generator = torch.Generator(model.lm_head.weight.device).manual_seed(seed)
    for name, full in checkpoint_destinations(model if whole is None else whole).items():
        place = destinations[name]
        tensor = torch.ones(full.shape, dtype=place.dtype, device=place.device)
        if not name.endswith("norm.weight"):
            tensor.normal_(0.0, 0.02, generator=generator)
        place.copy_(tensor if shard is None else shard(name, tensor))


def _same(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether two [V, H] hold the same, compared in pieces so that neither is copied whole."""
    pieces = zip(tensor.split(4096), parameter.split(4096), strict=False)
    return tensor.shape == parameter.shape and all(torch.equal(a.to(b), b) for a, b in pieces)


def _some(names: dict[str, torch.Tensor]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
