"""Quantized weights in place: after an update the engine is one that began with the new codes, bit by bit."""

from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from folovllm import LLM, EngineConfig, SamplingParams
from folovllm.electives.rollouts.sleep import tensors_of
from folovllm.electives.rollouts.weights import load_weights, readable
from folovllm.engine.build_packed import make_packed_worker
from folovllm.engine.setup import set_up
from tests.helpers import tiny_checkpoint
from tests.m6.ranks import ThreadGroup
from tests.x2.quantized import BYTE_KINDS, FP8_WIDE, INT4_KINDS, Quantize, tiny, write_quantized
from tests.x2.test_gguf import write_gguf
from tests.x6.test_weights import PROMPT, engine, shuffled

KINDS = BYTE_KINDS | INT4_KINDS
Kind = tuple[Quantize, dict[str, Any]]
RANKS: dict[str, Any] = {
    "device": "cpu", "max_model_len": 64, "num_kv_blocks": 8, "tensor_parallel_size": 2, "dtype": "bfloat16",
    "use_tqdm": False,
}  # fmt: skip


def scores(llm: LLM) -> list[float]:
    """Log-probabilities of a prompt's tokens, and of those that follow."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    (output,) = llm.generate([PROMPT[:20]], params, use_tqdm=False)
    answer = output.outputs[0]
    rows = [*output.prompt_logprobs[1:], *answer.logprobs]
    return [row[token].logprob for row, token in zip(rows, [*PROMPT[1:20], *answer.token_ids], strict=True)]


def two_checkpoints(kind: Kind, source: Path, folder: Path) -> tuple[Path, Path]:
    """Two of one geometry, quantized in one way."""
    (folder / "rows").mkdir()
    first, _ = write_quantized(source, folder / "first", *kind)
    other, _ = write_quantized(shuffled(source, folder / "rows"), folder / "other", *kind)
    return first, other


def assert_updated(first: Path, other: Path, **overrides: Any) -> None:
    """From a folder, and back from tensors."""
    with engine(other, **overrides) as llm:
        expected = scores(llm)
    with engine(first, **overrides) as llm:
        before = scores(llm)
        llm.update_weights(other)
        assert scores(llm) == expected != before
        llm.update_weights(load_file(first / "model.safetensors"))
        assert scores(llm) == before, "what was repacked for the other weights is left"


@pytest.mark.parametrize(("kind", "dtype"), [
    ("fp8 blocks", "float32"), ("fp8 tensor", "float32"), ("int8 packed", "float32"), ("gptq", "float32"), ("gptq sorted", "float32"),
    ("awq", "float32"), ("awq", "bfloat16"), ("packed symmetric", "float32"),
])  # fmt: skip
def test_packed_layers(kind: str, dtype: str, tmp_path: Path) -> None:
    """Queries, keys and values are one layer, gate and up another. In bfloat16 torch's own kernel has a layout of its own."""
    assert_updated(*two_checkpoints(KINDS[kind], tiny(), tmp_path), dtype=dtype)


@pytest.mark.parametrize("kind", [FP8_WIDE, KINDS["awq"]], ids=["fp8", "int4"])
def test_two_ranks_get_their_parts(kind: Kind, tmp_path: Path) -> None:
    """From a folder and from tensors each rank gets what a rank has that began with the new codes. To load, they need not talk."""
    source = tiny_checkpoint("qwen3", hidden_size=64, intermediate_size=128)
    first, other = two_checkpoints(kind, source, tmp_path)
    setups = [set_up(EngineConfig(model=str(path), **RANKS)) for path in (first, other)]
    engine: Any = SimpleNamespace(setup=setups[0])
    with readable(engine, load_file(first / "model.safetensors")) as folder:
        for rank in range(2):
            group = ThreadGroup(rank, [None, None], Barrier(2))
            worker, fresh = (make_packed_worker(setup, group)[0] for setup in setups)
            worker.load_model()
            fresh.load_model()
            before, expected = tensors(worker), tensors(fresh)
            load_weights(worker, other)
            assert all(map(torch.equal, tensors(worker), expected))
            assert not all(map(torch.equal, before, expected))
            load_weights(worker, folder)
            assert all(map(torch.equal, tensors(worker), before))


def tensors(worker: Any) -> list[torch.Tensor]:
    """Copies of all that a rank's model holds."""
    return [tensor.clone() for tensor in tensors_of(worker.runner.inner.model)]


def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named as a model is; its blocks stay codes."""
    monkeypatch.setenv("FOLOVLLM_CACHE", str(tmp_path / "cache"))
    types = dict.fromkeys(("attn_q", "attn_k", "attn_v"), "Q4_1") | {"attn_output": "Q8_0", "ffn_down": "Q4_0"}
    for seed, name in enumerate(("first", "other")):
        write_gguf(tmp_path / f"{name}.gguf", types, seed=seed)
    first, other = (str(tmp_path / f"{name}.gguf") for name in ("first", "other"))
    with engine(Path(other), max_model_len=64) as llm:
        expected = scores(llm)
    with engine(Path(first), max_model_len=64) as llm:
        assert scores(llm) != expected
        llm.update_weights(other)
        assert scores(llm) == expected


@pytest.mark.parametrize(("own", "given"), [("fp8 blocks", None), (None, "awq"), ("gptq", "gptq v2"), ("awq", "gptq")])
def test_other_codes_are_refused_before_anything_changes(own: str | None, given: str | None, tmp_path: Path) -> None:
    """GPTQ's two formats have tensors of the same names and shapes, and zeros that differ by one."""
    folders = []
    for kind, folder in ((own, tmp_path / "own"), (given, tmp_path / "given")):
        coded, floats = write_quantized(tiny(), folder, *KINDS[kind or "awq"])
        folders.append(floats if kind is None else coded)
    with engine(folders[0]) as llm:
        before = scores(llm)
        with pytest.raises(ValueError, match=r"not quantized as the engine's model is.*make a new engine for it"):
            llm.update_weights(folders[1])
        assert scores(llm) == before
        llm.sleep(2)
        with pytest.raises(ValueError, match="not quantized as the engine's model is"):
            llm.wake_up(folders[1])
        llm.wake_up()
        assert scores(llm) == before


def test_floats_for_codes_are_refused(tmp_path: Path) -> None:
    coded, floats = write_quantized(tiny(), tmp_path, *KINDS["fp8 blocks"])
    with engine(coded) as llm:
        before = scores(llm)
        with pytest.raises(ValueError, match="holds numbers of float32, and the model takes float8_e4m3fn"):
            llm.update_weights(load_file(floats / "model.safetensors"))
        assert scores(llm) == before


def test_zeros_that_hold_nothing_change_nothing(tmp_path: Path) -> None:
    """Their shape is known only when they are unpacked, which an empty tensor cannot be."""
    coded, _ = write_quantized(tiny(), tmp_path, *KINDS["packed"])
    weights = load_file(coded / "model.safetensors")
    name = next(name for name in weights if name.endswith("weight_zero_point"))
    with engine(coded) as llm:
        before = scores(llm)
        with pytest.raises(ValueError, match=r"weight_zero_point' has shape \[0, "):
            llm.update_weights(weights | {name: weights[name][:0]})
        assert scores(llm) == before
