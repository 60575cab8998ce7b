"""Hybrid models against their Hugging Face twins: random geometries, every preset, chunks that end anywhere, reused slots."""

import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from folovllm import LLM, SamplingParams
from folovllm.apps.inspector.recorder import recording
from folovllm.config import EngineConfig
from folovllm.electives.hybrid.gated_delta_net import GatedDeltaNet
from folovllm.engine.setup import set_up
from folovllm.layers.attention import Attention
from folovllm.models.loader import load_native_model
from folovllm.models.registry import build_model
from folovllm.models.sharded_loader import load_sharded_model
from tests.helpers import Driver, assert_logits_equal, hf_logits, hf_model, prompts, tiny_checkpoint
from tests.m6.ranks import on_ranks
from tests.workloads import ARRIVALS, Workload, answered, make_engine, mixed_requests, serve
from tests.x5.checkpoints import FAMILIES, hybrid_checkpoint, random_geometry, stacked_checkpoint

PIECES = ([150], [1] * 20 + [130], [5, 1, 1, 70, 1, 2, 3, 67])
SMALL = {"block_size": 4, "num_kv_blocks": 40, "max_num_batched_tokens": 20}  # preemption, and prompts in chunks
SNAPSHOTS = {**SMALL, "snapshot_interval": 8, "num_snapshots": 6}
ENGINES: dict[str, dict[str, Any]] = {
    "m1 native": {"milestone": "m1", "model_impl": "native"},
    "m2": {"milestone": "m2"},
    "m3": {"milestone": "m3", "block_size": 4, "num_kv_blocks": 40},
    "m4": {"milestone": "m4", "block_size": 4, "num_kv_blocks": 40, "max_num_seqs": 3},
    "m5": {"milestone": "m5", **SNAPSHOTS},
    "m6": {"milestone": "m6", **SNAPSHOTS},
    "m6 with few rows": {"milestone": "m6", **SMALL, "max_num_seqs": 3, "snapshot_interval": 4, "num_snapshots": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_hugging_face(family: str) -> None:
    """A prompt of three chunks, whole, and in pieces that end anywhere. Slots begin as NaN, and nobody clears them."""
    path, (ids,) = hybrid_checkpoint(family), prompts([150])
    reference = hf_logits(path, ids)
    for pieces in PIECES:
        assert_logits_equal(Driver(path, max_seqs=1, max_len=160).feed(ids, pieces), reference)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 60))])
def test_random_geometries(seed: int) -> None:
    path, (ids,) = random_geometry(seed), prompts([90], seed)
    reference = hf_logits(path, ids)
    assert_logits_equal(Driver(path, max_seqs=1).feed(ids, [3, 1, 66, 20]), reference)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_geometries_on_every_preset(seed: int) -> None:
    load = answered(random_geometry(seed, may_tie=False), mixed_requests("seeded", 6, seed))
    for fields in ENGINES.values():
        load.check(serve(make_engine(load.model, **fields), load.requests, ARRIVALS[2], seed))


def test_experts_in_stacks_answer_as_transformers() -> None:
    load = answered(stacked_checkpoint(), mixed_requests("seeded", 8))
    load.check(serve(make_engine(load.model, **ENGINES["m6"]), load.requests))


