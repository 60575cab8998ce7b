"""The figures and pictures of the chapter on quantization: `python docs/_tools/x2_figures.py`, about a minute.

The embedded model's own weights, on a CPU, computed in float32: how coarse formats are where these weights lie, what a group
costs and saves, and perplexity against bits. Figures go to docs/data/x2_fewer_bits_cpu.json, pictures to docs/img/.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import nn

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from transformers import AutoConfig

from folovllm.config import DEFAULT_MODEL
from folovllm.electives.quantization.quantizer.gptq import gptq
from folovllm.electives.quantization.quantizer.groups import dequantize_groups, quantize_groups
from folovllm.electives.quantization.quantizer.one_layer import Inputs
from folovllm.electives.quantization.quantizer.options import QuantizeOptions
from folovllm.electives.quantization.quantizer.perplexity import perplexity, token_losses
from folovllm.electives.quantization.quantizer.run import rows_of
from folovllm.electives.quantization.quantizer.whole import logits_of
from folovllm.models.files import resolve_model
from folovllm.models.llama import LlamaForCausalLM
from folovllm.models.loader import load_model
from folovllm.models.registry import build_model
from folovllm.step.kv_format import FP8

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "data" / "x2_fewer_bits_cpu.json"
IMAGES = ROOT / "docs" / "img"
GROUPS = {"groups of 32": 32, "groups of 128": 128, "a scale for each output": None}
BITS = (8, 6, 5, 4, 3, 2)
Rounding = Callable[[str, torch.Tensor], torch.Tensor]  # a layer's name and its weight -> what its codes stand for


def embedded_model() -> tuple[LlamaForCausalLM, torch.Tensor, torch.Tensor]:
    """The model in float32; rows of text to calibrate with, and rows to measure with."""
    path = resolve_model(DEFAULT_MODEL)
    config = AutoConfig.from_pretrained(path)
    rows = rows_of(path, config, QuantizeOptions(format="gptq"), None)
    assert rows is not None
    model = build_model(config, torch.float32, "cpu", 512)
    load_model(model, path, use_tqdm=False)
    return model, *rows


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The projections of all decoder layers: what is quantised. Embedding and head stay as they are."""
    return {name: module for name, module in model.named_modules() if name.endswith("_proj")}


@torch.inference_mode()
def measured(model: LlamaForCausalLM, text: torch.Tensor, rounding: Rounding) -> float:
    """Perplexity with rounded weights; the weights come back."""
    kept = {name: layer.weight.detach().clone() for name, layer in linear_layers(model).items()}
    for name, layer in linear_layers(model).items():
        layer.weight.copy_(rounding(name, kept[name]))
    losses = torch.cat([token_losses(logits_of(model, row), row) for row in text.split(1)])
    for name, layer in linear_layers(model).items():
        layer.weight.copy_(kept[name])
    return perplexity(losses)


@torch.inference_mode()
def inputs_of(model: LlamaForCausalLM, text: torch.Tensor) -> dict[str, Inputs]:
    """What each projection reads."""
    found = {name: Inputs(layer.weight.shape[1], torch.device("cpu")) for name, layer in linear_layers(model).items()}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, inputs=found[name]: inputs.add(args[0]))
        for name, layer in linear_layers(model).items()
    ]
    for row in text.split(1):
        logits_of(model, row)
    for hook in hooks:
        hook.remove()
    return found


def nearest(bits: int, group: int | None, symmetric: bool) -> Rounding:
    return lambda _, w: dequantize_groups(*quantize_groups(w, bits, group or w.shape[1], symmetric))


def in_fp8(_: str, w: torch.Tensor) -> torch.Tensor:
    """A scale for each output."""
    scale = w.abs().amax(dim=1, keepdim=True) / 448
    return (w / scale).to(FP8).float() * scale


