"""Quantized checkpoints of all layouts: what they say, and that answers are those of the numbers that the codes stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from folovllm import EngineConfig
from folovllm.electives.quantization import linear_method
from folovllm.electives.quantization.config import CheckpointQuantization
from folovllm.electives.quantization.fp8 import Fp8
from folovllm.electives.quantization.int4 import Int4
from folovllm.electives.quantization.layouts import AWQ, FP8, INT8
from folovllm.engine.setup import set_up
from folovllm.layers.linear import LinearBase
from folovllm.models.extra_tensors import repacked
from folovllm.models.loader import load_model, load_native_model
from tests.contract import DEVICE
from tests.helpers import Driver, assert_as_accurate, assert_logits_equal, hf_logits, prompts, tiny_checkpoint
from tests.workloads import answered, make_engine, mixed_requests, serve
from tests.x2 import quantized
from tests.x2.quantized import (
    ALIGNED,
    BLOCK,
    BYTE_KINDS,
    E4M3,
    FP8_BLOCKS,
    FP8_WIDE,
    GPTQ,
    GROUP,
    INT4_KINDS,
    SORTED,
    assert_ranks_hold_their_parts,
    compressed,
    quantize_8,
    tiny,
    write_quantized,
)  # fmt: skip

KINDS = BYTE_KINDS | INT4_KINDS
SMALL_BLOCKS, WIDE_BLOCKS = (
    (quantize_8(E4M3, "weight_scale_inv", block), FP8_BLOCKS | {"weight_block_size": list(block)})
    for block in ((8, 8), (24, 16))
)
INT8_CHANNELS = compressed(8, "int", "int-quantized", "channel")


def source(kind: str, family: str = "qwen3", inner: int = 96, **fields: object) -> Path:
    """Projections of 64 to 128 inputs where these come in groups of 32."""
    sizes = {"hidden_size": 64, "intermediate_size": inner} if kind in INT4_KINDS else {}
    return tiny_checkpoint(family, **{**sizes, **fields})  # type: ignore[arg-type]


def assert_same(ours: Driver, plain: Driver, pieces: dict[int, list[int]]) -> None:
    expected = plain.step(pieces)
    for seq, logits in ours.step(pieces).items():
        assert_logits_equal(logits, expected[seq])


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_numbers_that_the_codes_stand_for(kind: str, tmp_path: Path) -> None:
    coded, floats = write_quantized(source(kind), tmp_path, *KINDS[kind])
    ours, plain = Driver(coded), Driver(floats)
    for pieces in ({0: prompts([20])[0]}, {0: [8], 1: [2, 5]}):
        assert_same(ours, plain, pieces)
    linears = [module for module in ours.model.modules() if isinstance(module, LinearBase)]
    if kind in BYTE_KINDS:
        assert {linear.weight.dtype for linear in linears} <= {E4M3, torch.int8}, "codes stay codes"
    else:
        assert {(linear.weight.dtype, linear.scale.dtype) for linear in linears} == {(torch.int32, torch.float16)}


@pytest.mark.parametrize(("kind", "few", "batches"), [
    ("fp8 wide", "quant_gemv", [2, 5, 6]), ("int8 channel", "quant_gemv", [2, 5]), ("gptq", "int4_linear", [2, 5, 6]),
])  # fmt: skip
def test_the_fused_layers_of_m6_over_kernels(
    kind: str, few: str, batches: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms fold, for products take their weights along; few tokens, some and many (6) have a kernel each."""
    pytest.importorskip("triton", reason="Triton is for Linux only")
    from folovllm.electives.quantization.kernels import int4_linear, quant_gemv, quant_matmul
    from folovllm.models.fused_layer import skinny_layers

    monkeypatch.setattr(linear_method, "on_gpu", lambda x: True)
    monkeypatch.setattr(quant_matmul, "MANY", 6)
    monkeypatch.setattr(quant_matmul, "MANY_IN_SHORT_GROUPS", 6)
    used: list[str] = []
    for module, name in (
        (quant_gemv, "quant_gemv"), (int4_linear, "int4_linear"), (quant_matmul, "quant_matmul"), (quant_matmul, "unpacked"),
    ):  # fmt: skip
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, k=kernel, n=name, **more: used.append(n) or k(*given, **more))
    inner = {"intermediate_size": 32} if kind == "gptq" else {}
    model = tiny_checkpoint("qwen3", num_hidden_layers=1, **{**ALIGNED, **inner})
    coded, floats = write_quantized(model, tmp_path, *(FP8_WIDE if kind == "fp8 wide" else KINDS[kind]))
    ours = Driver(coded, "torch_paged", device=DEVICE, layers=skinny_layers(16))
    plain = Driver(floats, "torch_paged", device=DEVICE)
    assert all(layer.folded for layer in ours.model.model.layers)  # type: ignore[union-attr]
    for turn, tokens in enumerate(batches):
        used.clear()
        pieces = {0: [4], 1: [2]} if tokens == 2 else {min(turn + 1, 3): prompts([tokens])[0]}
        assert_same(ours, plain, pieces)
        assert set(used) == {few if tokens <= 4 else "quant_matmul" if tokens < 6 else "unpacked"}


