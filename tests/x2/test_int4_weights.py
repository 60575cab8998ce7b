"""Weights of 4 bits: three layouts of checkpoints that hold the same numbers, and engines on top of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from folovllm import EngineConfig
from folovllm.engine.setup import set_up
from folovllm.layers.linear import LinearBase
from folovllm.models.loader import Place, arranged
from folovllm.quantization import int4, packing
from folovllm.quantization.int4 import Int4
from folovllm.quantization.int4_checkpoints import Awq, Gptq, PackedInt4
from folovllm.quantization.quantizer.groups import dequantize_groups, quantize_groups
from folovllm.worker.native_model import load_native_model
from tests.contract import DEVICE
from tests.helpers import Driver, assert_as_accurate, assert_logits_equal, hf_logits, prompts, tiny_checkpoint
from tests.workloads import Workload, answered, make_engine, mixed_requests, serve
from tests.x2.quantized import Quantize, Tensors, assert_ranks_hold_their_parts, compressed, write_quantized

GROUP = 32
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
PACKED = compressed(4, "int", "pack-quantized", "group", group_size=GROUP, symmetric=False)
SORTED = GPTQ | {"desc_act": True}


def tiny() -> Path:
    """Projections of 64 to 128 inputs, in groups of 32."""
    return tiny_checkpoint("qwen3", hidden_size=64, intermediate_size=96)


def to_gptq(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    groups = torch.arange(codes.shape[1], dtype=torch.int32) // (codes.shape[1] // scales.shape[1])
    return {
        "qweight": packing.pack_gptq(codes),
        "scales": scales.t(),
        "qzeros": packing.pack_gptq_zeros(zeros),
        "g_idx": groups,
    }


def to_gptq_v2(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    return to_gptq(codes, scales, zeros) | {"qzeros": packing.pack_words(zeros.t().contiguous())}


def to_sorted_gptq(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    """Inputs in an order of their own: column i of the checkpoint's W is column `order[i]` of what was quantized."""
    order = torch.randperm(codes.shape[1], generator=torch.Generator().manual_seed(1))
    parts = to_gptq(codes[:, order], scales, zeros)
    return parts | {"g_idx": parts["g_idx"][order]}


