"""GGUF files whose blocks stay codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, dequantize, quantize

from folovllm import EngineConfig
from folovllm.engine.setup import set_up
from folovllm.layers.formats.grouped import Grouped
from folovllm.layers.linear import LinearBase
from folovllm.models.files import resolve_model
from folovllm.models.gguf_codes import TYPES
from folovllm.models.gguf_file import convert
from tests.helpers import Driver, assert_logits_equal, prompts
from tests.m1.test_download import _add_tokenizer, _pairs

HIDDEN, INNER, HEADS, KV_HEADS = 64, 96, 4, 2


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
    parts = TYPES[kind].split(torch.tensor(raw))
    if "words" in parts:
        got = Grouped(parts["words"], parts["scales"], parts.get("zeros")).dequantized(torch.float32)
    else:
        scales = parts["weight_scale"]
        got = parts["weight"].float() * scales.repeat_interleave(expected.shape[1] // scales.shape[1], 1)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def write_gguf(path: Path, types: dict[str, str]) -> None:
    """A random Llama whose projections are quantized: by the last part of their names."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(500.0)
    writer.add_layer_norm_rms_eps(1e-6)
    _add_tokenizer(writer)
    generator = torch.Generator().manual_seed(0)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
              "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}  # fmt: skip
    for layer in range(2):
        for name, shape in shapes.items():
            weight = _pairs(f"{name}.weight", torch.randn(shape, generator=generator) * 0.3).numpy()
            kind = GGMLQuantizationType[types.get(name, "F32")]
            writer.add_tensor(f"blk.{layer}.{name}.weight", quantize(weight, kind), raw_dtype=kind)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", torch.rand(HIDDEN, generator=generator).numpy())
    embedding = (torch.randn(300, HIDDEN, generator=generator) * 0.3).numpy()
    writer.add_tensor(
        "token_embd.weight", quantize(embedding, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("output_norm.weight", torch.rand(HIDDEN, generator=generator).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    kinds = {name: type(m.format).__name__ for name, m in layer.named_modules() if isinstance(m, LinearBase)}  # type: ignore[union-attr]
    assert kinds == {
        "self_attn.qkv_proj": "Int4", "self_attn.o_proj": "Int8", "mlp.gate_up_proj": "Plain", "mlp.down_proj": "Int4",
    }, "gate and up are of two types, so they are unpacked"  # fmt: skip


def test_what_is_not_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLOVLLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ValueError, match=r"cannot read .*damaged.gguf: it is not a GGUF file, or damaged"):
        resolve_model(str(tmp_path / "damaged.gguf"))
    writer = GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"architecture 'mamba' .* those of architecture 'llama'"):
        resolve_model(str(tmp_path / "other.gguf"))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
