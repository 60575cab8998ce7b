"""`folovllm quantize` of a damaged or odd checkpoint: one sentence before any work, and never a folder that nothing can read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from folovllm.electives.quantization.quantizer.options import QuantizeOptions
from folovllm.electives.quantization.quantizer.run import quantize
from tests.helpers import Driver, prompts, tiny_checkpoint
from tests.workloads import make_engine

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
UP = "model.layers.1.mlp.up_proj.weight"
Tensors = dict[str, torch.Tensor]


def to_int8(model: Path | str, folder: Path) -> Path:
    """Quantize a model into `out` in a folder."""
    quantize(str(model), QuantizeOptions(format="int8"), folder / "out", use_tqdm=False)
    return folder / "out"


def changed(to: Path, change: Callable[[Tensors], object], **fields: Any) -> Path:
    """A copy of the tiny model whose tensors and config are changed."""
    shutil.copytree(tiny_checkpoint(), to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file({name: t.clone() for name, t in tensors.items()}, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((to / "config.json").read_text()) | fields
    (to / "config.json").write_text(json.dumps(config))
    return to


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[-1] = torch.nan
    return tensor


DAMAGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "no embedding": (lambda t: t.pop(EMBEDDING), "lacks model.embed_tokens.weight"),
    "no last norm": (lambda t: t.pop(NORM), "lacks model.norm.weight"),
    "no projection": (lambda t: t.pop(UP), f"lacks {UP}"),
    "a small embedding": (lambda t: t.update({EMBEDDING: t[EMBEDDING][:100]}), r"embed_tokens.*has shape \[100, 72\]"),
    "a short norm": (lambda t: t.update({NORM: t[NORM][:8]}), r"norm.weight' has shape \[8\]"),
    "a tensor of no layer": (lambda t: t.update({"model.odd.weight": t[NORM]}), "hold 'model.odd.weight'"),
    "NaN in the embedding": (lambda t: t.update({EMBEDDING: with_nan(t[EMBEDDING])}), "embed_tokens.*holds NaN"),
    "NaN in the last norm": (lambda t: t.update({NORM: with_nan(t[NORM])}), "model.norm.weight' holds NaN"),
    "codes": (lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)}), f"{UP}' is stored as float8_e4m3fn"),
    "a head that is not tied": (lambda t: None, "lacks lm_head.weight"),
    "another head": (lambda t: t.update({HEAD: t[EMBEDDING] * 2}), "'lm_head.weight' of its own"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_before_any_work(damage: str, tmp_path: Path) -> None:
    change, says = DAMAGES[damage]
    model = changed(tmp_path / "model", change, tie_word_embeddings=damage != "a head that is not tied")
    with pytest.raises(ValueError, match=says):
        to_int8(model, tmp_path)
    assert not (tmp_path / "out").exists(), "nothing is written for a model that cannot be quantized"


def test_a_configuration_of_no_model(tmp_path: Path) -> None:
    model = changed(tmp_path / "model", lambda t: None, rope_parameters={"rope_theta": "default"})
    with pytest.raises(ValueError, match="cannot read the model in"):
        to_int8(model, tmp_path)


def test_a_copy_of_the_tied_head_does_no_harm(tmp_path: Path) -> None:
    model = changed(tmp_path / "model", lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    to_int8(model, tmp_path)
    assert Driver(tmp_path / "out").step({0: prompts([5])[0]})[0].isfinite().all()


def test_scales_of_a_cache_come_along(tmp_path: Path) -> None:
    """Plain weights, and scales for K and V in 8 bits: they go from folder to folder."""
    names = [f"model.layers.{i}.self_attn.{kind}_scale" for i in range(3) for kind in "kv"]
    model = changed(tmp_path / "model", lambda t: t.update({name: torch.tensor(0.25) for name in names}))
    to_int8(model, tmp_path)
    layers = Driver(tmp_path / "out").model.model.layers
    assert {(a.scales.key, a.scales.value) for a in (layer.self_attn.attn for layer in layers)} == {(0.25, 0.25)}


def test_an_embedded_model_takes_its_tokenizer_along(tmp_path: Path) -> None:
    """All of them share one, which lies in the folder of another."""
    to_int8("stories-draft", tmp_path)
    engine = make_engine(tmp_path / "out", milestone="m6")
    assert engine.tokenizer.decode(engine.tokenizer.encode("The dog")) == "The dog"


def test_awq_of_a_checkpoint_with_merged_matrices(tmp_path: Path) -> None:
    """Phi-3's V and up are rows of other matrices: what they feed is left unscaled, and all else is done."""
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps("".join(chr(97 + (i * j) % 26) for j in range(40))) for i in range(20)))
    model = tiny_checkpoint("phi3", hidden_size=64, intermediate_size=96, num_kv_heads=4)
    options = QuantizeOptions(format="awq", group_size=32, samples=6, length=24)
    report = quantize(str(model), options, tmp_path / "out", text, use_tqdm=False)
    assert report.quality is not None and report.quality.after < 2 * report.quality.before
    assert Driver(report.folder).step({0: prompts([20])[0]})[0].isfinite().all()
