"""The linear method of each layer of a quantized checkpoint, by the `quantization_config` in its `config.json`.

Each `quant_method` has a reader of that object. It returns linear methods, each with the layers that it is for ("Linear" is all
of them; the first that matches counts), and the layers left unquantized. Embedding and head are never quantized.
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
from folovllm.electives.quantization import layouts
from folovllm.electives.quantization.fp8 import Fp8
from folovllm.electives.quantization.gguf_weights import TYPES
from folovllm.electives.quantization.int4 import Int4
from folovllm.electives.quantization.linear_method import Quantized
from folovllm.layers.fusable import fusable
from folovllm.layers.layer_set import LinearMethodOf
from folovllm.models.files import reading
from folovllm.models.model_config import num_experts_of
from folovllm.models.quantization import Quantization
from folovllm.models.shapes import linear_shapes, renamed_by
from folovllm.plugins import EXPERTS, load_elective

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROUTERS = ("gate", "shared_expert_gate")  # GPTQ and AWQ leave these unquantized and do not name them
QuantConfig = Mapping[str, Any]  # a `quantization_config`
Scheme = tuple[Sequence[tuple[Sequence[str], Quantized]], Sequence[str]]
ALL = ("Linear",)
ACTIVATIONS, ONLINE = "quantize_activations", "online"  # our own keys in a `quantization_config`
WHERE = "the quantization_config in config.json"


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a layer's name has one of these as a part, of full words, or matches a regular expression behind "re:"."""
    return any(
        re.match(pattern[3:], name) if pattern.startswith("re:") else f".{pattern}." in f".{name}."
        for pattern in patterns
    )


def fp8(layout: layouts.Layout, block: tuple[int, int] | None, scales: str | None, online: bool = False) -> Fp8:
    """Return FP8 whose activations have "dynamic" or "static" `scales`; None: they stay as they are."""
    inputs = "input_scale" if scales == "static" else None
    return Fp8(replace(layout, inputs=inputs), block, online=online, rounds=scales is not None)


def read_fp8(quant_config: QuantConfig) -> Scheme:
    """Read transformers' FP8 (Qwen, DeepSeek: blocks, or one scale for all), and AutoFP8's, which calls the scale otherwise.

    Activations are quantized too, unless `activation_scheme` is null.
    """
    if (scales := quant_config.get("activation_scheme", "dynamic")) not in ("dynamic", "static", None):
        raise ValueError(f"activation_scheme {scales!r} is not supported: 'dynamic' and 'static' are")
    block = quant_config.get("weight_block_size")
    by_transformers = "weight_block_size" in quant_config or "modules_to_not_convert" in quant_config
    layout = replace(layouts.FP8, scales="weight_scale_inv" if by_transformers else "weight_scale")
    method = fp8(layout, block and (block[0], block[1]), scales, bool(quant_config.get(ONLINE)))
    unquantized = [*(quant_config.get("modules_to_not_convert") or []), *(quant_config.get("ignored_layers") or [])]
    return [(ALL, method)], unquantized


def read_gptq(quant_config: QuantConfig) -> Scheme:
    """Read GPTQ as AutoGPTQ, GPTQModel and transformers write it."""
    version = quant_config.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"GPTQ's checkpoint_format {version!r} is not supported: 'gptq' and 'gptq_v2' are")
    if odd := [name for name in ("dynamic", "lm_head") if quant_config.get(name)]:
        raise ValueError(f"GPTQ checkpoints with {odd[0]} are not supported: all projections must be quantized alike")
    group = int4_group("gptq", quant_config.get("bits"), quant_config)
    layout = layouts.GPTQ if version == "gptq" else layouts.GPTQ_V2
    if quant_config.get("desc_act") and group:  # it quantized the inputs that matter most first: a group's lie anywhere
        layout = replace(layout, order="g_idx", ignores=())
    return [(ALL, Int4(layout, group))], ROUTERS


def read_awq(quant_config: QuantConfig) -> Scheme:
    """Read AWQ as AutoAWQ writes it."""
    version = str(quant_config.get("version", "gemm")).lower()
    if version != "gemm" or not quant_config.get("zero_point", True):
        raise ValueError(f"AWQ's version {version!r}, or without zero points, is not supported: 'gemm' with them is")
    group = int4_group("awq", quant_config.get("bits", quant_config.get("w_bit")), quant_config)
    unquantized = [*(quant_config.get("modules_to_not_convert") or []), *ROUTERS]
    return [(ALL, Int4(layouts.AWQ, group))], unquantized


