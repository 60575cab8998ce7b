"""`quantize`: reads a model's folder and writes one with fewer bits, a decoder layer at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from folovllm.config import EngineConfig
from folovllm.electives.quantization.quantizer import folder as folders
from folovllm.electives.quantization.quantizer.calibration import rows_of
from folovllm.electives.quantization.quantizer.methods import quantization_config, quantize_layer
from folovllm.electives.quantization.quantizer.one_layer import OneLayer
from folovllm.electives.quantization.quantizer.options import CALIBRATED, QuantizeOptions
from folovllm.electives.quantization.quantizer.perplexity import Quality, compare
from folovllm.engine.require import require
from folovllm.engine.setup import choose_device
from folovllm.models.files import load_hf_config, reading, resolve_model
from folovllm.models.loader import checkpoint_files
from folovllm.models.model_config import head_dim_of, num_experts_of, windows_of
from folovllm.models.registry import build_model
from folovllm.models.shapes import renamed_by


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
    with reading(f"the model in {path}"):
        empty = build_model(hf_config, torch.float32, "meta", options.length)
    layers, rest = folders.read_checkpoint(path, empty)
    rows, on = rows_of(path, hf_config, options, calibration), choose_device(device)
    folder = folders.OutputFolder(out, len(layers) + 1)  # the last file has what is in no layer
    # Hidden states [n, length, H]. Those that calibrate come from layers that are quantized already, as the next layer will
    # see them. The text that measures goes through both models: `before` and `after`.
    calibrating, before = (rest[folders.EMBEDDING][ids].float().to(on) for ids in rows)
    after = before
    layer = OneLayer(hf_config, on, options.length)
    dtype = rest[folders.EMBEDDING].dtype
    if options.format in CALIBRATED and dtype == torch.float32:
        dtype = torch.float16  # GPTQ and AWQ know no scales in float32
    for index, source in enumerate(tqdm(layers, desc="Quantizing", unit="layer", disable=not use_tqdm)):
        layer.load(source)
        before = layer.run(before)
        inputs = layer.inputs(calibrating) if options.is_calibrated else None
        folder.write(index, quantize_layer(options, layer, source, dtype, inputs), f"{folders.PREFIX}{index}.")
        after = layer.run(after)
        if options.is_calibrated:
            calibrating = layer.run(calibrating)
    folder.write(len(layers), rest)
    norm, head = (
        rest[n].float().to(on)
        for n in (folders.NORM, folders.EMBEDDING if hf_config.tie_word_embeddings else folders.HEAD)
    )

    def logits(x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.rms_norm(x, x.shape[-1:], norm, hf_config.rms_norm_eps), head)

    pieces = zip(before.split(1), after.split(1), rows[1].to(on).split(1), strict=True)
    quality = compare((logits(one), logits(other), ids) for one, other, ids in pieces) if len(rows[1]) else None
    routers = [f"{folders.PREFIX}{i}.{router}" for i in range(len(layers)) for router in layer.routers]
    folder.finish(path, quantization_config(options, ["lm_head", *routers]))
    bytes_before = sum(file.stat().st_size for file in checkpoint_files(path))
    return Report(out, bytes_before, folder.num_bytes, quality)


def check_model(hf_config: Any, options: QuantizeOptions) -> None:
    """Raise ValueError where the model is quantized already, is not of equal layers, or its sizes do not fit the format."""
    has_experts, in_groups = bool(num_experts_of(hf_config)), options.format in CALIBRATED
    seen = {min(window or options.length, options.length) for window in windows_of(hf_config)}
    sizes = hf_config.hidden_size, hf_config.intermediate_size, hf_config.num_attention_heads * head_dim_of(hf_config)
    uneven = [size for size in sizes if in_groups and size % options.group_size]
    few, size = f"{options.format} is not for it, choose --format fp8 or int8", options.group_size
    differ = f"some layers see {min(seen)} tokens and others more, but here one layer stands for all: texts of that length make no"
    refused = {
        "it is quantized already: start from the one with plain weights": getattr(
            hf_config, "quantization_config", None
        ),
        "Gemma scales its embeddings, and its norms in another way": hf_config.model_type == "gemma3_text",
        f"{differ} difference, choose --length {min(seen)}": len(seen) > 1,
        f"most experts would see too little of a text: {few}": has_experts and in_groups,
        "checkpoints of this family have names of their own for experts": has_experts and renamed_by(hf_config),
        f"groups of {size} do not divide {uneven} inputs: choose --group-size 64 or 32": uneven,
    }
    for why, holds in refused.items():
        require(not holds, f"this model cannot be quantized here: {why}")
