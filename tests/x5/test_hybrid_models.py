"""Hybrid models against their Hugging Face twins: random geometries, every preset, chunks that end anywhere, reused slots."""

import json
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
from folovllm.models.registry import build_model
from tests.helpers import Driver, assert_logits_equal, hf_logits, hf_model, prompts, tiny_checkpoint
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


@cache
def seeded(family: str = "qwen3_next") -> Workload:
    return answered(
        stacked_checkpoint() if family == "stacks" else hybrid_checkpoint(family), mixed_requests("seeded", 8)
    )


@pytest.mark.parametrize(("family", "engine"), [*(("qwen3_next", engine) for engine in ENGINES), ("stacks", "m6")])
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


@pytest.mark.parametrize("kind", ["a scale a row", "blocks"])
def test_codes_are_put_in_order_with_their_scales(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-Next's projections go key head by key head, and so do their codes, rows of which may share a scale."""
    pytest.importorskip("folovllm.electives.quantization")
    from tests.x2 import quantized

    monkeypatch.setattr(quantized, "PROJECTIONS", ("proj.weight", "in_proj_qkvz.weight", "in_proj_ba.weight"))
    config = quantized.compressed(8, "int", "int-quantized", "channel")
    quantize = quantized.quantize_8(torch.int8, "weight_scale", None)
    if kind == "blocks":
        config = {"quant_method": "fp8", "weight_block_size": [8, 8]}
        quantize = quantized.quantize_8(torch.float8_e4m3fn, "weight_scale_inv", (8, 8))
    folders = quantized.write_quantized(hybrid_checkpoint("qwen3_next", "LF"), tmp_path, quantize, config)
    (ids,) = prompts([20])
    coded, floats = (Driver(folder, max_seqs=1).step({0: ids})[0] for folder in folders)
    assert_logits_equal(coded, floats)


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


def test_a_model_with_states_is_no_draft_model() -> None:
    """The large model may be any; a draft must be able to forget what was rejected."""
    draft = {"method": "draft_model", "model": str(hybrid_checkpoint()), "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="cannot draft: it has layers of linear attention"):
        make_engine(tiny_checkpoint(), milestone="m6", speculative_config=draft)


@pytest.mark.parametrize(("fields", "says"), [
    ({"builders": "prefix_cache"}, "whose states prefix_cache of your own does not keep"),
    ({"tensor_parallel_size": 4}, "2 KV heads, intermediate_size 80, .*linear_num_value_heads 4: sizes that work are 1, 2"),
], ids=str)  # fmt: skip
def test_what_cannot_be(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        set_up(EngineConfig(model=str(hybrid_checkpoint()), device="cpu", **fields))


@pytest.mark.parametrize("milestone", ["m2", "m6"])
def test_states_that_fit_into_no_memory_are_refused_before_they_are_made(milestone: str) -> None:
    with pytest.raises(ValueError, match=r"bytes, and there are .* lower max_num_seqs"):
        make_engine(hybrid_checkpoint(), milestone=milestone, max_num_seqs=99_999_999)


@pytest.mark.parametrize(("field", "value", "says"), [
    ("linear_num_key_heads", 3, "linear_num_value_heads is 4 .* must be a multiple of linear_num_key_heads, 3"),
    ("linear_key_head_dim", 0, "linear_key_head_dim is 0"),
    ("partial_rotary_factor", 1.5, "partial_rotary_factor is 1.5 .* at most 1"),
    ("layer_types", ["chunked_attention"] * 3, "chunked_attention"),
])  # fmt: skip
def test_configurations_that_make_no_model(field: str, value: Any, says: str) -> None:
    config = AutoConfig.from_pretrained(hybrid_checkpoint())
    setattr(config, field, value)
    if field == "partial_rotary_factor":
        config.rope_parameters = config.rope_parameters | {field: value}
    with pytest.raises(ValueError, match=says):
        build_model(config, torch.float32, "meta")