def int4_group(method: str, bits: int | None, quant_config: QuantConfig) -> tuple[int, int] | None:
    """Return the block of 4-bit weights that share a scale; None where a row is one. Raises ValueError for other bits."""
    if bits != 4:
        raise ValueError(f"{method} with {bits} bits is not supported: with 4 it is")
    size = quant_config.get("group_size", quant_config.get("q_group_size", 128))
    return None if size == -1 else (1, size)


def read_gguf(quant_config: QuantConfig) -> Scheme:
    """Read what `gguf_file.convert` writes: the type of each quantized layer."""
    types = quant_config["types"]
    return [([n for n in types if types[n] == kind], TYPES[kind][0]) for kind in {*types.values()}], ()


def read_compressed_tensors(quant_config: QuantConfig) -> Scheme:
    """Read compressed-tensors, which llm-compressor writes: groups of layers, each with a scheme.

    Activations are quantized with weights in FP8 alone.

    Raises:
        ValueError: a scheme is not supported; the sentence says which.
    """
    layout, groups = quant_config.get("format"), quant_config["config_groups"].values()
    methods = [(group["targets"], method_of_group(group, layout)) for group in groups if group.get("weights")]
    return methods, quant_config.get("ignore") or []


def method_of_group(group: Mapping[str, Any], layout: str | None) -> Quantized:
    """Return the linear method of a group of layers. `layout` is how the checkpoint stores weights of groups that do not say so."""
    weights, inputs, layout = group["weights"], group.get("input_activations"), group.get("format") or layout
    kind, is_symmetric = f"{weights.get('type', 'int')}{weights.get('num_bits', 8)}", weights.get("symmetric", True)
    block = block_of(weights)
    match kind, layout:
        case "float8", "float-quantized" | "naive-quantized" if is_symmetric:
            # Inputs have 8 bits: with scales by token or group, or the checkpoint's own.
            return fp8(layouts.FP8, block, None if not inputs else "dynamic" if inputs.get("dynamic") else "static")
        case "int8", "int-quantized" | "naive-quantized" if is_symmetric:
            return Quantized(layouts.INT8, block)
        case "int8", "pack-quantized" if is_symmetric:
            return Quantized(layouts.PACKED_INT8, block)
        case "int4", "pack-quantized" if weights.get("actorder") not in ("group", True):  # else a group's lie anywhere
            zeros = None if is_symmetric else layouts.PACKED_INT4.zeros
            return Int4(replace(layouts.PACKED_INT4, zeros=zeros), block)
    raise ValueError(
        f"weights quantized by compressed-tensors as {'' if is_symmetric else 'asymmetric '}{kind} {layout} are not supported: "
        "known are symmetric float8 and int8, float-, int-, naive- or pack-quantized, and int4 pack-quantized whose actorder "
        "is not 'group'"
    )


def block_of(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return how many outputs and inputs share a scale; None: all inputs of an output, or the whole layer."""
    match weights.get("strategy"):
        case "tensor" | "channel" | None:
            return None
        case "block":
            rows, columns = weights["block_structure"]
            return rows, columns
        case "group":
            return 1, weights.get("group_size", 0)
        case other:
            raise ValueError(f"weights quantized by compressed-tensors with strategy {other!r} are not supported")


READERS: dict[str, Callable[[QuantConfig], Scheme]] = {  # by `quant_method`
    "fp8": read_fp8,
    "gptq": read_gptq,
    "awq": read_awq,
    "gguf": read_gguf,
    "compressed-tensors": read_compressed_tensors,
}


def compressed_config(
    layout: str, weights: QuantConfig, inputs: QuantConfig | None = None, ignore: Sequence[str] = ("re:.*gate$",)
) -> dict[str, Any]:
    """Return the `quantization_config` of one of compressed-tensors' layouts, as llm-compressor writes it."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed", "ignore": list(ignore),
        "config_groups": {"group_0": group},
    }  # fmt: skip


# By `EngineConfig.quantization`, for random weights; FP8 for a checkpoint in 16 bits, too.
REQUESTED: dict[str, QuantConfig] = {
    "fp8": {"quant_method": "fp8", ONLINE: True, "modules_to_not_convert": ROUTERS},
    "int8": compressed_config("int-quantized", {"type": "int", "num_bits": 8, "strategy": "channel"}),
    "int4": compressed_config("pack-quantized", {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}),
}