@pytest.mark.parametrize("milestone", ["m2", "m6"])
def test_an_engine_answers_as_m1_with_the_numbers_of_the_codes(milestone: str, tmp_path: Path) -> None:
    coded, floats = write_quantized(source("gptq sorted"), tmp_path, *KINDS["gptq sorted"])
    load = answered(floats, mixed_requests(count=6))
    load.check(serve(make_engine(coded, milestone=milestone), load.requests, "random"))


@pytest.mark.parametrize("kind", [
    "small blocks", "fp8 tensor", "int8 channel", "int8 packed", "gptq", "gptq rows", "awq", "packed", "packed rows",
])  # fmt: skip
def test_ranks_hold_their_parts(kind: str, tmp_path: Path) -> None:
    """Of codes, scales and zeros, along outputs and along inputs; a scale for a whole row is everybody's."""
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if kind in INT4_KINDS else {}
    written = SMALL_BLOCKS if kind == "small blocks" else KINDS[kind]
    coded = write_quantized(source(kind, inner=128), tmp_path, *written)[0]
    assert_ranks_hold_their_parts(coded, **tolerance)
    if not kind.endswith("rows"):  # where all of a row is one group, a part has its words in another order
        assert_ranks_hold_their_parts(coded, random_weights=True, **tolerance)


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        *((kind, "") for kind in ("fp8 channel", "small blocks", "gptq", "awq", "packed")),
        ("wide blocks", "cannot share self_attn.q_proj: .* whole blocks of 24 x 16"),
        ("gptq sorted", r"inputs are sorted \(desc_act\)"),
    ],
)
def test_a_checkpoint_with_merged_layers(kind: str, refused: str, tmp_path: Path) -> None:
    """Phi-3's codes and scales of query, key and value are one tensor each. Two ranks share them, or are refused."""
    merged = tiny_checkpoint("phi3", hidden_size=128, intermediate_size=128, num_hidden_layers=1)
    written = {"small blocks": SMALL_BLOCKS, "wide blocks": WIDE_BLOCKS}.get(kind) or KINDS[kind]
    coded, floats = write_quantized(merged, tmp_path, *written)
    assert_same(Driver(coded), Driver(floats), {0: [5, 9, 3]})
    if refused:
        with pytest.raises(ValueError, match=refused):
            set_up(EngineConfig(model=str(coded), device="cpu", tensor_parallel_size=2))
    else:
        assert_ranks_hold_their_parts(coded, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["fp8 wide", "fp8 channel", "int8 packed", "packed symmetric", "packed rows"])
def test_transformers_reads_the_same_checkpoint_alike(kind: str, tmp_path: Path) -> None:
    """In its own way, through the packages that it needs for it. Zeros of 4 bits it cannot read (transformers 5.23)."""
    for package in ("compressed_tensors", "accelerate"):
        pytest.importorskip(package, reason=f"transformers needs {package} for this (pip install -e '.[dev]')")
    sizes = {} if kind in INT4_KINDS else ALIGNED  # it has whole blocks alone
    model = source(kind, "llama", tied=False, **sizes)
    coded, _ = write_quantized(model, tmp_path, *(FP8_WIDE if kind == "fp8 wide" else KINDS[kind]))
    tokens = prompts([12])[0]
    assert_logits_equal(Driver(coded).step({0: tokens})[0], hf_logits(coded, tokens))


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.index_fill(0, torch.tensor([1]), torch.nan)


