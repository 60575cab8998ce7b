"""The linear method of each layer of a quantized checkpoint, by the `quantization_config` in its `config.json`.

Each `quant_method` has a reader, which turns that object into a function from the name of a layer in the checkpoint to its
`LinearMethod`, or to None where the layer is not quantized. Embedding and head never are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from folovllm.config import EngineConfig
from folovllm.electives.quantization.fp8 import Fp8, Fp8Both
from folovllm.electives.quantization.gguf_codes import read_gguf_types
from folovllm.electives.quantization.int4_checkpoints import Awq, Gptq, PackedInt4, SortedGptq
from folovllm.electives.quantization.scaled import Int8, PackedInt8
from folovllm.layers.fusable import fusable
from folovllm.layers.layer_set import LinearMethodOf
from folovllm.layers.linear import LinearMethod
from folovllm.models.files import reading
from folovllm.models.model_config import num_experts_of
from folovllm.models.quantization import Quantization
from folovllm.models.shapes import linear_shapes, renamed_by
from folovllm.plugins import EXPERTS, require

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROUTERS = ("gate", "shared_expert_gate")  # GPTQ and AWQ leave these plain and do not name them
Said = Mapping[str, Any]  # a `quantization_config`
# compressed-tensors' of weights: num_bits, type, strategy, symmetric, group_size, block_structure, actorder; and of inputs
Scheme = Mapping[str, Any]
INPUTS = "input_activations"
ACTIVATIONS, ONLINE = "quantize_activations", "online"  # our own keys in a `quantization_config`


def read_fp8(said: Said) -> LinearMethodOf:
    """Read transformers' FP8 (Qwen, DeepSeek: blocks, or one scale for all), and AutoFP8's, which calls the scale otherwise.

    Activations are quantized too, unless `activation_scheme` is null.
    """
    block = said.get("weight_block_size")
    by_transformers = "weight_block_size" in said or "modules_to_not_convert" in said
    linear_method = fp8_method(
        "weight_scale_inv" if by_transformers else "weight_scale", block and (block[0], block[1]),
        said.get("activation_scheme", "dynamic"), bool(said.get(ONLINE)),
    )  # fmt: skip
    plain = [*(said.get("modules_to_not_convert") or []), *(said.get("ignored_layers") or [])]
    return lambda name: None if is_named(name, plain) else linear_method


def fp8_method(scale_name: str, block: tuple[int, int] | None, activations: str | None, online: bool = False) -> Fp8:
    """Return the linear method of weights in FP8. `activations`: "dynamic" or "static" scales; None: they stay as they are."""
    if activations not in ("dynamic", "static", None):
        raise ValueError(f"activation_scheme {activations!r} is not supported: 'dynamic' and 'static' are")
    if activations is None:
        return Fp8(scale_name, block, online)
    return Fp8Both(scale_name, block, online, is_static=activations == "static")


def read_gptq(said: Said) -> LinearMethodOf:
    """Read GPTQ as AutoGPTQ, GPTQModel and transformers write it."""
    layout = said.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise ValueError(f"GPTQ's checkpoint_format {layout!r} is not supported: 'gptq' and 'gptq_v2' are")
    if odd := [name for name in ("dynamic", "lm_head") if said.get(name)]:
        raise ValueError(f"GPTQ checkpoints with {odd[0]} are not supported: all projections must be quantized alike")
    size = group_size_4("gptq", said.get("bits"), said)
    kind = SortedGptq if said.get("desc_act") and size else Gptq  # where a row is one group, no order matters
    linear_method = kind(size, one_less=layout == "gptq")
    return lambda name: None if is_named(name, ROUTERS) else linear_method


def read_awq(said: Said) -> LinearMethodOf:
    """Read AWQ as AutoAWQ writes it."""
    version = str(said.get("version", "gemm")).lower()
    if version != "gemm" or not said.get("zero_point", True):
        raise ValueError(f"AWQ's version {version!r}, or without zero points, is not supported: 'gemm' with them is")
    linear_method = Awq(group_size_4("awq", said.get("bits", said.get("w_bit")), said))
    plain = [*(said.get("modules_to_not_convert") or []), *ROUTERS]
    return lambda name: None if is_named(name, plain) else linear_method


def group_size_4(method: str, bits: int | None, said: Said) -> int | None:
    """Return the size of groups of 4-bit weights; None where a row is one. Raises ValueError for other bits."""
    if bits != 4:
        raise ValueError(f"{method} with {bits} bits is not supported: with 4 it is")
    size = said.get("group_size", said.get("q_group_size", 128))
    return None if size == -1 else size


def read_compressed_tensors(said: Said) -> LinearMethodOf:
    """Read compressed-tensors, which llm-compressor writes: groups of layers, each with a scheme.

    Activations are quantized with weights in FP8 alone.

    Raises:
        ValueError: a scheme is not supported; the sentence says which.
    """
    groups = [
        (
            group["targets"],
            linear_method_of_scheme(
                {**group["weights"], INPUTS: group.get(INPUTS)}, group.get("format") or said.get("format")
            ),
        )
        for group in said["config_groups"].values()
        if group.get("weights")
    ]

    def linear_method_of(name: str) -> LinearMethod | None:
        if is_named(name, said.get("ignore") or []):
            return None
        found = (method for targets, method in groups if "Linear" in targets or is_named(name, targets))
        return next(found, None)

    return linear_method_of


def linear_method_of_scheme(scheme: Scheme, packing: str | None) -> LinearMethod:
    """Return the linear method of a scheme of weights. `packing` is how the checkpoint stores them."""
    kind = f"{scheme.get('type', 'int')}{scheme.get('num_bits', 8)}"
    if make := SCHEMES.get((kind, str(packing))):
        if scheme.get("symmetric", True) or kind == "int4":
            return make(scheme)
        kind = f"asymmetric {kind}"
    known = ", ".join(f"{kind} {packing}" for kind, packing in SCHEMES)
    raise ValueError(f"weights quantized by compressed-tensors as {kind} {packing} are not supported: known is {known}")


def block_of(scheme: Scheme) -> tuple[int, int] | None:
    """Return how many outputs and inputs share a scale; None: all inputs of an output, or the whole layer."""
    match scheme.get("strategy"):
        case "tensor" | "channel" | None:
            return None
        case "block":
            rows, columns = scheme["block_structure"]
            return rows, columns
        case "group":
            return 1, scheme["group_size"]
        case other:
            raise ValueError(f"weights quantized by compressed-tensors with strategy {other!r} are not supported")


def packed_int4(scheme: Scheme) -> LinearMethod:
    """Return the linear method of int4 weights. With actorder "group" the inputs of a group lie anywhere, which is not supported."""
    if scheme.get("actorder") in ("group", True):
        raise ValueError("int4 weights with actorder 'group' are not supported: 'static' or 'weight' is")
    if (strategy := scheme.get("strategy")) not in ("group", "channel"):
        raise ValueError(f"int4 weights with strategy {strategy!r} are not supported: 'group' and 'channel' are")
    group_size = scheme["group_size"] if strategy == "group" else None
    return PackedInt4(group_size, with_zeros=not scheme.get("symmetric", True))


def fp8_of(scheme: Scheme) -> LinearMethod:
    """Return the linear method of weights in FP8. Inputs of 8 bits have scales by token or group, or the checkpoint's own."""
    inputs = scheme[INPUTS]
    activations = None if not inputs else "dynamic" if inputs.get("dynamic") else "static"
    return fp8_method("weight_scale", block_of(scheme), activations)


