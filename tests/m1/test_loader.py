"""`load_model`: every weight in its place, every mistake named, nothing twice in memory."""

import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import AutoConfig

from folovllm.layers.linear import PLAIN
from folovllm.models.llama import LlamaForCausalLM
from folovllm.models.loader import Destination, checkpoint_places, load_model
from folovllm.models.random_weights import init_random_weights
from folovllm.models.registry import build_model
from tests.helpers import FAMILIES, hf_model, tiny_checkpoint
from tests.m1 import memory
from tests.tiny import worked_case


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


class TestPlaces:
    """m1.8. A place is described by its shape, and by how many numbers of the model's own tensor lie before it."""

    def places(self, family: str, tied: bool = True) -> tuple[LlamaForCausalLM, dict[str, Destination]]:
        config = AutoConfig.from_pretrained(tiny_checkpoint(family, tied=tied))
        config.num_hidden_layers = 1
        config.hidden_size, config.head_dim, config.intermediate_size, config.vocab_size = 4, 2, 3, 5
        config.num_attention_heads, config.num_key_value_heads = 2, 1
        model = build_model(config, torch.float32, "cpu", max_model_len=8)
        for number, parameter in enumerate(model.parameters(), 1):
            parameter.fill_(number)
        return model, checkpoint_places(model)

    def test_a_worked_case(self) -> None:
        """Heads of 2, two for queries and one for keys and for values, over a stream of 4: 4, 2 and 2 rows of 4 numbers."""
        _, places = self.places("qwen3")
        got = {
            name.removeprefix("model.layers.0."): [place.view.storage_offset(), list(place.view.shape)]
            for name, place in places.items()
            if "_proj" in name
        }
        expected = {
            "self_attn.q_proj.weight": [0, [4, 4]],
            "self_attn.k_proj.weight": [16, [2, 4]],
            "self_attn.v_proj.weight": [24, [2, 4]],
            "self_attn.o_proj.weight": [0, [4, 4]],
            "mlp.gate_proj.weight": [0, [3, 4]],
            "mlp.up_proj.weight": [12, [3, 4]],
            "mlp.down_proj.weight": [0, [4, 3]],
        }
        says = "queries are the first 4 rows of qkv_proj, keys the next 2, values the last 2; the gate comes before up"
        worked_case("m1.8", sorted(got.items()), sorted(expected.items()), says)

    def test_what_is_not_a_projection_is_called_as_in_the_model(self) -> None:
        _, places = self.places("qwen3")
        names = sorted(name for name in places if "_proj" not in name)
        layer = "model.layers.0"
        expected = [
            "model.embed_tokens.weight", f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight",
            f"{layer}.self_attn.k_norm.weight", f"{layer}.self_attn.q_norm.weight", "model.norm.weight",
        ]  # fmt: skip
        worked_case("m1.8 others", names, sorted(expected), "embedding and norms; the tied head is the embedding")

    def test_a_place_knows_how_its_layer_stores_weights(self) -> None:
        model, _ = self.places("qwen3")
        method = model.model.layers[0].self_attn.qkv_proj.linear_method = type(PLAIN)()
        places = checkpoint_places(model)
        found = [places[f"model.layers.0.self_attn.{p}.weight"].linear_method for p in ("q_proj", "k_proj", "v_proj")]
        assert all(each is method for each in found), "a quantized layer's method is not the plain one"

    def test_a_head_of_its_own_has_a_place_and_a_tied_one_has_none(self) -> None:
        assert "lm_head.weight" in self.places("qwen3", tied=False)[1], "it is a parameter like others"
        assert "lm_head.weight" not in self.places("qwen3", tied=True)[1], "it is the embedding: one tensor, one place"

    def test_biases_have_places(self) -> None:
        _, places = self.places("qwen2")
        shapes = {name.rpartition("attn.")[2]: list(p.view.shape) for name, p in places.items() if "bias" in name}
        says = "Qwen2's projections of queries, keys and values have a bias each, of as many numbers as rows"
        biases = [("k_proj.bias", [2]), ("q_proj.bias", [4]), ("v_proj.bias", [2])]
        worked_case("m1.8 biases", sorted(shapes.items()), biases, says)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_what_is_written_to_a_place_is_in_the_model(self, family: str) -> None:
        model, places = self.places(family)
        for place in places.values():
            place.view.fill_(-1.0)
        left = [name for name, parameter in model.named_parameters() if (parameter != -1).any()]
        assert not left, "these parameters, or parts of them, are in no place; a place must be a view, not a copy"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_in_its_place(family: str) -> None:
    path = tiny_checkpoint(family, tied=False)
    model, theirs = load(path), hf_model(path)
    for ours, layer in zip(model.model.layers, theirs.model.layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        merged = family == "phi3"  # in the checkpoint already
        qkv = [attention.qkv_proj] if merged else [attention.q_proj, attention.k_proj, attention.v_proj]
        gate_up = [mlp.gate_up_proj] if merged else [mlp.gate_proj, mlp.up_proj]
        assert torch.equal(ours.self_attn.qkv_proj.weight, torch.cat([p.weight for p in qkv]))
        assert torch.equal(ours.mlp.gate_up_proj.weight, torch.cat([p.weight for p in gate_up]))
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


@pytest.mark.parametrize(("is_terminal", "use_tqdm"), [(True, True), (True, False), (False, True)])
def test_long_work_shows_its_progress_in_a_terminal(
    is_terminal: bool, use_tqdm: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint("qwen3")
    model = build_model(AutoConfig.from_pretrained(path), torch.float32, "cpu")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    load_model(model, path, use_tqdm=use_tqdm)
    assert not capsys.readouterr().err, "a bar for what takes no second"
    monkeypatch.setattr("folovllm.models.loader.tqdm", lambda *args, **settings: tqdm(*args, **settings | {"delay": 0}))
    load_model(model, path, use_tqdm=use_tqdm)
    assert ("Loading weights: 100%" in capsys.readouterr().err) == (is_terminal and use_tqdm)


def with_(name: str, make: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> Callable[..., object]:
    """A change that puts another tensor under a name."""
    return lambda tensors: tensors.update({name: make(tensors)})


UP, EMBEDDING, HEAD = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"
MISTAKES = [
    (True, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"), r"lacks model\.layers\.1\.self_attn\.k_proj"),
    (True, lambda t: [t.pop(name) for name in list(t) if "layers.2" in name], r"lacks model\.layers\.2\..* and 6 more"),
    (False, lambda t: t.pop(HEAD), r"lacks lm_head\.weight"),
    (True, with_("model.layers.0.self_attn.sinks", lambda t: torch.ones(4)), "hold 'model.layers.0.self_attn.sinks'"),
    (True, with_("model.layers.0.self_attn.q_proj.bias", lambda t: torch.ones(128)), "q_proj.bias"),
    (True, with_(UP, lambda t: t[UP][:, :70].contiguous()), r"up_proj\.weight' has shape \[80, 70\], .* \[80, 72\]"),
    (True, with_("model.norm.weight", lambda t: torch.ones(1)), "model.norm.weight"),  # it could be broadcast
    (True, with_(HEAD, lambda t: t[EMBEDDING] + 1), "tie_word_embeddings"),
]


@pytest.mark.parametrize(("tied", "change", "says"), MISTAKES, ids=[says for *_, says in MISTAKES])
def test_a_mistake_is_named(tied: bool, change: Callable[..., object], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        load(altered(tmp_path, change, tied))


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    path = altered(tmp_path, lambda t: None)
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    with pytest.raises(ValueError, match=r"no model\.safetensors .* never pickles"):
        load(path)


def test_a_shard_that_the_index_names_is_absent(tmp_path: Path) -> None:
    source = tiny_checkpoint("qwen3", max_shard_size="100KB")
    (tmp_path / "model.safetensors.index.json").write_text((source / "model.safetensors.index.json").read_text())
    first, *rest = sorted(source.glob("*.safetensors"))
    for shard in rest:
        (tmp_path / shard.name).symlink_to(shard)
    with pytest.raises(ValueError, match=f"no {first.name} in"):
        load(tmp_path, config_path=source)


ACCEPTED = [
    with_(HEAD, lambda t: t[EMBEDDING].clone()),
    with_("model.layers.0.self_attn.rotary_emb.inv_freq", lambda t: torch.ones(16)),
]


@pytest.mark.parametrize("change", ACCEPTED, ids=["a copy of the embedding as a tied head", "frequencies of rope"])
def test_what_is_of_no_use_is_accepted(change: Callable[..., object], tmp_path: Path) -> None:
    assert not load(altered(tmp_path, change)).lm_head.weight.isnan().any()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc and Linux's /proc")
def test_weights_are_never_twice_in_memory() -> None:
    path = tiny_checkpoint("llama", hidden_size=512, head_dim=128, intermediate_size=2048, num_hidden_layers=6)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        growth, weights = pool.submit(memory.growth_while_loading, path).result()
    assert weights > 40e6
    assert 0.9 * weights < growth < 1.3 * weights


class TestRandomWeights:
    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        model = build_model(AutoConfig.from_pretrained(tiny_checkpoint("qwen3")), torch.float32, "cpu")
        init_random_weights(model, seed, checkpoint_places(model))
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