BAD_TENSORS: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor] | None, str]] = [
    ("gptq", "qzeros", None, "lacks .*NAME"),
    ("gptq", "scales", with_nan, "NAME' holds NaN"),
    ("gptq", "scales", lambda t: t[:1], r"NAME' has shape \[64, 1\], the model expects \[64, 3\]"),
    ("gptq", "qweight", lambda t: t[:-1], "NAME: weights of 4 bits in groups of 32 of 88 inputs"),
    ("gptq", "qzeros", lambda t: t.float(), "NAME' is stored as float32"),
    ("gptq", "qzeros", lambda t: t[None], "NAME: .*t.. expects a tensor with <= 2 dimensions"),
    ("gptq sorted", "g_idx", lambda t: t + 100, "NAME: it does not put 32 inputs into each group"),
    ("gptq sorted", "g_idx", lambda t: t.index_fill(0, torch.tensor([40]), 0), "NAME: it does not put 32 inputs into each group"),
    ("awq", "scales", lambda t: t.flatten(), r"NAME' has shape \[192, 1\], the model expects"),
    ("awq", "qweight", lambda t: t.flatten(), "NAME: IndexError"),
    ("packed", "weight_packed", lambda t: t[None], "NAME"),
    ("packed symmetric", "weight_packed", lambda t: t[:, :-4], "NAME' has shape"),
    ("fp8 blocks", "weight_scale_inv", lambda t: t[:-1], r"NAME' has shape \[4, 10\], the model expects \[5, 10\]"),
    ("fp8 blocks", "weight", lambda t: t.view(torch.uint8).index_fill(1, torch.tensor([5]), 255).view(E4M3), "NAME' holds NaN"),
    ("fp8 tensor", "weight_scale", lambda t: t.repeat(2), r"NAME' has shape \[2, 1\]"),
    ("fp8 static", "input_scale", None, "lacks .*NAME"),
    ("fp8 static", "input_scale", lambda t: t.repeat(3), r"NAME' has shape \[3\]"),
    ("int8 packed", "weight_packed", lambda t: t.flatten(), "NAME' has shape"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "damage", "says"), BAD_TENSORS)
def test_a_bad_tensor_is_named(
    kind: str, name: str, damage: Callable[[torch.Tensor], torch.Tensor] | None, says: str, tmp_path: Path
) -> None:
    coded, _ = write_quantized(source(kind, num_hidden_layers=1), tmp_path, *KINDS[kind])
    tensors, full = load_file(coded / "model.safetensors"), f"model.layers.0.mlp.down_proj.{name}"
    good = tensors.pop(full)
    if damage is not None:
        tensors[full] = damage(good).contiguous()
    save_file(tensors, coded / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=says.replace("NAME", full.replace(".", r"\."))):
        Driver(coded)


IN_WHOLE = "weights share a scale, where whole numbers of at least 1 are needed"
UNREADABLE: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "quip"}, "quantized by 'quip'.*not supported: the known ones are fp8, .*compressed-tensors"),
    ({"bits": 4}, "quantized by None"),
    ({"quant_method": "fp8", "activation_scheme": "odd"}, "activation_scheme 'odd' is not supported"),
    *(({"quant_method": "fp8", "weight_block_size": b}, IN_WHOLE) for b in ([0, 128], [-128, 128], ["128", "128"], [128.0, 128])),
    ({"quant_method": "fp8", "modules_to_not_convert": ["re:["]}, "quantization_config in config.json: .*unterminated"),
    ({"quant_method": "fp8", "modules_to_not_convert": [3]}, "cannot read the quantization_config"),
    *((GPTQ | {"bits": n}, f"gptq with {n} bits is not supported: with 4 it is") for n in (3, 8)),
    *((GPTQ | {"group_size": n}, f"1 x {n!r} {IN_WHOLE}") for n in ("128", -32)),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, "GPTQ checkpoints with dynamic are not"),
    (quantized.AWQ | {"version": "gemv"}, "AWQ's version 'gemv'"),
    *((compressed(4, "int", "pack-quantized", "group", group_size=n), IN_WHOLE) for n in (0, -32, 128.0, "128", True)),
    (compressed(4, "int", "pack-quantized", "group", group_size=32, actorder="group"), "whose actorder is not 'group'"),
    (compressed(5, "int", "pack-quantized", "group", group_size=32), "int5 pack-quantized are not supported"),
    (compressed(8, "int", "int-quantized", "attn_head"), "strategy 'attn_head'"),
    (compressed(8, "int", "int-quantized", "channel", symmetric=False), "asymmetric int8"),
    (INT8_CHANNELS | {"config_groups": []}, "quantization_config"),
    (INT8_CHANNELS | {"format": "marlin-24"}, "int8 marlin-24 are not"),
]  # fmt: skip