@pytest.mark.parametrize("shape", [(3, 64, 72), (4, 62, 72), (4, 64, 70), (64, 72)], ids=str)
@pytest.mark.parametrize("fields", [{}, {"tensor_parallel_size": 2}], ids=["whole", "two ranks"])
def test_a_stack_of_another_shape_is_refused(shape: tuple[int, ...], fields: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(stacked_checkpoint(), tmp_path / "model")
    file, name = tmp_path / "model/model.safetensors", "model.layers.1.mlp.experts.gate_up_proj"
    tensors = load_file(file) | {name: torch.ones(shape)}
    save_file(tensors, file, {"format": "pt"})
    setup = set_up(EngineConfig(model=str(file.parent), device="cpu", use_tqdm=False, **fields))
    says = re.escape(f"{name!r} has shape {list(shape)}, the model expects [4, 64, 72]")
    with pytest.raises(ValueError, match=says):
        if fields:
            on_ranks(2, lambda group: load_sharded_model(setup, group))
        else:
            load_native_model(setup)


@cache
def seeded(family: str = "qwen3_next") -> Workload:
    return answered(hybrid_checkpoint(family), mixed_requests("seeded", 8))


@pytest.mark.parametrize(("family", "engine"), [*(("qwen3_next", e) for e in ENGINES), ("qwen3_5_moe_text", "m6")])
def test_presets_answer_as_transformers(family: str, engine: str) -> None:
    """Twice, so that the second time slots hold the states of others, and prefixes are found."""
    load = seeded(family)
    own = make_engine(load.model, **ENGINES[engine])
    for arrival in ("at_once", "random_steps"):
        load.check(serve(own, load.requests, arrival))


def test_sequences_do_not_see_each_other() -> None:
    """Decodes, chunks and prompts of several sequences in one batch, in slots that others have used."""
    path, (first, second, third) = hybrid_checkpoint(), prompts([60, 50, 40])
    driver = Driver(path)
    driver.feed(third, [40], seq=2)
    driver.cached[2] = 0  # its slot is used again
    logits: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    at = dict.fromkeys(logits, 0)
    for pieces in ({0: 30, 1: 1}, {0: 1, 1: 20, 2: 7}, {0: 28, 1: 28, 2: 1}, {0: 1, 1: 1, 2: 32}):
        new = {seq: (first, second, third)[seq][at[seq] : at[seq] + n] for seq, n in pieces.items()}
        for seq, found in driver.step(new).items():
            logits[seq].append(found)
            at[seq] += len(found)
    for seq, ids in enumerate((first, second, third)):
        assert_logits_equal(torch.cat(logits[seq]), hf_logits(path, ids))


def test_the_state_matters() -> None:
    """With the state of another prefix the logits are others: so the tests here would notice one that is stale."""
    path, (ids, other) = hybrid_checkpoint(), prompts([40, 20])
    driver = Driver(path, max_seqs=2)
    driver.feed(other, [20], seq=1)
    driver.feed(ids[:20], [20])
    for layer in (module for module in driver.model.modules() if isinstance(module, GatedDeltaNet)):
        layer.states[1][0] = layer.states[1][1]
    reference = hf_logits(path, ids)[20:]
    assert (driver.step({0: ids[20:]})[0] - reference).abs().max() > 0.05 * reference.abs().max()


def test_nan_stays_in_its_sequence() -> None:
    """A sequence whose state is NaN answers NaN, its neighbour in the batch does not, nor who gets the slot next."""
    path, (ids, other) = hybrid_checkpoint(), prompts([20, 20])
    driver = Driver(path, max_seqs=2)
    driver.step({0: ids[:10], 1: other[:10]})
    for layer in (module for module in driver.model.modules() if isinstance(module, GatedDeltaNet)):
        layer.states[1][0] = torch.nan
    logits = driver.step({0: ids[10:], 1: other[10:]})
    assert logits[0].isnan().all()
    assert_logits_equal(logits[1], hf_logits(path, other)[10:])
    driver.cached[0] = 0
    assert_logits_equal(driver.step({0: other})[0], hf_logits(path, other))


def test_only_full_attention_has_a_cache() -> None:
    """K/V of one layer in three; the other two have one slot a row, one for padding and the snapshots."""
    fields = {"milestone": "m5", "max_num_seqs": 5, "num_snapshots": 7, "num_kv_blocks": 40, "block_size": 4}
    engine = make_engine(hybrid_checkpoint(), **fields)
    model = engine.executor._worker.runner.model
    assert engine.setup.kv_bytes_per_token == 2 * 2 * 32 * 4
    assert len([module for module in model.modules() if isinstance(module, Attention)]) == 1
    layers = [module for module in model.modules() if isinstance(module, GatedDeltaNet)]
    assert [tuple(state.shape) for state in layers[0].states] == [(5 + 1 + 7, 3, 96), (5 + 1 + 7, 4, 16, 8)]
    assert len(layers) == 2


def test_states_count_in_the_memory_of_a_cpu() -> None:
    """Three slots take what is 148 tokens of K/V less, and the error names them when nothing is left."""
    path = hybrid_checkpoint()
    state = 2 * (3 * 96 + 4 * 16 * 8) * 4  # two layers
    token = 2 * 2 * 32 * 4
    fields = {"milestone": "m4", "max_num_seqs": 2, "block_size": 4, "max_model_len": 64}
    engine = make_engine(path, kv_cache_memory=3 * state + 64 * token, **fields)
    assert engine.stats().kv_blocks_total == 16
    with pytest.raises(ValueError, match=f"has room for 60 tokens beside {3 * state:,} bytes of states"):
        make_engine(path, kv_cache_memory=3 * state + 63 * token, **fields)


def test_a_model_of_linear_layers_alone(tmp_path: Path) -> None:
    """No layer has K and V: blocks take no memory. It answers as transformers, also while it is recorded."""
    path = hybrid_checkpoint(layers="LLL")
    with LLM(str(path), device="cpu", use_tqdm=False) as llm, recording(llm.engine, tmp_path / "steps.jsonl"):
        output = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[0]
    answer = output["token_ids"]
    tokens = torch.tensor([[1, 2, 3, *answer]])
    logits = hf_model(path)(tokens, use_cache=False).logits[0]  # transformers' cache cannot be of such layers alone
    assert logits[2:-1].argmax(-1).tolist() == answer


@pytest.mark.parametrize("milestone", ["m2", "m6"])
def test_states_that_fit_into_no_memory_are_refused_before_they_are_made(milestone: str) -> None:
    with pytest.raises(ValueError, match=r"bytes, and there are .* lower max_num_seqs"):
        LLM(str(hybrid_checkpoint()), milestone=milestone, device="cpu", use_tqdm=False, max_num_seqs=99_999_999)


@pytest.mark.parametrize(("field", "value", "says"), [
    ("linear_num_key_heads", 3, "linear_num_value_heads is 4 .* must be a multiple of linear_num_key_heads, 3"),
    ("linear_key_head_dim", 0, "linear_key_head_dim is 0"),
])  # fmt: skip
def test_sizes_that_make_no_layer(field: str, value: int, says: str) -> None:
    config = AutoConfig.from_pretrained(hybrid_checkpoint())
    setattr(config, field, value)
    with pytest.raises(ValueError, match=says):
        build_model(config, torch.float32, "meta")


def test_quantized_linears() -> None:
    """Products of random weights in 8 bits run through the same layers; the convolution and the gates stay as they are."""
    llm = LLM(
        str(hybrid_checkpoint()), random_weights=True, quantization="int8", device="cpu", milestone="m6", use_tqdm=False
    )
    with llm:
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


def test_codes_are_put_in_order_with_their_scales(tmp_path: Path) -> None:
    """Qwen3-Next's projections go key head by key head. With a code of 8 bits for each weight they give what the rounded floats give."""
    pytest.importorskip("folovllm.electives.quantization")
    path = hybrid_checkpoint("qwen3_next", "LF")
    scheme = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    coded, rounded = {}, {}
    for name, weight in load_file(path / "model.safetensors").items():
        coded[name] = rounded[name] = weight
        if weight.dim() == 2 and "embed" not in name and "lm_head" not in name:
            scale = weight.abs().amax(1, keepdim=True) / 127
            coded[name], coded[f"{name}_scale"] = (weight / scale).round().to(torch.int8), scale
            rounded[name] = coded[name] * scale
    config = json.loads((path / "config.json").read_text())
    group = {"targets": ["Linear"], "weights": {**scheme, "dynamic": False}, "input_activations": None}
    codes = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }  # fmt: skip
    x = torch.randn(5, config["hidden_size"], generator=torch.Generator().manual_seed(0))
    found = []
    for kind, tensors, more in (("coded", coded, {"quantization_config": codes}), ("rounded", rounded, {})):
        (tmp_path / kind).mkdir()
        for file in path.glob("*.json"):
            shutil.copy(file, tmp_path / kind)
        (tmp_path / kind / "config.json").write_text(json.dumps(config | more))
        save_file(tensors, tmp_path / kind / "model.safetensors")
        model = load_native_model(set_up(EngineConfig(model=str(tmp_path / kind), device="cpu", use_tqdm=False)))
        with torch.inference_mode():
            found.append(model.model.layers[0].self_attn.project(x))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_a_cache_of_8_bits() -> None:
    """It is for the layers of full attention; the states stay in float32."""
    path, (ids,) = hybrid_checkpoint(), prompts([30])
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    fields = {"device": "cpu", "milestone": "m6", "use_tqdm": False, "calculate_kv_scales": True, "max_model_len": 64}
    with LLM(str(path), kv_cache_dtype="fp8", **fields) as llm:
        (output,) = llm.generate([ids], params, use_tqdm=False)
    assert output.outputs[0].token_ids[0] in hf_logits(path, ids)[-1].topk(3).indices.tolist()


