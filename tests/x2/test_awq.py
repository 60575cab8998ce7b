"""AWQ: its search by hand, its clipping, and that scales which are folded in change no output."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from folovllm.electives.quantization.quantizer.awq import output_error, search_clip, search_scale
from folovllm.electives.quantization.quantizer.groups import round_groups
from folovllm.electives.quantization.quantizer.methods import divide_norm, fold_scales
from folovllm.electives.quantization.quantizer.one_layer import OneLayer
from tests.helpers import tiny_checkpoint
from tests.tiny import worked_case


def coarse(w: torch.Tensor) -> torch.Tensor:
    """Whole numbers."""
    return w.round()


class TestSearchScale:
    def test_a_worked_case(self) -> None:
        """Weights are rounded to whole numbers."""
        w, gram = torch.tensor([[0.5, 4.0]]), torch.tensor([[256.0, 0.0], [0.0, 1.0]])
        scale = search_scale(w, gram, torch.tensor([16.0, 1.0]), coarse)
        says = (
            "16^a and 1^a, divided by the root of their product, are 4^a and 4^-a. With a = 1/2, which is one of the 20 steps, "
            "0.5 * 2 and 4 / 2 are whole numbers, and nothing is lost; with no other step both are"
        )
        worked_case("x2.6", scale, [2.0, 0.5], says)

    def test_twenty_scalings_are_tried(self) -> None:
        tried = set()

        def rounding(w: torch.Tensor) -> torch.Tensor:
            tried.add(round(float((w[0, 0] / w[0, 1]).log2()) * 5))  # 16^a is 2^(4 a)
            return w.round()

        search_scale(torch.ones(1, 2), torch.eye(2), torch.tensor([16.0, 1.0]), rounding)
        assert tried == set(range(20)), f"a of 0, 0.05, ... 0.95, and not {sorted(a / 20 for a in tried)}"

    def test_never_worse_than_no_scaling(self) -> None:
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            w, x = torch.randn(16, 32, generator=generator), torch.randn(100, 32, generator=generator)
            x *= torch.rand(32, generator=generator) ** 4 * 20
            gram, magnitude = x.t() @ x / 100, x.abs().mean(0)

            def rounding(w: torch.Tensor) -> torch.Tensor:
                return round_groups(w, 4, 16)

            scale = search_scale(w, gram, magnitude, rounding)
            plain = output_error(rounding(w) - w, gram).sum()
            scaled = output_error(rounding(w * scale) / scale - w, gram).sum()
            assert scaled < 0.8 * plain, (
                f"outputs are off by {scaled:.3g}, without scales by {plain:.3g}: what counts is rounding(w s) / s - w, by gram"
            )

    def test_all_outputs_count(self) -> None:
        """Of the twenty scalings none has a smaller error, summed over the outputs."""
        generator = torch.Generator().manual_seed(1)
        w, x = torch.randn(8, 4, generator=generator) * 2, torch.randn(50, 4, generator=generator)
        gram, magnitude = x.t() @ x / 50, torch.tensor([9.0, 1.0, 4.0, 2.0])

        def error(scale: torch.Tensor) -> float:
            return float(output_error(coarse(w * scale) / scale - w, gram).sum())

        least = min(error(magnitude ** (step / 20) / 9 ** (step / 40)) for step in range(20))
        found = error(search_scale(w, gram, magnitude, coarse))
        assert found <= least * 1.001, f"the outputs are off by {found:.3g} in all; another scaling has {least:.3g}"

    def test_inputs_alike_need_no_scale(self) -> None:
        w = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
        scale = search_scale(w, torch.eye(8), torch.full((8,), 3.0), coarse)
        assert torch.allclose(scale, torch.ones(8)), "scales are relative: 3 everywhere is 1 everywhere"

    def test_an_input_that_never_occurs(self) -> None:
        """The others are scaled all the same."""
        w, gram = torch.randn(32, 3, generator=torch.Generator().manual_seed(0)), torch.diag(torch.tensor([64.0, 1, 0]))
        magnitude = torch.tensor([8.0, 1.0, 0.0])
        scale = search_scale(w, gram, magnitude, coarse)
        assert magnitude.tolist() == [8.0, 1.0, 0.0], "`magnitude` has been changed: raise a copy"
        assert scale.isfinite().all() and (scale > 0).all(), "something is divided by each scale"
        assert scale.shape == (3,) and scale.dtype == torch.float32, (
            f"[inputs] float32, not {scale.shape} {scale.dtype}"
        )
        powers = [torch.tensor([8.0, 1.0, 1e-4]) ** (step / 20) for step in range(20)]
        assert any(torch.allclose(scale, s / (s.min() * s.max()).sqrt(), rtol=1e-3) for s in powers), (
            f"the input that never occurs counts as 1e-4: no power of 8, 1 and 1e-4 is {scale.tolist()}, times any number"
        )
        plain, scaled = (output_error(coarse(w * s) / s - w, gram).sum() for s in (torch.ones(3), scale))
        assert scaled < 0.5 * plain, "one dead input has kept all others from being scaled"


def test_an_error_of_outputs_needs_no_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    error, x = torch.randn(5, 8, generator=generator), torch.randn(50, 8, generator=generator)
    assert torch.allclose(output_error(error, x.t() @ x / 50), (x @ error.t()).square().mean(0), rtol=1e-4)


def test_clipping_gives_up_one_weight_for_all_others() -> None:
    w = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)) * 0.1
    w[0, 5] = 0.6
    clipped = search_clip(w, torch.eye(64), 4, 32)
    assert clipped[0, 5] < 0.6 and torch.equal(clipped[0, 32:] == w[0, 32:], clipped[0, 32:] == w[0, 32:])
    for group in (slice(0, 32), slice(32, 64)):
        before, after = ((round_groups(x, 4, 32) - w)[:, group].square().sum(1) for x in (w, clipped))
        assert (after <= before).all()
    heavy = torch.eye(64)
    heavy[5, 5] = 1e4
    assert search_clip(w, heavy, 4, 32)[0, 5] == w[0, 5], "its input is so large that it must stay"


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_folding_changes_weights_and_no_outputs(family: str) -> None:
    """Norms, biases and the layer before make up for it; also where K and V belong to each query head alone."""
    for kv_heads in (2, 4):
        path = tiny_checkpoint(family, hidden_size=64, intermediate_size=96, num_kv_heads=kv_heads, head_dim=16)
        layer, prefix = OneLayer(AutoConfig.from_pretrained(path), torch.device("cpu"), 12), "model.layers.0."
        stored = load_file(path / "model.safetensors")
        layer.load({name.removeprefix(prefix): t for name, t in stored.items() if name.startswith(prefix)})
        x = torch.randn(3, 12, 64, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 4, 64)
        before, inputs = layer.run(x), layer.inputs(x)
        weights = {name: linear.weight.clone() for name, linear in layer.linears.items()}
        fold_scales(layer, inputs, 4, 32, torch.float32)
        unchanged = {name for name, linear in layer.linears.items() if torch.equal(linear.weight, weights[name])}
        assert unchanged == ({"self_attn.o_proj"} if kv_heads == 2 else set())
        assert torch.allclose(layer.run(x), before, atol=1e-4 * float(before.abs().max()))
        for name, now in layer.inputs(x).items():
            assert torch.allclose(now.gram, inputs[name].gram, rtol=1e-3, atol=1e-4), (
                f"{name}: inputs were not divided along"
            )


def test_a_rounded_norm_is_made_up_for() -> None:
    weight, scale = torch.tensor([1.0, 3.0, 0.0]), torch.tensor([1.1, 0.7, 2.0])
    before = weight.clone()
    real = divide_norm(weight, scale, torch.bfloat16)
    assert torch.equal(weight, weight.bfloat16().float()) and torch.allclose(weight * real, before)
    assert torch.allclose(real, scale, rtol=1e-2) and not torch.equal(real[:2], scale[:2])