class TestWhatACheckpointSays:
    def linear_method_of(self, said: Any, name: str) -> Any:
        config = AutoConfig.from_pretrained(tiny_checkpoint("qwen3"))
        config.quantization_config = said
        packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        linear_method_of = CheckpointQuantization().linear_methods_of(config, packed, {})
        assert linear_method_of is not None
        return linear_method_of(name)

    def test_by_name(self) -> None:
        qkv, down, alone = (
            "model.layers.0.self_attn.qkv_proj",
            "mlp.down_proj",
            Fp8(replace(FP8, scales="weight_scale_inv"), BLOCK),
        )
        assert self.linear_method_of(FP8_BLOCKS, qkv) == replace(alone, rounds=True)
        assert self.linear_method_of(FP8_BLOCKS | {"activation_scheme": None}, qkv) == alone
        int8 = linear_method.Quantized(INT8)
        assert self.linear_method_of(INT8_CHANNELS, f"model.layers.0.{down}") == int8
        said = FP8_BLOCKS | {"modules_to_not_convert": ["model.layers.1", "down_proj"]}
        assert self.linear_method_of(said, f"model.layers.0.{down}") is None
        assert self.linear_method_of(said, "model.layers.1.mlp.gate_up_proj") is None
        assert self.linear_method_of(said, "model.layers.10.mlp.gate_up_proj") is not None
        said = compressed(8, "int", "int-quantized", "channel", ("lm_head", "re:.*layers\\.0\\.mlp"))
        assert [self.linear_method_of(said, f"model.layers.{i}.{down}") for i in (0, 1)] == [None, int8]

    @pytest.mark.parametrize(("said", "says"), UNREADABLE)
    def test_what_is_unknown_is_refused_by_its_name(self, said: dict[str, Any], says: str) -> None:
        with pytest.raises(ValueError, match=says):
            self.linear_method_of(said, "model.layers.0.mlp.down_proj")

    def test_what_is_merged_here_must_be_of_one_kind(self) -> None:
        said = compressed(8, "int", "int-quantized", "channel", ("re:.*k_proj",))
        with pytest.raises(ValueError, match=r"q_proj, k_proj, v_proj of model.layers.0.self_attn are one layer"):
            self.linear_method_of(said, "model.layers.0.self_attn.qkv_proj")


