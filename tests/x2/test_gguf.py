"""GGUF files whose blocks stay codes."""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFEndian, GGUFWriter, RopeScalingType, dequantize, quantize

from folovllm import EngineConfig
from folovllm.apps.cli import main
from folovllm.electives.quantization.gguf_file import convert
from folovllm.electives.quantization.gguf_weights import TYPES
from folovllm.electives.quantization.weight import QuantizedWeight
from folovllm.engine.setup import set_up
from folovllm.layers.linear import LinearBase
from folovllm.models.files import resolve_model
from tests.helpers import Driver, assert_logits_equal, prompts
from tests.project.test_download import HEADS, KV_HEADS, finish, in_pairs, llama_writer

HIDDEN, INNER = 64, 96


def blocks(kind: str, outputs: int, count: int) -> np.ndarray:
    """Random bytes, with scales that are numbers."""
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    found = np.random.default_rng(0).integers(0, 256, (outputs, count, size), dtype=np.uint8)
    scales = np.full((outputs, count, 2), 0.37, np.float16).view(np.uint8)
    places = {"Q6_K": (208,), "Q4_1": (0, 2), "Q4_K": (0, 2)}.get(kind, (0,))
    for place in places:
        found[..., place : place + 2] = scales[..., :2]
    return found


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_are_what_their_library_says(kind: str) -> None:
    raw = blocks(kind, 3, 2)
    expected = torch.tensor(dequantize(raw.reshape(3, -1), GGMLQuantizationType[kind]))
    parts = TYPES[kind][1](torch.tensor(raw))
    if "words" in parts:
        weight = QuantizedWeight(parts["words"], parts["scales"], 1, 32, parts.get("zeros"))
        got = weight.dequantized(torch.float32)
    else:
        scales = parts["weight_scale"]
        got = parts["weight"].float() * scales.repeat_interleave(expected.shape[1] // scales.shape[1], 1)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def write_gguf(
    path: Path, types: dict[str, str], change: Callable[[GGUFWriter], object] = lambda writer: None, seed: int = 0
) -> None:
    """A random Llama whose projections are quantized: by the last part of their names. `change` adds or removes something."""
    writer = llama_writer(path, HIDDEN, INNER)
    generator = torch.Generator().manual_seed(seed)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
              "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}  # fmt: skip
    for layer in range(2):
        for name, shape in shapes.items():
            weight = in_pairs(f"{name}.weight", torch.randn(shape, generator=generator) * 0.3).numpy()
            kind = GGMLQuantizationType[types.get(name, "F32")]
            writer.add_tensor(f"blk.{layer}.{name}.weight", quantize(weight, kind), raw_dtype=kind)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", torch.rand(HIDDEN, generator=generator).numpy())
    embedding = (torch.randn(300, HIDDEN, generator=generator) * 0.3).numpy()
    writer.add_tensor(
        "token_embd.weight", quantize(embedding, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("output_norm.weight", torch.rand(HIDDEN, generator=generator).numpy())
    change(writer)
    finish(writer)


def test_a_file_in_codes_answers_as_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named as a model, in codes of three types; unpacked, rounded to 16 bits, it is as near as these are."""
    monkeypatch.setenv("FOLOVLLM_CACHE", str(tmp_path / "cache"))
    same = dict.fromkeys(("attn_q", "attn_k", "attn_v"), "Q4_1")
    write_gguf(
        tmp_path / "tiny.gguf", same | {"attn_output": "Q8_0", "ffn_gate": "Q4_0", "ffn_up": "Q8_0", "ffn_down": "Q4_0"}
    )
    folder = resolve_model(str(tmp_path / "tiny.gguf"))
    assert resolve_model(str(tmp_path / "tiny.gguf")) == folder, "made once"
    with pytest.raises(ValueError, match="which M1 runs, cannot keep a GGUF file's codes"):
        set_up(EngineConfig(model=str(tmp_path / "tiny.gguf"), milestone="m1", device="cpu"))
    convert(tmp_path / "tiny.gguf", tmp_path / "unpacked")
    coded, plain = Driver(folder), Driver(tmp_path / "unpacked")
    tokens = prompts([12])[0]
    expected = plain.step({0: tokens})[0]
    assert_logits_equal(coded.step({0: tokens})[0], expected, 0.02 * float(expected.abs().max()))
    layer = coded.model.model.layers[1]
    dtypes = {name: m.weight.dtype for name, m in layer.named_modules() if isinstance(m, LinearBase)}  # type: ignore[union-attr]
    assert dtypes == {
        "self_attn.qkv_proj": torch.int32, "self_attn.o_proj": torch.int8, "mlp.gate_up_proj": torch.float32, "mlp.down_proj": torch.int32,
    }, "gate and up are of two types, so they are unpacked"  # fmt: skip


OPTIONAL = (
    "tokenizer.chat_template", "tokenizer.ggml.padding_token_id", "tokenizer.ggml.unknown_token_id",
    "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.token_type", "llama.rope.freq_base",
)  # fmt: skip


def test_a_base_model_has_neither_chat_template_nor_special_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It answers, and a conversation with it is refused in a sentence."""
    monkeypatch.setenv("FOLOVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FOLOVLLM_MINE", raising=False)
    write_gguf(tmp_path / "base.gguf", {}, lambda writer: [writer.kv_data[0].pop(key) for key in OPTIONAL])
    model = ["--model", str(tmp_path / "base.gguf"), "--device", "cpu", "--max-tokens", "4"]
    with pytest.raises(SystemExit) as end:
        main(["generate", "Hello", "--json", *model])
    assert end.value.code == 0 and '"Hello' in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    with pytest.raises(SystemExit):
        main(["chat", *model])
    assert "no chat template" in "".join(capsys.readouterr())


def test_what_is_no_llama_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 49 bytes that count 2^40 items, too: the library alone would read them for ever."""
    monkeypatch.setenv("FOLOVLLM_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "a.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"x"
    for content, says in (
        (b"GGUF" + bytes(100), "version 0 which we cannot handle"),
        *((head + struct.pack("<IIQ", 9, kind, 2**40), "the file ends") for kind in (0, 4, 8)),
        (GGUFWriter(file, "llama", endianess=GGUFEndian.BIG), "its numbers are big-endian"),
        (GGUFWriter(file, "mamba"), "architecture 'mamba' .* those of architecture 'llama'"),
    ):
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            finish(content)
        with pytest.raises(ValueError, match=f"cannot read .*a.gguf: .*{says}"):
            resolve_model(str(file))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


STRANGE: list[tuple[str, Callable[[GGUFWriter], object], str]] = [
    ("no sizes", lambda w: w.kv_data[0].pop("llama.block_count"), "llama.block_count is None, and must be"),
    ("a text for a size", lambda w: w.kv_data[0].pop("llama.block_count") and w.add_string("llama.block_count", "x"),
     "llama.block_count is 'x', and must be a whole number"),
    ("an unknown tensor", lambda w: w.add_tensor("blk.0.ffn_gate_inp.weight", np.ones(4, np.float32)),
     "blk.0.ffn_gate_inp.weight, which is not supported"),
    ("a bias", lambda w: w.add_tensor("blk.1.attn_q.bias", np.ones(HIDDEN, np.float32)), "blk.1.attn_q.bias, which is not supported"),
    ("a part of a head", lambda w: w.add_rope_dimension_count(8), "rope.dimension_count is 8, and only whole heads"),
    ("scaled RoPE", lambda w: w.add_rope_scaling_type(RopeScalingType.YARN), "rope.scaling.type 'yarn' is not supported"),
    ("RoPE of Llama 3", lambda w: w.add_tensor("rope_freqs.weight", np.ones(8, np.float32)), "rope_freqs.weight, which is not"),
    ("a number for a template", lambda w: w.kv_data[0].pop("tokenizer.chat_template") and w.add_uint32("tokenizer.chat_template", 5),
     "tokenizer.chat_template must be a text"),
    ("an id beyond", lambda w: w.kv_data[0].pop("tokenizer.ggml.eos_token_id") and w.add_eos_token_id(999),
     "IndexError"),
    ("types for half of the tokens", lambda w: w.kv_data[0].pop("tokenizer.ggml.token_type") and w.add_token_types([1]), "shorter than"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), [s[1:] for s in STRANGE], ids=[s[0] for s in STRANGE])
def test_what_is_wrong_is_named(
    change: Callable[[GGUFWriter], object], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOLOVLLM_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "a.gguf", {}, change)
    with pytest.raises(ValueError, match=f"cannot read .*a.gguf: .*{says}"):
        resolve_model(str(tmp_path / "a.gguf"))
    assert not list((tmp_path / "cache" / "gguf").iterdir()), "something was left behind"