def quant_config_of(hf_config: PretrainedConfig) -> QuantConfig | None:
    """Return a model's `quantization_config`, if it has one."""
    quant_config = getattr(hf_config, "quantization_config", None)
    return quant_config if quant_config is None or isinstance(quant_config, Mapping) else quant_config.to_dict()


class CheckpointQuantization(Quantization):
    """Reads the `quantization_config` of checkpoints; random weights can have one of `REQUESTED`."""

    def configured(self, hf_config: Any, config: EngineConfig) -> Any:
        """Return the model's configuration, with the requested quantization.

        A checkpoint's quantization must be the requested one. A checkpoint in 16 bits can be quantized to FP8.
        """
        requested, quant_config = config.quantization, quant_config_of(hf_config)
        method = None if quant_config is None else quant_config.get("quant_method")
        if requested is not None and quant_config is None and (config.random_weights or requested == "fp8"):
            if requested not in REQUESTED:
                raise ValueError(f"quantization={requested!r} cannot be made up: choose one of {', '.join(REQUESTED)}")
            if config.model_impl == "hf" and not config.random_weights:
                raise ValueError('to quantize a checkpoint in 16 bits needs model_impl="native"')
            quant_config = REQUESTED[requested]
        elif requested is not None and requested != method:
            what = "is not quantized" if method is None else f"is quantized by {method!r}"
            raise ValueError(f"quantization={requested!r} was asked for, and this checkpoint {what}: leave it out")
        if quant_config is not None:
            own = {} if config.quantize_activations else {ACTIVATIONS: False}
            hf_config.quantization_config = {**quant_config, **own}
        return hf_config

    def linear_methods_of(
        self, hf_config: PretrainedConfig, packed: Mapping[str, Sequence[str]], renamed: Mapping[str, str]
    ) -> LinearMethodOf | None:
        if (quant_config := quant_config_of(hf_config)) is None:
            return None
        method = quant_config.get("quant_method")
        with reading(WHERE):
            if method not in READERS:
                raise ValueError(
                    f"this checkpoint is quantized by {method!r} (quant_method), which is not supported: the known ones are "
                    f"{', '.join(READERS)}"
                )
            groups, unquantized = READERS[method](quant_config)

        def of_part(name: str) -> Quantized | None:
            name += "."
            for theirs, ours in renamed.items():
                name = name.replace(ours, theirs)
            name = name.removesuffix(".")
            with reading(WHERE):  # its patterns are compiled only now
                if matches_any(name, unquantized):
                    return None
                found = next((m for targets, m in groups if "Linear" in targets or matches_any(name, targets)), None)
            if isinstance(found, Fp8) and not quant_config.get(ACTIVATIONS, True):
                return replace(found, rounds=False, layout=replace(found.layout, inputs=None))
            return found

        def linear_method_of(name: str) -> Quantized | None:
            parent, _, leaf = name.rpartition(".")
            parts = packed.get(leaf, [leaf])
            first, *others = (of_part(f"{parent}.{part}") for part in parts)
            if any(other != first for other in others):
                raise ValueError(
                    f"{', '.join(parts)} of {parent} are one layer here, so all must be quantized in one way, or none of them"
                )
            if leaf == "gate_up_proj" and isinstance(first, Fp8) and first.rounds and first.layout.inputs is None:
                return replace(first, rounds_gated=of_part(f"{parent}.down_proj") == first)
            return first

        return linear_method_of

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
        elif (quant_config_of(hf_config) or {}).get("quant_method") == "gguf":
            raise ValueError(
                "transformers' model, which M1 runs, cannot keep a GGUF file's codes: take a later milestone or "
                'model_impl="native", or smollm2, which is unpacked'
            )


def check_ranks(hf_config: PretrainedConfig, part: PretrainedConfig, linear_method_of: LinearMethodOf) -> None:
    """Raise ValueError if ranks cannot share the layers. `part` is the configuration of one rank's part (`local_config`)."""
    whole, parts = (linear_shapes(config) for config in (hf_config, part))
    if num_experts_of(hf_config):
        shapes_of = load_elective(EXPERTS, "a model with experts").expert_shapes
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