@pytest.mark.parametrize(
    ("kind", "ranks", "fields", "says"),
    [
        ("fp8 blocks", 2, {"weight_block_size": [128, 128]}, "cannot share self_attn.q_proj: .* whole blocks of 128 x 128"),
        *(("gptq", 1, {"group_size": n}, f"groups of {n} of 64 inputs are not supported") for n in (24, 48)),
        ("gptq sorted", 2, {}, r"cannot share self_attn.q_proj: its inputs are sorted \(desc_act\)"),
        ("gptq", 2, {}, r"cannot share mlp.down_proj: a rank's part \[64, 48\] would not hold whole blocks of 8 x 32"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(
    kind: str, ranks: int, fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """Before a weight is read."""
    coded, _ = write_quantized(source(kind), tmp_path, KINDS[kind][0], KINDS[kind][1] | fields)
    (coded / "model.safetensors").write_bytes(bytes(10**6))
    with pytest.raises(ValueError, match=says):
        load_native_model(set_up(EngineConfig(model=str(coded), device="cpu", tensor_parallel_size=ranks)))


def test_a_checkpoint_must_agree_with_what_is_asked_for(tmp_path: Path) -> None:
    coded, floats = map(str, write_quantized(tiny_checkpoint("qwen3"), tmp_path, *KINDS["fp8 blocks"]))

    def said(**fields: Any) -> Any:
        return set_up(EngineConfig(device="cpu", **fields)).hf_config.quantization_config

    assert said(model=coded, quantization="fp8")["quant_method"] == "fp8"
    assert said(model=floats, quantization="fp8")["online"]
    for fields, says in (
        ({"model": coded, "quantization": "awq"}, "'awq' was asked for, and this checkpoint is quantized by 'fp8'"),
        ({"model": floats, "quantization": "fp8", "milestone": "m1"}, 'a checkpoint in 16 bits needs model_impl="native"'),
        ({"model": floats, "quantization": "awq"}, "'awq' was asked for, and this checkpoint is not quantized"),
        ({"model": floats, "random_weights": True, "quantization": "q"}, "'q' cannot be made up: choose one of fp8, int8"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            said(**fields)


def test_some_layers_stay_plain(tmp_path: Path) -> None:
    """A part of a layer may, and each name counts for itself."""
    unquantized = ("lm_head", "re:.*layers.1.self_attn.*", "model.layers.2.mlp.down_proj")
    config = compressed(8, "float", "float-quantized", "channel", unquantized)
    plain = ("layers.1.self_attn", "layers.2.mlp.down_proj")
    coded, floats = write_quantized(
        tiny_checkpoint("qwen3"), tmp_path, quantize_8(E4M3, "weight_scale", None), config, plain
    )
    ours = Driver(coded)
    assert_same(ours, Driver(floats), {0: [5, 9, 3]})
    layers: Any = ours.model.model.layers
    assert layers[1].self_attn.qkv_proj.weight.dtype == layers[2].mlp.down_proj.weight.dtype == torch.float32
    assert layers[1].mlp.gate_up_proj.weight.dtype == layers[2].mlp.gate_up_proj.weight.dtype == E4M3


@pytest.mark.parametrize("said", [False, None])
def test_an_order_that_the_config_does_not_speak_of(said: bool | None, tmp_path: Path) -> None:
    """Read as if inputs came in order, it would answer nonsense; the sentence tells what to do, and that works."""
    coded, floats = write_quantized(
        tiny(), tmp_path, quantized.quantize(quantized.to_sorted_gptq), GPTQ | {"desc_act": said}
    )
    with pytest.raises(ValueError, match=r'proj.g_idx.* set "desc_act": true in the quantization_config'):
        Driver(coded)
    file = coded / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": SORTED}))
    assert_logits_equal(Driver(coded).step({0: [5, 9]})[0], Driver(floats).step({0: [5, 9]})[0])


def test_biases_of_zeros_are_passed_over(tmp_path: Path) -> None:
    """Some GPTQ checkpoints have one for every layer. One that is not zero is a weight like others."""
    coded, _ = write_quantized(tiny(), tmp_path, *KINDS["gptq"])
    tensors, expected = load_file(coded / "model.safetensors"), Driver(coded).step({0: [5, 9]})[0]
    tensors["model.layers.0.mlp.down_proj.bias"] = bias = torch.zeros(64)
    save_file(tensors, coded / "model.safetensors")
    assert torch.equal(Driver(coded).step({0: [5, 9]})[0], expected)
    bias[3] = 1
    save_file(tensors, coded / "model.safetensors")
    with pytest.raises(ValueError, match=r"down_proj.bias', for which the model has no place"):
        Driver(coded)


@pytest.mark.parametrize("kind", ["gptq", "packed rows"])
def test_torch_multiplies_in_16_bits_on_cpu(kind: str, tmp_path: Path) -> None:
    """Its scales are rounded as weights would be: as far from the truth as the same numbers in 16 bits."""
    coded, floats = write_quantized(tiny(), tmp_path, *KINDS[kind])
    tokens = prompts([20])[0]
    ours = Driver(coded, dtype=torch.bfloat16)
    assert any(m.quantized.library for m in ours.model.modules() if isinstance(m, LinearBase))
    logits = [driver.step({0: tokens})[0] for driver in (ours, Driver(floats, dtype=torch.bfloat16), Driver(floats))]
    assert_as_accurate(*logits)


@pytest.mark.parametrize("kind", ["qweight", "qzeros", "scales"])
def test_codes_are_put_in_order_on_the_device_of_the_model(kind: str) -> None:
    """On a GPU it is nothing; on the CPU beside it, a minute of a large model."""
    parts = quantized.to_awq(*(torch.zeros(16, n, dtype=torch.uint8) for n in (64, 2, 2)))
    view = torch.empty(16, 64 // {"qweight": 8}.get(kind, 32), device="meta")
    assert repacked(f"layer.{kind}", parts[kind], Int4(AWQ, (1, GROUP)), view).device.type == "meta"


def test_what_was_folded_into_earlier_weights_is_forgotten(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux only")
    from folovllm.models.fused_layer import skinny_layers

    source = tiny_checkpoint("qwen3", num_hidden_layers=1, **ALIGNED)
    driver = Driver(write_quantized(source, tmp_path, *FP8_WIDE)[0], layers=skinny_layers(16))
    state = driver.model.model.layers[0].self_attn.qkv_proj.quantized  # type: ignore[union-attr]
    before = state.columns.clone()
    assert before.std() > 0.1
    load_model(driver.model, tmp_path / "coded", use_tqdm=False)
    assert torch.equal(state.columns, before)


def test_codes_that_nothing_speaks_of(tmp_path: Path) -> None:
    coded, _ = write_quantized(tiny_checkpoint("qwen3"), tmp_path, KINDS["fp8 blocks"][0], None)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"stored as float8_e4m3fn: quantized weights that config.json does not speak of"
    ):
        Driver(coded)