# By type and bits, and how they are written down.
SCHEMES: dict[tuple[str, str], Callable[[Scheme], LinearMethod]] = {
    ("float8", "float-quantized"): fp8_of,
    ("float8", "naive-quantized"): fp8_of,
    ("int4", "pack-quantized"): packed_int4,
    ("int8", "int-quantized"): lambda scheme: Int8("weight_scale", block_of(scheme)),
    ("int8", "naive-quantized"): lambda scheme: Int8("weight_scale", block_of(scheme)),
    ("int8", "pack-quantized"): lambda scheme: PackedInt8("weight_scale", block_of(scheme)),
}


READERS: dict[str, Callable[[Said], LinearMethodOf]] = {  # by `quant_method`
    "fp8": read_fp8,
    "gptq": read_gptq,
    "awq": read_awq,
    "gguf": read_gguf_types,
    "compressed-tensors": read_compressed_tensors,
}


def made_up_integers(layout: str, **weights: Any) -> dict[str, Any]:
    """Return the `quantization_config` of integer codes in one of compressed-tensors' layouts, with plain routers."""
    group = {"targets": ["Linear"], "weights": {"type": "int", **weights}}
    return {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["re:.*gate$"], "config_groups": {"0": group}
    }  # fmt: skip


MADE_UP: dict[str, dict[str, Any]] = {  # by what random weights may be asked to be; FP8 a checkpoint in 16 bits, too
    "fp8": {"quant_method": "fp8", ONLINE: True, "modules_to_not_convert": ROUTERS},
    "int8": made_up_integers("int-quantized", num_bits=8, strategy="channel"),
    "int4": made_up_integers("pack-quantized", num_bits=4, strategy="group", group_size=128),
}


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a layer is one of these, or lies within one: by a part of its name, or a regular expression behind "re:"."""
    return any(
        re.match(pattern[3:], name) if pattern.startswith("re:") else f".{pattern}." in f".{name}."
        for pattern in patterns
    )


def said_of(hf_config: PretrainedConfig) -> Said | None:
    """Return a model's `quantization_config`, if it has one."""
    said = getattr(hf_config, "quantization_config", None)
    return said if said is None or isinstance(said, Mapping) else said.to_dict()