def to_awq(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    return {"qweight": packing.pack_awq(codes), "scales": scales.t(), "qzeros": packing.pack_awq(zeros)}


def to_packed(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    return {
        "weight_packed": packing.pack_words(codes), "weight_scale": scales, "weight_shape": torch.tensor(codes.shape),
        "weight_zero_point": packing.pack_words(zeros.t().contiguous()).t(),
    }  # fmt: skip


def to_packed_symmetric(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    return {kind: part for kind, part in to_packed(codes, scales, zeros).items() if kind != "weight_zero_point"}


def quantize(pack: Any, group_size: int | None = GROUP, symmetric: bool = False) -> Quantize:
    def one(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros = quantize_groups(weight.half(), 4, group_size or weight.shape[1], symmetric)
        floats = dequantize_groups(codes, scales.float(), zeros)
        if pack is to_sorted_gptq:
            floats = floats[:, torch.randperm(codes.shape[1], generator=torch.Generator().manual_seed(1))]
        return pack(codes, scales, zeros), floats

    return one


KINDS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "gptq": (quantize(to_gptq), GPTQ),
    "gptq symmetric": (quantize(to_gptq, symmetric=True), GPTQ | {"sym": True}),
    "gptq v2": (quantize(to_gptq_v2), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq sorted": (quantize(to_sorted_gptq), SORTED),
    "gptq rows": (quantize(to_gptq, None), SORTED | {"group_size": -1}),
    "awq": (quantize(to_awq), AWQ),
    "packed": (quantize(to_packed), PACKED),
    "packed symmetric": (
        quantize(to_packed_symmetric, symmetric=True), compressed(4, "int", "pack-quantized", "group", group_size=GROUP),
    ),
    "packed rows": (
        quantize(to_packed_symmetric, None, symmetric=True), compressed(4, "int", "pack-quantized", "channel"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_numbers_that_the_codes_stand_for(kind: str, tmp_path: Path) -> None:
    coded, floats = write_quantized(tiny(), tmp_path, *KINDS[kind])
    ours, plain = Driver(coded), Driver(floats)
    for pieces in ({0: prompts([20])[0]}, {0: [8], 1: [2, 5]}):
        expected = plain.step(pieces)
        for seq, logits in ours.step(pieces).items():
            assert_logits_equal(logits, expected[seq])
    linears = [module for module in ours.model.modules() if isinstance(module, LinearBase)]
    assert linears and all(linear.grouped.scales.dtype == torch.float16 for linear in linears)
    assert not any("weight" in dict(linear.named_parameters()) for linear in linears), "codes stay codes"


def test_no_layout_is_read_as_another(tmp_path: Path) -> None:
    """The layouts have the same codes: what comes out is bit for bit the same."""
    logits = []
    for kind in ("gptq", "gptq v2", "awq", "packed"):
        coded, _ = write_quantized(tiny(), tmp_path / kind, *KINDS[kind])
        logits.append(Driver(coded).step({0: prompts([9])[0]})[0])
    assert all(torch.equal(one, logits[0]) for one in logits)


def test_the_fused_layers_of_m6_over_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms fold, for products take their weights along; few tokens, some and many have a kernel each."""
    pytest.importorskip("triton", reason="Triton is for Linux only")
    from folovllm.models.fused_layer import skinny_layers
    from folovllm.quantization.kernels import int4_linear, quant_matmul

    monkeypatch.setattr(int4, "on_gpu", lambda x: True)
    monkeypatch.setattr(quant_matmul, "MANY", 5)
    used: list[str] = []
    for module, name in ((int4_linear, "int4_linear"), (quant_matmul, "quant_matmul"), (quant_matmul, "unpacked")):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, k=kernel, n=name: used.append(n) or k(*given))
    source = tiny_checkpoint(
        "qwen3", num_hidden_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, hidden_size=32, intermediate_size=32
    )
    coded, floats = write_quantized(source, tmp_path, *KINDS["gptq"])
    ours = Driver(coded, "torch_paged", device=DEVICE, layers=skinny_layers(16))
    plain = Driver(floats, "torch_paged", device=DEVICE)
    assert all(layer.folded for layer in ours.model.model.layers)  # type: ignore[union-attr]
    for pieces in ({0: [7]}, {0: [4], 1: [5, 9]}, {2: prompts([5])[0]}):
        used.clear()
        expected = plain.step(pieces)
        for seq, logits in ours.step(pieces).items():
            assert_logits_equal(logits, expected[seq])
        tokens = sum(map(len, pieces.values()))
        assert set(used) == {"int4_linear" if tokens <= 2 else "quant_matmul" if tokens < 5 else "unpacked"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Workload]:
    """A quantized model, and what M1 (transformers' model) answers with the numbers that its codes stand for."""
    coded, floats = write_quantized(tiny(), tmp_path_factory.mktemp("served"), *KINDS["gptq sorted"])
    return coded, answered(floats, mixed_requests(count=6))


@pytest.mark.parametrize("milestone", ["m2", "m6"])
def test_plain_and_fused_layers_answer_alike(milestone: str, served: tuple[Path, Workload]) -> None:
    model, load = served
    load.check(serve(make_engine(model, milestone=milestone), load.requests, "random"))


@pytest.mark.parametrize("kind", ["gptq", "gptq rows", "awq", "packed", "packed rows"])
def test_ranks_hold_their_parts(kind: str, tmp_path: Path) -> None:
    """Of words, scales and zeros, along outputs and along inputs; a scale for a whole row is everybody's, and sorts nothing."""
    source = tiny_checkpoint("qwen3", hidden_size=64, intermediate_size=128)
    coded, _ = write_quantized(source, tmp_path, *KINDS[kind])
    assert_ranks_hold_their_parts(coded, rtol=1e-4, atol=1e-4)


class TestRefusals:
    def refused(self, tmp_path: Path, says: str, kind: str = "gptq", ranks: int = 1, **fields: Any) -> None:
        coded, _ = write_quantized(tiny(), tmp_path, *KINDS[kind])
        said = json.loads((coded / "config.json").read_text())
        said["quantization_config"] |= fields
        (coded / "config.json").write_text(json.dumps(said))
        (coded / "model.safetensors").write_bytes(bytes(10**6))  # no weight is read
        with pytest.raises(ValueError, match=says):
            load_native_model(set_up(EngineConfig(model=str(coded), device="cpu", tensor_parallel_size=ranks)))

    @pytest.mark.parametrize("bits", [3, 8])
    def test_other_bits(self, tmp_path: Path, bits: int) -> None:
        self.refused(tmp_path, f"gptq with {bits} bits is not supported: with 4 it is", bits=bits)

    @pytest.mark.parametrize("size", [24, 48])
    def test_groups_that_do_not_fit(self, tmp_path: Path, size: int) -> None:
        self.refused(
            tmp_path, f"groups of {size} of 64 inputs are not supported: a group must be a mult", group_size=size
        )

    def test_sorted_inputs_on_several_ranks(self, tmp_path: Path) -> None:
        self.refused(tmp_path, r"cannot share self_attn.q_proj: its inputs are sorted \(desc_act\)", "gptq sorted", 2)

    def test_a_border_within_a_group(self, tmp_path: Path) -> None:
        self.refused(
            tmp_path, r"cannot share mlp.down_proj: a rank's part \[64, 48\] would not hold whole groups", ranks=2
        )

    def test_other_layouts(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "a", "AWQ's version 'gemv'", "awq", version="gemv")
        self.refused(tmp_path / "b", "checkpoint_format 'marlin'", checkpoint_format="marlin")
        self.refused(tmp_path / "c", "GPTQ checkpoints with dynamic are not", dynamic={"+:.*": {"bits": 8}})

    def test_groups_of_different_sizes(self, tmp_path: Path) -> None:
        def uneven(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
            parts, floats = KINDS["gptq"][0](weight)
            return parts | {"g_idx": parts["g_idx"].clone().index_fill_(0, torch.tensor([40]), 0)}, floats

        coded, _ = write_quantized(tiny(), tmp_path, uneven, SORTED)
        with pytest.raises(ValueError, match="g_idx does not put 32 inputs into each group"):
            Driver(coded)

    @pytest.mark.parametrize("said", [False, None])
    def test_an_order_that_the_config_does_not_speak_of(self, said: bool | None, tmp_path: Path) -> None:
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
    assert any(m.grouped.library for m in ours.model.modules() if isinstance(m, LinearBase))
    logits = [driver.step({0: tokens})[0] for driver in (ours, Driver(floats, dtype=torch.bfloat16), Driver(floats))]
    assert_as_accurate(*logits)


def test_random_weights() -> None:
    source = tiny_checkpoint("qwen3", hidden_size=128, intermediate_size=256)
    config = EngineConfig(model=str(source), device="cpu", random_weights=True, quantization="int4", use_tqdm=False)
    for module in load_native_model(set_up(config)).modules():
        if isinstance(module, LinearBase):
            weight = module(torch.eye(module.input_size))
            assert 0.015 < weight.std() < 0.025


@pytest.mark.parametrize("kind", ["packed symmetric", "packed rows"])
def test_transformers_reads_the_same_checkpoint_alike(kind: str, tmp_path: Path) -> None:
    """In its own way, through the packages that it needs for it. Zeros of 4 bits it cannot read (transformers 5.23)."""
    for package in ("compressed_tensors", "accelerate"):
        pytest.importorskip(package, reason=f"transformers needs {package} for this (pip install -e '.[dev]')")
    source = tiny_checkpoint("llama", tied=False, hidden_size=64, intermediate_size=96)
    coded, _ = write_quantized(source, tmp_path, *KINDS[kind])
    tokens = prompts([12])[0]
    assert_logits_equal(Driver(coded).step({0: tokens})[0], hf_logits(coded, tokens))


@pytest.mark.parametrize("kind", ["qweight", "qzeros", "scales"])
def test_codes_are_put_in_order_on_the_device_of_the_model(kind: str) -> None:
    """On a GPU it is nothing; on the CPU beside it, a minute of a large model. Plain weights go there as they are."""
    parts = to_awq(*(torch.zeros(16, n, dtype=torch.uint8) for n in (64, 2, 2)))
    place = Place(torch.empty(16, 64 // {"qweight": 8}.get(kind, 32), device="meta"), Awq(GROUP))
    assert arranged(f"layer.{kind}", parts[kind], {f"layer.{kind}": place}).device.type == "meta"
    plain = torch.zeros(16, 64)
    assert arranged("layer.weight", plain, {"layer.weight": Place(place.view)}) is plain


@pytest.mark.parametrize("format", [Gptq(32), Awq(32), PackedInt4(32, with_zeros=True)])
def test_codes_that_are_no_matrix_are_one_sentence(format: Int4) -> None:
    """Flattened, or of all experts in one tensor."""
    for kind in format.names:
        for size in ([64], [2, 8, 8]):
            with pytest.raises(ValueError, match=f"{kind}.* must have two dimensions"):
                format.arrange(kind, torch.zeros(size, dtype=torch.int32), torch.Size([8, 8]))
