"""Weights of 4 bits: three layouts of checkpoints that hold the same numbers, and engines on top of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from folovllm.electives.quantization.int4_checkpoints import Awq
from folovllm.layers.linear import LinearBase
from folovllm.models.extra_tensors import repacked
from tests.helpers import Driver, assert_as_accurate, assert_logits_equal, prompts
from tests.x2.quantized import GPTQ, GROUP, SORTED, Tensors, quantize, tiny, to_awq, to_sorted_gptq, write_quantized
from tests.x2.quantized import INT4_KINDS as KINDS


def test_no_layout_is_read_as_another(tmp_path: Path) -> None:
    """The layouts have the same codes: what comes out is bit for bit the same."""
    logits = []
    for kind in ("gptq", "gptq v2", "awq", "packed"):
        coded, _ = write_quantized(tiny(), tmp_path / kind, *KINDS[kind])
        logits.append(Driver(coded).step({0: prompts([9])[0]})[0])
    assert all(torch.equal(one, logits[0]) for one in logits)


@pytest.mark.parametrize("said", [False, None])
def test_an_order_that_the_config_does_not_speak_of(said: bool | None, tmp_path: Path) -> None:
    """Read as if inputs came in order, it would answer nonsense; the sentence tells what to do, and that works."""
    coded, floats = write_quantized(tiny(), tmp_path, quantize(to_sorted_gptq), GPTQ | {"desc_act": said})
    with pytest.raises(ValueError, match=r'proj.g_idx.* set "desc_act": true in the quantization_config'):
        Driver(coded)
    file = coded / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": SORTED}))
    assert_logits_equal(Driver(coded).step({0: [5, 9]})[0], Driver(floats).step({0: [5, 9]})[0])


@pytest.mark.parametrize("left", ["zeros", "nothing"])
def test_groups_that_are_not_numbered(left: str, tmp_path: Path) -> None:
    """Some writers leave zeros in `g_idx`, others leave it out: inputs come in order then."""

    def unnumbered(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        parts, floats = KINDS["gptq"][0](weight)
        groups = parts.pop("g_idx")
        return parts | ({"g_idx": torch.zeros_like(groups)} if left == "zeros" else {}), floats

    coded, floats = write_quantized(tiny(), tmp_path, unnumbered, GPTQ)
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
    assert any(m.int4.library for m in ours.model.modules() if isinstance(m, LinearBase))
    logits = [driver.step({0: tokens})[0] for driver in (ours, Driver(floats, dtype=torch.bfloat16), Driver(floats))]
    assert_as_accurate(*logits)


@pytest.mark.parametrize("kind", ["qweight", "qzeros", "scales"])
def test_codes_are_put_in_order_on_the_device_of_the_model(kind: str) -> None:
    """On a GPU it is nothing; on the CPU beside it, a minute of a large model."""
    parts = to_awq(*(torch.zeros(16, n, dtype=torch.uint8) for n in (64, 2, 2)))
    view = torch.empty(16, 64 // {"qweight": 8}.get(kind, 32), device="meta")
    assert repacked(f"layer.{kind}", parts[kind], Awq(GROUP), view).device.type == "meta"
