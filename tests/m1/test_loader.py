"""`load_model`: every weight in its place, every mistake named, nothing twice in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from folovllm.models.loader import init_random_weights, load_model
from folovllm.models.registry import build_model
from tests.helpers import FAMILIES, hf_model, tiny_checkpoint


def load(path: Path, dtype: torch.dtype = torch.float32, config_path: Path | None = None):
    """The model of `path`, every weight NaN before it is loaded."""
    model = build_model(AutoConfig.from_pretrained(config_path or path), dtype, "cpu")
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    load_model(model, path, use_tqdm=False)
    return model


def altered(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], tied: bool = True) -> Path:
    """A copy of a tiny Qwen3 checkpoint with its tensors changed."""
    source = tiny_checkpoint("qwen3", tied=tied)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    return tmp_path


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_in_its_place(family: str) -> None:
    path = tiny_checkpoint(family, tied=False)
    model, theirs = load(path), hf_model(path)
    for ours, layer in zip(model.model.layers, theirs.model.layers, strict=True):
        attention = layer.self_attn
        qkv = torch.cat([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
        assert torch.equal(ours.self_attn.qkv_proj.weight, qkv)
        assert torch.equal(
            ours.mlp.gate_up_proj.weight, torch.cat((layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight))
        )
    assert torch.equal(model.lm_head.weight, theirs.lm_head.weight)
    assert not any(parameter.isnan().any() for parameter in model.parameters())


def test_tied_weights_are_one_tensor() -> None:
    model = load(tiny_checkpoint("qwen3", tied=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_dtype_is_converted_on_the_way() -> None:
    path = tiny_checkpoint("qwen3")
    wide, narrow = load(path), load(path, torch.bfloat16)
    for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)


def test_sharded_checkpoint() -> None:
    path = tiny_checkpoint("qwen3", max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 3
    whole = load(tiny_checkpoint("qwen3"))
    for a, b in zip(load(path).parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)


def test_progress_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_checkpoint("qwen3")
    model = build_model(AutoConfig.from_pretrained(path), torch.float32, "cpu")
    load_model(model, path)
    assert "Loading weights: 100%" in capsys.readouterr().err
    load_model(model, path, use_tqdm=False)
    assert not capsys.readouterr().err


class TestMistakes:
    def test_a_missing_weight_is_named(self, tmp_path: Path) -> None:
        path = altered(tmp_path, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"))
        with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.weight$"):
            load(path)

    def test_many_missing_weights_are_counted(self, tmp_path: Path) -> None:
        path = altered(tmp_path, lambda t: [t.pop(name) for name in list(t) if "layers.2" in name])
        with pytest.raises(ValueError, match=r"lacks model\.layers\.2\..* and 6 more"):
            load(path)

    def test_a_missing_head_is_an_error_unless_tied(self, tmp_path: Path) -> None:
        path = altered(tmp_path, lambda t: t.pop("lm_head.weight"), tied=False)
        with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
            load(path)

    def test_a_left_over_weight_is_named(self, tmp_path: Path) -> None:
        path = altered(tmp_path, lambda t: t.update({"model.layers.0.self_attn.sinks": torch.ones(4)}))
        with pytest.raises(ValueError, match=r"holds 'model\.layers\.0\.self_attn\.sinks'"):
            load(path)

    def test_a_bias_that_the_config_does_not_have_is_left_over(self, tmp_path: Path) -> None:
        path = altered(tmp_path, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(128)}))
        with pytest.raises(ValueError, match=r"q_proj\.bias"):
            load(path)

    def test_a_misshapen_weight_is_named(self, tmp_path: Path) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        path = altered(tmp_path, lambda t: t.update({name: t[name][:, :70].contiguous()}))
        with pytest.raises(
            ValueError, match=r"mlp\.up_proj\.weight' has shape \[80, 70\], the model expects \[80, 72\]"
        ):
            load(path)

    def test_a_broadcastable_shape_is_still_wrong(self, tmp_path: Path) -> None:
        path = altered(tmp_path, lambda t: t.update({"model.norm.weight": torch.ones(1)}))
        with pytest.raises(ValueError, match=r"model\.norm\.weight"):
            load(path)

    @pytest.mark.parametrize("size", [0, 5, 300, -1])
    def test_a_truncated_file(self, tmp_path: Path, size: int) -> None:
        path = altered(tmp_path, lambda t: None)
        file = path / "model.safetensors"
        os.truncate(file, size if size >= 0 else file.stat().st_size - 1)
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged or incomplete"):
            load(path)

    def test_pickles_are_never_opened(self, tmp_path: Path) -> None:
        path = altered(tmp_path, lambda t: None)
        (path / "model.safetensors").unlink()
        (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
        with pytest.raises(ValueError, match=r"no model\.safetensors .* never pickles"):
            load(path)

    def test_a_shard_that_the_index_names_is_absent(self, tmp_path: Path) -> None:
        source = tiny_checkpoint("qwen3", max_shard_size="100KB")
        (tmp_path / "model.safetensors.index.json").write_text((source / "model.safetensors.index.json").read_text())
        shards = sorted(source.glob("*.safetensors"))
        for shard in shards[1:]:
            (tmp_path / shard.name).symlink_to(shard)
        with pytest.raises(ValueError, match=f"no {shards[0].name} in"):
            load(tmp_path, config_path=source)


class TestTiedHeads:
    def test_a_copy_of_the_embedding_is_accepted(self, tmp_path: Path) -> None:
        path = altered(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
        assert not load(path).lm_head.weight.isnan().any()

    def test_a_head_of_its_own_contradicts_the_config(self, tmp_path: Path) -> None:
        path = altered(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
        with pytest.raises(ValueError, match="tie_word_embeddings"):
            load(path)


def test_stored_rope_frequencies_are_ignored(tmp_path: Path) -> None:
    load(altered(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})))


MEASURE = """
import json, sys, threading
from pathlib import Path
import torch
from transformers import AutoConfig
from folovllm.models import loader
from folovllm.models.registry import build_model