def measure() -> dict[str, Any]:
    model, calibration, text = embedded_model()
    inputs = inputs_of(model, calibration)
    found: dict[str, Any] = {"as it is": measured(model, text, lambda _, w: w), "fp8": measured(model, text, in_fp8)}
    for name, group in GROUPS.items():
        found[f"nearest, {name}"] = [measured(model, text, nearest(bits, group, False)) for bits in BITS]
    found["nearest, symmetric, groups of 128"] = [measured(model, text, nearest(bits, 128, True)) for bits in BITS]

    def corrected(bits: int) -> Rounding:
        return lambda name, w: dequantize_groups(*gptq(w, inputs[name].gram, bits, 128, False))

    found["GPTQ, groups of 128"] = [measured(model, text, corrected(bits)) for bits in BITS]
    down = linear_layers(model)["model.layers.5.mlp.down_proj"].weight.detach()
    weights = [layer.weight.detach() for layer in linear_layers(model).values()]

    def squared(rounding: Rounding) -> float:
        return sum(float((rounding("", w) - w).square().sum()) for w in weights)

    found["squared error, FP8 over INT8"] = squared(in_fp8) / squared(nearest(8, None, True))
    error = (in_fp8("", down) - down).square()
    large = error[down.abs() > down.std() / 2]
    found["FP8 in the last down_proj: squared error above half a standard deviation"] = float(large.sum() / error.sum())
    sizes = inputs["model.layers.5.mlp.down_proj"].magnitude
    found["inputs of the last down_proj: largest over median"] = float(sizes.max() / sizes.median())
    found["weights of it: largest over standard deviation"] = float(down.abs().max() / down.std())
    return found


def draw_numbers(axes: Any) -> None:
    """Where the numbers of two formats lie that both end at 1."""
    fp8 = torch.arange(128, dtype=torch.uint8).view(FP8).float()
    fp8 = fp8[fp8.isfinite()] / 448
    rows = {"E4M3": fp8, "INT8": torch.arange(128) / 127, "INT4": torch.arange(8) / 7}
    for i, (name, numbers) in enumerate(rows.items()):
        axes.plot(numbers, [-i] * len(numbers), "|", ms=14)
        axes.text(-0.03, -i, name, ha="right", va="center")
    axes.set(xlim=(-0.15, 1.02), yticks=[], title="numbers from 0 to the largest", xlabel="share of the largest")
    axes.spines.left.set_visible(False)


def draw_errors(axes: Any, w: torch.Tensor) -> None:
    """How far a weight moves, against its own size."""
    moved = {
        "E4M3, a scale for each output": in_fp8("", w) - w,
        "INT8, a scale for each output": nearest(8, None, True)("", w) - w,
        "INT4, groups of 128": nearest(4, 128, False)("", w) - w,
    }
    unit, edges = float(w.std()), torch.linspace(0, 4, 25)
    bins = torch.bucketize((w.abs() / unit).flatten(), edges)
    for name, error in moved.items():
        squares = (error.flatten() / unit).square()
        roots = [float(squares[bins == b].mean().sqrt()) for b in range(1, len(edges))]
        axes.plot((edges[1:] + edges[:-1]) / 2, roots, label=name)
    axes.set(yscale="log", title="how far a weight moves", xlabel="its size, standard deviations")
    axes.set(ylabel="root mean square, standard deviations")
    axes.legend(frameon=False, fontsize=8)


def draw(found: dict[str, Any]) -> None:
    plt.rcParams.update({"figure.dpi": 100, "axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
    model, _, _ = embedded_model()
    w = linear_layers(model)["model.layers.5.mlp.down_proj"].weight.detach()
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.2), width_ratios=(1, 1, 1))
    draw_numbers(axes[0])
    axes[1].hist((w / w.std()).flatten().numpy(), bins=120, color="tab:grey")
    axes[1].set(yscale="log", title="weights of the last down_proj", xlabel="standard deviations", ylabel="how many")
    draw_errors(axes[2], w)
    figure.tight_layout()
    figure.savefig(IMAGES / "x2_errors.png")
    figure, axes = plt.subplots(figsize=(7, 3.4))
    for name, values in found.items():
        if isinstance(values, list):
            axes.plot(BITS, values, "o--" if "GPTQ" in name else "o-", label=name)
    axes.axhline(found["as it is"], color="grey", ls=":", label="as it is")
    axes.set(yscale="log", xlabel="bits of a code", ylabel="perplexity", xticks=BITS)
    axes.set_yticks([1.5, 2, 2.5, 3, 3.5], ["1.5", "2", "2.5", "3", "3.5"], minor=False)
    axes.set_yticks([], minor=True)
    axes.invert_xaxis()
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(IMAGES / "x2_perplexity.png")


if __name__ == "__main__":
    torch.set_num_threads(1)
    figures = measure()
    DATA.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    draw(figures)
