"""Files from strangers: whatever is damaged, a model works or is refused in a sentence."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from folovllm import LLM
from folovllm.models.files import UnreadableFile, reading
from tests.fuzz_files import FORMATS, fuzz
from tests.helpers import tiny_checkpoint
from tests.x2.quantized import BYTE_KINDS as KINDS
from tests.x2.quantized import tiny, write_quantized

NORM = "model.layers.2.self_attn.q_norm.weight"


@pytest.mark.parametrize("sample", [range(15), pytest.param(range(15, 40), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_at_random(name: str, sample: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLOVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gc, "collect", lambda *_: 0)  # an engine collects as it starts, which takes half a second
    results = list(fuzz(name, sample, tmp_path))
    assert not [result for result in results if result[2].startswith("FAILED")]
    assert any(result == "works" for *_, result in results), "nothing works, so that something else is wrong"


class PanicException(BaseException):
    """What a library in Rust raises when it panics."""


@pytest.mark.parametrize(
    "error", [KeyError("x"), PanicException("x"), UnicodeDecodeError("utf-8", b"", 0, 1, "x"), OSError(5, "x")]
)
def test_a_fault_of_the_file_is_one_sentence_with_its_cause(error: BaseException) -> None:
    with pytest.raises(UnreadableFile, match=r"^cannot read a/b: some\.key: .*x") as caught, reading("a/b", "some.key"):
        raise error
    assert caught.value.__cause__ is error and "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), NotImplementedError("m1.8: write it")])
def test_what_is_no_fault_of_the_file_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, reading("a/b"):
        raise error
    assert caught.value is error


def test_a_sentence_holds_no_control_codes() -> None:
    """A name in the file would reach the terminal."""
    with pytest.raises(UnreadableFile) as caught, reading("a/b", "x\x1b[2J"):
        raise ValueError("half \ud800,\nanother line")
    assert str(caught.value) == r"cannot read a/b: x\x1b[2J: half \ud800, another line"


def test_the_innermost_sentence_is_kept() -> None:
    with pytest.raises(UnreadableFile, match=r"^cannot read inner: KeyError: 'x'$"), reading("outer"), reading("inner"):
        raise KeyError("x")


@pytest.mark.parametrize("model_impl", ["hf", "native"])
@pytest.mark.parametrize("kind", ["fp8 blocks", "fp8 tensor", "fp8 channel"])
def test_fp8_without_scales(kind: str, model_impl: str, tmp_path: Path) -> None:
    """M1 multiplied by codes, or ended in torch's word about dtypes."""
    coded, _ = write_quantized(tiny_checkpoint("llama"), tmp_path, *KINDS[kind])
    tensors = {name: t for name, t in load_file(coded / "model.safetensors").items() if "scale" not in name}
    save_file(tensors, coded / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks .*scale"):
        LLM(str(coded), milestone="m1", model_impl=model_impl, device="cpu", use_tqdm=False)


def test_a_norm_in_fp8(tmp_path: Path) -> None:
    """No scale belongs to it, and transformers' models end within a step."""
    coded, _ = write_quantized(tiny(), tmp_path, *KINDS["fp8 blocks"])
    tensors = load_file(coded / "model.safetensors")
    tensors[NORM] = tensors[NORM].to(torch.float8_e4m3fn)
    save_file(tensors, coded / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks the scale of '{NORM}'"):
        LLM(str(coded), milestone="m1", model_impl="hf", device="cpu", use_tqdm=False)