def anonymous():  # bytes of memory that is no mapped file
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
path, peak = Path(sys.argv[1]), 0
config = AutoConfig.from_pretrained(path)
before = anonymous()
model = build_model(config, torch.bfloat16, "cpu")
copy = loader.copy_weight
def watched(name, tensor, destinations):
    global peak
    copy(name, tensor, destinations)
    peak = max(peak, anonymous())  # with the tensor still alive
loader.copy_weight = watched
loader.load_model(model, path, use_tqdm=False)
print(json.dumps([peak - before, sum(p.nbytes for p in model.parameters())]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_weights_are_never_twice_in_memory() -> None:
    path = tiny_checkpoint("llama", hidden_size=512, head_dim=128, intermediate_size=2048, num_hidden_layers=6)
    result = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    grown, weights = json.loads(result.stdout)
    assert weights > 40e6
    assert grown < 1.3 * weights


class TestRandomWeights:
    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        model = build_model(AutoConfig.from_pretrained(tiny_checkpoint("qwen3")), torch.float32, "cpu")
        init_random_weights(model, seed)
        return dict(model.named_parameters())

    def test_a_seed_decides_them(self) -> None:
        first, again, other = self.weights(1), self.weights(1), self.weights(2)
        name = "model.layers.0.mlp.down_proj.weight"
        assert all(torch.equal(first[key], again[key]) for key in first)
        assert not torch.equal(first[name], other[name])
        assert not torch.equal(first[name], first["model.layers.1.mlp.down_proj.weight"])

    def test_their_sizes(self) -> None:
        for name, weight in self.weights(0).items():
            if name.endswith("norm.weight"):
                assert (weight == 1).all()
            else:
                assert 0.015 < weight.std() < 0.025
