"""`quantize`: reads a model's folder and writes one with fewer bits, a decoder layer at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from folovllm.config import EngineConfig
from folovllm.electives.quantization.quantizer.calibration import read_texts, split_rows
from folovllm.electives.quantization.quantizer.folder import OutputFolder
from folovllm.electives.quantization.quantizer.methods import Method, method_for
from folovllm.electives.quantization.quantizer.one_layer import (
    EMBEDDING,
    HEAD,
    NORM,
    PREFIX,
    Checkpoint,
    Inputs,
    OneLayer,
    Tensors,
)
from folovllm.electives.quantization.quantizer.options import CALIBRATED, QuantizeOptions
from folovllm.electives.quantization.quantizer.perplexity import Quality, compare
from folovllm.engine.setup import choose_device
from folovllm.models.files import eos_token_ids, load_hf_config, load_tokenizer, reading, resolve_model
from folovllm.models.model_config import head_dim_of, num_experts_of, windows_of
from folovllm.models.registry import build_model
from folovllm.models.shapes import renamed_by

OWN_TEXT = "calibration.jsonl"  # in the embedded model's folder


@dataclass(slots=True)
class HiddenStates:
    """Hidden states between two layers, [n, length, H] each.

    `calibration` comes from layers that are quantized already, as the next layer will see it. The text that measures goes
    through both models: `before` and `after`.
    """

    calibration: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor


def quantize_layers(
    checkpoint: Checkpoint, layer: OneLayer, method: Method, folder: OutputFolder, states: HiddenStates, use_tqdm: bool
) -> None:
    """Quantize all layers into `folder`, and carry the hidden states through them."""
    num_layers = folder.num_files - 1
    with tqdm(range(num_layers), desc="Quantizing", unit="layer", disable=not use_tqdm) as layers:
        for index in layers:
            source = checkpoint.layer(index)
            layer.load(source)
            states.before = layer.run(states.before)
            inputs = layer.inputs(states.calibration) if method.options.is_calibrated else None
            tensors = quantize_layer(method, layer, source, inputs)
            folder.write({f"{PREFIX}{index}.{name}": tensor for name, tensor in tensors.items()})
            states.after = layer.run(states.after)
            if method.options.is_calibrated:
                states.calibration = layer.run(states.calibration)


def quantize_layer(method: Method, layer: OneLayer, source: Tensors, inputs: dict[str, Inputs] | None) -> Tensors:
    """Return the checkpoint's tensors of the quantized layer; `layer` is left with the weights that they stand for.

    Args:
        source: the layer's tensors before. What is not quantized keeps its dtype.
        inputs: what the layer's linear layers read; None where rounding looks at weights alone.
    """
    if inputs is not None:
        method.prepare(layer, inputs)
    projections = {f"{part}.weight" for parts in layer.parts.values() for part in parts}
    tensors = {name: tensor for name, tensor in source.items() if name not in projections}
    for name, view in layer.tensors().items():
        if name not in projections:
            tensors[name] = view.to(tensors[name].dtype, copy=True)
            view.copy_(tensors[name])
    for name, parts in layer.parts.items():
        for part, w in parts.items():
            quantized, weight = method.quantize(part, w, inputs[name] if inputs else None)
            tensors |= {f"{part}.{kind}": tensor for kind, tensor in quantized.items()}
            w.copy_(weight)
    return tensors


def measure(rest: Tensors, hf_config: Any, states: HiddenStates, ids: torch.Tensor) -> Quality:
    """Return the quality of both models on the text `ids` [n, length], from their last hidden states."""
    like = states.before
    norm, head = rest[NORM].to(like), rest[EMBEDDING if hf_config.tie_word_embeddings else HEAD].to(like)

    def logits(x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.rms_norm(x, x.shape[-1:], norm, hf_config.rms_norm_eps), head)

    pieces = zip(states.before.split(1), states.after.split(1), ids.split(1), strict=True)
    return compare((logits(before), logits(after), some) for before, after, some in pieces)


@dataclass(slots=True, frozen=True)
class Report:
    """The result of `quantize`. Bytes are those of all files of weights; `quality` is None where no text was given."""

    folder: Path
    bytes_before: int
    bytes_after: int
    quality: Quality | None


def quantize(
    model: str,
    options: QuantizeOptions,
    out: Path,
    calibration: Path | None = None,
    device: str | None = None,
    use_tqdm: bool = True,
) -> Report:
    """Quantize a model and write it to `out`.

    Args:
        model: as `LLM` takes it.
        calibration: JSON lines with a text each; by default the model's own, which the embedded one has.
        device: as `LLM` takes it.

    Raises:
        ValueError: the model, the text or the device is not available or not supported; `out` is not empty or cannot be written.
    """
    path = resolve_model(model)
    hf_config = load_hf_config(path, EngineConfig(model=model))
    check_model(hf_config, options)
    checkpoint = Checkpoint(path)
    rows, on = rows_of(path, hf_config, options, calibration), choose_device(device)
    with reading(f"the model in {path}"):
        empty = build_model(hf_config, torch.float32, "meta", options.length)
    checkpoint.check(empty)
    folder = OutputFolder(out, hf_config.num_hidden_layers + 1)  # the last file has what is in no layer
    rest = checkpoint.rest()
    calibrating, measuring = (rest[EMBEDDING][ids].float().to(on) for ids in rows)
    states = HiddenStates(calibrating, measuring, measuring)
    layer = OneLayer(hf_config, on, options.length)
    routers = [f"{PREFIX}{i}.{router}" for i in range(hf_config.num_hidden_layers) for router in layer.routers]
    method = method_for(options, rest[EMBEDDING].dtype, routers)
    quantize_layers(checkpoint, layer, method, folder, states, use_tqdm)
    folder.write(rest)
    quality = measure(rest, hf_config, states, rows[1].to(on)) if len(rows[1]) else None
    folder.finish(path, method.config())
    return Report(out, checkpoint.num_bytes, folder.num_bytes, quality)


def check_model(hf_config: Any, options: QuantizeOptions) -> None:
    """Raise ValueError where the model is quantized already, is not of equal layers, or its sizes do not fit the format."""
    if getattr(hf_config, "quantization_config", None) is not None:
        raise ValueError("the model is quantized already: start from the one with plain weights")
    if hf_config.model_type == "gemma3_text":
        raise ValueError("Gemma scales its embeddings, and its norms in another way: it cannot be quantized here")
    seen = {min(window or options.length, options.length) for window in windows_of(hf_config)}
    if len(seen) > 1:
        raise ValueError(
            f"some layers see {min(seen)} tokens and others more, but here one layer stands for all: texts of that length "
            f"make no difference, choose --length {min(seen)}"
        )
    has_experts, in_groups = bool(num_experts_of(hf_config)), options.format in CALIBRATED
    if has_experts and in_groups:
        raise ValueError(
            f"a mixture of experts is rounded alone, since most experts would see too little of a text: {options.format} is "
            "not for it, choose --format fp8 or int8"
        )
    if has_experts and renamed_by(hf_config):
        raise ValueError(
            "checkpoints of this family have names of their own for experts: they cannot be quantized here"
        )
    heads = hf_config.num_attention_heads * head_dim_of(hf_config)
    for size in (hf_config.hidden_size, hf_config.intermediate_size, heads):
        if in_groups and size % options.group_size:
            raise ValueError(
                f"groups of {options.group_size} do not divide {size} inputs: choose --group-size 64 or 32"
            )


def rows_of(
    path: Path, hf_config: Any, options: QuantizeOptions, calibration: Path | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens to calibrate with and tokens to measure with, [n, length] each; no rows where there is no text."""
    own = path / OWN_TEXT
    file = calibration or (own if own.is_file() else None)
    if file is None and options.is_calibrated:
        raise ValueError(f"--format {options.format} needs a text: --calibration text.jsonl")
    if file is None:
        none = torch.empty(0, options.length, dtype=torch.int64)
        return none, none
    tokenizer = load_tokenizer(path, EngineConfig(model=str(path)))
    ends = eos_token_ids(path, hf_config, tokenizer)
    return split_rows(read_texts(file), tokenizer, options.samples, options.length, min(ends, default=0))
