"""The `quantization_config` of compressed-tensors, which llm-compressor writes: groups of layers, each with its scheme."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from folovllm.layers.layer_set import LinearMethodOf
from folovllm.layers.linear_method import LinearMethod
from folovllm.quantization.int4_checkpoints import PackedInt4
from folovllm.quantization.scaled import Fp8, Int8, PackedInt8

Scheme = Mapping[str, Any]  # of weights: num_bits, type, strategy, symmetric, group_size, block_structure, actorder


def read_compressed_tensors(said: Mapping[str, Any]) -> LinearMethodOf:
    """From the name of a layer to its format. Activations are not quantized here, whatever the scheme says of them.

    Raises:
        ValueError: a scheme is not supported; the sentence says which.
    """
    groups = [
        (group["targets"], linear_method_of_scheme(group["weights"], group.get("format") or said.get("format")))
        for group in said["config_groups"].values()
        if group.get("weights")
    ]

    def linear_method_of(name: str) -> LinearMethod | None:
        if matches(name, said.get("ignore") or []):
            return None
        return next(
            (linear_method for targets, linear_method in groups if "Linear" in targets or matches(name, targets)), None
        )

    return linear_method_of


def matches(name: str, targets: list[str]) -> bool:
    """Whether a layer has one of these names, or fits one of the regular expressions behind "re:"."""
    return any(re.match(t[3:], name) is not None if t.startswith("re:") else t == name for t in targets)


def linear_method_of_scheme(scheme: Scheme, packing: str | None) -> LinearMethod:
    """The format of weights of this scheme. `packing` is how they are written down."""
    kind = f"{scheme.get('type', 'int')}{scheme.get('num_bits', 8)}"
    if make := SCHEMES.get((kind, str(packing))):
        if scheme.get("symmetric", True) or kind in ASYMMETRIC:
            return make(scheme)
        kind = f"asymmetric {kind}"
    known = ", ".join(f"{kind} {packing}" for kind, packing in SCHEMES)
    raise ValueError(f"weights quantized by compressed-tensors as {kind} {packing} are not supported: known is {known}")


def block_of(scheme: Scheme) -> tuple[int, int] | None:
    """How many outputs and inputs share a scale; None: all inputs of an output, or the whole layer."""
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
    """Groups, or all inputs of an output. With actorder "group" the inputs of a group lie anywhere."""
    if scheme.get("actorder") in ("group", True):
        raise ValueError("int4 weights with actorder 'group' are not supported: 'static' or 'weight' is")
    block = block_of(scheme)
    if scheme.get("strategy") not in ("group", "channel"):
        raise ValueError(
            f"int4 weights with strategy {scheme.get('strategy')!r} are not supported: 'group' and 'channel' are"
        )
    return PackedInt4(None if block is None else block[1], with_zeros=not scheme.get("symmetric", True))


ASYMMETRIC = ("int4",)  # kinds whose zeros may be other codes than the middle one
# By type and bits, and how they are written down.
SCHEMES: dict[tuple[str, str], Callable[[Scheme], LinearMethod]] = {
    ("float8", "float-quantized"): lambda scheme: Fp8("weight_scale", block_of(scheme)),
    ("float8", "naive-quantized"): lambda scheme: Fp8("weight_scale", block_of(scheme)),
    ("int4", "pack-quantized"): packed_int4,
    ("int8", "int-quantized"): lambda scheme: Int8("weight_scale", block_of(scheme)),
    ("int8", "naive-quantized"): lambda scheme: Int8("weight_scale", block_of(scheme)),
    ("int8", "pack-quantized"): lambda scheme: PackedInt8("weight_scale", block_of(scheme)),
}