def weights_alone(linear_method: LinearMethod | None) -> LinearMethod | None:
    """Return the linear method that leaves activations as they are."""
    if not isinstance(linear_method, Fp8Both):
        return linear_method
    return Fp8(linear_method.scale_name, linear_method.block, linear_method.online)


def as_in_checkpoint(name: str, renamed: Mapping[str, str]) -> str:
    """Return the checkpoint's name of one of our layers."""
    name += "."
    for theirs, ours in renamed.items():
        name = name.replace(ours, theirs)
    return name.removesuffix(".")


class CheckpointQuantization(Quantization):
    """Reads the `quantization_config` of checkpoints; random weights may be asked to be in one of `MADE_UP`."""

    def configured(self, hf_config: Any, config: EngineConfig) -> Any:
        """Return the model's configuration, with what `config` asks for.

        A checkpoint's quantization must be what is asked. One in 16 bits can be asked to be FP8.
        """
        asked, said = config.quantization, said_of(hf_config)
        method = None if said is None else said.get("quant_method")
        if asked is not None and said is None and (config.random_weights or asked == "fp8"):
            if asked not in MADE_UP:
                raise ValueError(f"quantization={asked!r} cannot be made up: choose one of {', '.join(MADE_UP)}")
            if config.model_impl == "hf" and not config.random_weights:
                raise ValueError('to quantize a checkpoint in 16 bits needs model_impl="native"')
            said = MADE_UP[asked]
        elif asked is not None and asked != method:
            what = "is not quantized" if method is None else f"is quantized by {method!r}"
            raise ValueError(f"quantization={asked!r} was asked for, and this checkpoint {what}: leave it out")
        if said is not None:
            hf_config.quantization_config = said if config.quantize_activations else {**said, ACTIVATIONS: False}
        return hf_config

    def linear_methods_of(
        self, hf_config: PretrainedConfig, packed: Mapping[str, Sequence[str]], renamed: Mapping[str, str]
    ) -> LinearMethodOf | None:
        if (said := said_of(hf_config)) is None:
            return None
        method = said.get("quant_method")
        with reading("the quantization_config in config.json"):
            if str(method) not in READERS:
                raise ValueError(
                    f"this checkpoint is quantized by {method!r} (quant_method in its config.json), which is not supported: the "
                    f"known ones are {', '.join(READERS)}"
                )
            found = READERS[str(method)](said)

        def linear_method_of(name: str) -> LinearMethod | None:
            with reading("the quantization_config in config.json"):  # its patterns are compiled only now
                linear_method = found(as_in_checkpoint(name, renamed))
            return linear_method if said.get(ACTIVATIONS, True) else weights_alone(linear_method)

        def of_merged(name: str) -> LinearMethod | None:
            parent, _, leaf = name.rpartition(".")
            parts = packed.get(leaf, [leaf])
            first, *others = (linear_method_of(f"{parent}.{part}") for part in parts)
            if any(other != first for other in others):
                raise ValueError(
                    f"{', '.join(parts)} of {parent} are one layer here, so all must be quantized in one way, or none of them"
                )
            if leaf == "gate_up_proj" and isinstance(first, Fp8Both) and not first.is_static:
                return replace(first, hands_on=linear_method_of(f"{parent}.down_proj") == first)
            return first

        return of_merged

    def finish_decoded(self, model: nn.Module, path: Path, dtype: torch.dtype) -> None:
        """Raise ValueError if FP8 lacks its scale. Weights that are as they are stored, beside decoded ones, become `dtype`."""
        for name, parameter in model.named_parameters():
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            is_byte = parameter.dtype.itemsize == 1 and "scale" not in leaf
            has_scale = hasattr(module, f"{leaf}_scale") or hasattr(module, f"{leaf}_scale_inv")
            if is_byte and (parameter.is_floating_point() or type(module) is nn.Linear) and not has_scale:
                raise ValueError(f"the checkpoint in {path} lacks the scale of {name!r}, which is stored in FP8")
            if parameter.is_floating_point() and parameter.dtype.itemsize > 1 and leaf == "weight":
                parameter.data = parameter.data.to(dtype)

    def check(self, hf_config: PretrainedConfig, part: PretrainedConfig, config: EngineConfig) -> None:
        """Raise ValueError, before a weight is read. Transformers' own model reads what it can, and no GGUF."""
        if config.model_impl == "native":
            if (linear_method_of := self.linear_methods_of(hf_config, {}, renamed_by(hf_config))) is not None:
                check_ranks(hf_config, part, linear_method_of)
        elif (said_of(hf_config) or {}).get("quant_method") == "gguf":
            raise ValueError(
                "transformers' model, which M1 runs, cannot keep a GGUF file's codes: take a later milestone or "
                'model_impl="native", or smollm2, which is unpacked'
            )


def check_ranks(hf_config: PretrainedConfig, part: PretrainedConfig, linear_method_of: LinearMethodOf) -> None:
    """Raise ValueError if ranks cannot share the layers. `part` is the configuration of one rank's part (`local_config`)."""
    whole, parts = (linear_shapes(config) for config in (hf_config, part))
    if num_experts_of(hf_config):
        shapes_of = require(EXPERTS, "a model with experts").expert_shapes
        whole, parts = whole | shapes_of(hf_config), parts | shapes_of(part)
    cut = {name: shape for name, shape in parts.items() if shape != whole[name]}
    for i in range(part.num_hidden_layers):
        for name, (outputs, inputs) in cut.items():
            linear_method = linear_method_of(f"model.layers.{i}.{name}")
            try:
                if linear_method is not None:
                    fusable(linear_method).check_part(outputs, inputs)
            except ValueError as error:
                instead = "set enable_expert_parallel, or " if "experts" in name else ""
                raise ValueError(
                    f"so many ranks cannot share {name}: {error}; {instead}lower tensor_parallel_size"
                ) from error