def test_the_text_part_of_a_model_that_reads_images(tmp_path: Path) -> None:
    """As Qwen3.5 is published: the text model's configuration in another one, its tensors beside those for images and drafts."""
    path, (ids,) = hybrid_checkpoint("qwen3_5_text"), prompts([20])
    for file in path.iterdir():
        shutil.copy(file, tmp_path)
    text = json.loads((path / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(path / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    tensors |= {"model.visual.patch_embed.weight": torch.ones(2, 2), "mtp.layers.0.weight": torch.ones(2, 2)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    said = []
    for folder in (path, tmp_path):
        with LLM(str(folder), device="cpu", use_tqdm=False, max_model_len=64) as llm:
            said.append(llm.generate([ids], greedy, use_tqdm=False)[0].outputs[0].token_ids)
    assert said[0] == said[1]


class TestRefusals:
    def test_a_draft_model(self) -> None:
        """The large model may be any; a draft must be able to forget what was rejected."""
        draft = {"method": "draft_model", "model": str(hybrid_checkpoint()), "num_speculative_tokens": 2}
        with pytest.raises(ValueError, match="cannot draft: it has layers of linear attention"):
            LLM(str(tiny_checkpoint()), speculative_config=draft, device="cpu", use_tqdm=False, max_model_len=64)

    def test_a_prefix_cache_of_ones_own(self) -> None:
        with pytest.raises(ValueError, match="whose states prefix_cache of your own does not keep"):
            set_up(EngineConfig(model=str(hybrid_checkpoint()), builders="prefix_cache", device="cpu"))

    def test_ranks_without_a_key_head(self) -> None:
        says = "2 KV heads, intermediate_size 80, .*linear_num_value_heads 4: sizes that work are 1, 2"
        with pytest.raises(ValueError, match=says):
            set_up(EngineConfig(model=str(hybrid_checkpoint()), tensor_parallel_size=4, device="cpu"))

    def test_another_kind_of_layer(self, tmp_path: Path) -> None:
        config = json.loads((tiny_checkpoint() / "config.json").read_text())
        config["layer_types"] = ["chunked_attention"] * config["num_hidden_layers"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="chunked_attention"):
            LLM(str(tmp_path), tokenizer=str(tiny_checkpoint()), random_weights=True, device="cpu")
