"""A KV cache in 8 bits: what is written, what is read, and engines on top of it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from folovllm import EngineConfig
from folovllm.attention.backends.abstract import AttentionBackend, BackendUnavailable
from folovllm.attention.backends.registry import choose_backend, make_backend
from folovllm.attention.backends.torch_naive import TorchNaiveBackend
from folovllm.electives.quantization.calibrate import centred_scales_of
from folovllm.electives.quantization.checkpoint_kv_scales import load_kv_scale
from folovllm.engine.setup import set_up
from folovllm.models.sharded_loader import load_sharded_model
from folovllm.sampling_params import SamplingParams
from folovllm.step.kv_format import FP8, UNSCALED, KVScales, decode, encode
from tests import contract
from tests.contract import CASES, Case, make_problem
from tests.helpers import Driver, prompts, tiny_checkpoint
from tests.m6.ranks import on_ranks
from tests.workloads import Request, make_engine, mixed_requests, serve
from tests.x2.quantized import BYTE_KINDS as KINDS
from tests.x2.quantized import write_quantized

SCALES = KVScales(0.25, 0.03)  # one that moves exponents alone, and one that does not
OFFSET = 10.0  # that all keys of these tests lose, more or less
BACKENDS = ("torch_naive", "torch_paged", "triton")
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
ON = contract.DEVICE


def numbers() -> torch.Tensor:
    """Every number of 8 bits, what lies half-way between neighbours and beside that, random ones, and some too large."""
    own = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    own = own[own.isfinite()].sort().values
    middles = (own[1:] + own[:-1]) / 2
    spread = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-4, 3, 2000)
    return torch.cat([own, middles, middles * 1.001, middles * 0.999, spread, torch.tensor([464.0, 500.0, -1e9, 0.0])])


def backend_for(name: str, case: Case, dtype: torch.dtype, scales: KVScales) -> AttentionBackend:
    """The backend over 8 bits; skips where it cannot run."""
    plain = contract.make_backend(name, case, dtype)
    config = replace(plain.config, kv_dtype=FP8)
    try:
        choose_backend(name, config)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return make_backend(name, config).of_layer(scales)


def with_offset(scales: KVScales, num_kv_heads: int, dim: int) -> KVScales:
    """The same, and a number for each head and dimension that keys lose."""
    offset = OFFSET + torch.randn(num_kv_heads, dim, generator=torch.Generator().manual_seed(0))
    return replace(scales, offset=offset.to(ON))


def in_8_bits(cache: torch.Tensor, scales: KVScales) -> torch.Tensor:
    """A cache in whole numbers, encoded; NaN stays NaN, as what nobody owns is."""
    keys, values = cache  # [N, B, Hkv, D] each
    keys = keys if scales.offset is None else keys.float() - scales.offset
    parts = encode(keys, scales.key_factor), encode(values, scales.value_factor)
    return torch.stack([part.transpose(1, 2).contiguous() for part in parts]).transpose(2, 3)


def read_back(cache: torch.Tensor, scales: KVScales, dtype: torch.dtype) -> torch.Tensor:
    """What `in_8_bits` was given, all of it: an offset that no reader needs is put back."""
    keys = decode(cache[0], scales.key, dtype)
    keys = keys if scales.offset is None else keys + scales.offset
    return torch.stack([keys, decode(cache[1], scales.value, dtype)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("factor", [1.0, 4.0, 1 / 0.03])
def test_kernels_round_as_torch_does(dtype: torch.dtype, factor: float) -> None:
    """Half to even, below the smallest normal number too; what is too large becomes the largest."""
    triton = pytest.importorskip("triton", reason="Triton is for Linux only")
    tl = triton.language
    from folovllm.kernels.fp8_cache import to_cache

    @triton.jit
    def cast(x_ptr, out_ptr, n, factor, BLOCK: tl.constexpr, to: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + i, to(tl.load(x_ptr + i, mask=i < n), factor, out_ptr), mask=i < n)

    x = (numbers() / factor).clamp(-6e4, 6e4).to(dtype).to(ON)
    out = torch.zeros(len(x), device=ON).to(FP8)
    cast[(triton.cdiv(len(x), 1024),)](x, out, len(x), factor, 1024, to_cache)
    assert (out.float() == encode(x, factor).float()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("case", "kind"), [*product(CASES[:8], ["scaled"]), *product([CASES[4]], ["unscaled", "with an offset"])], ids=str
)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_stores_8_bits_and_attends_over_them(name: str, case: Case, kind: str, dtype: torch.dtype) -> None:
    """New K/V land encoded in their slots and nowhere else; attention is that over what they decode to."""
    scales = UNSCALED if kind == "unscaled" else SCALES
    if kind.endswith("offset"):
        scales = with_offset(scales, case.num_kv_heads, case.head_dim)
    backend = backend_for(name, case, dtype, scales)
    p = make_problem(backend.config, case)
    cache, after = in_8_bits(p.kv_cache, scales), in_8_bits(p.cache_after, scales)
    backend.plan(p.batch)
    backend.store(p.key, p.value, cache, p.batch.slot_mapping)
    assert torch.equal(cache.view(torch.uint8), after.view(torch.uint8))
    out = backend.forward(p.query, cache, p.batch)
    oracle = TorchNaiveBackend(replace(backend.config, kv_dtype=None))
    expected = oracle.forward(p.query.float(), read_back(after, scales, torch.float32), p.batch)
    assert not out.isnan().any(), "a slot that holds no token of the sequence was read"
    assert (out - expected).abs().max() <= contract.TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "offset"), [(32, False), (64, True)])
def test_the_kernels_that_prepare_and_store_at_once_agree(dtype: torch.dtype, dim: int, offset: bool) -> None:
    """Rotating and storing in one pass, and a decode that takes in the raw projection: the bytes that torch's way stores."""
    pytest.importorskip("triton", reason="Triton is for Linux only")
    from folovllm.kernels.decode import SplitKVDecode
    from folovllm.kernels.qk_norm_rope import Preparation, qk_norm_rope_store
    from folovllm.layers.rotary_embedding import RotaryEmbedding

    torch.manual_seed(0)
    lens, (hq, hkv), block_size = torch.tensor([1, 5, 16, 17, 40], device=ON), (4, 2), 16
    tables = torch.arange(15, device=ON).view(5, 3).int()
    cache = torch.randn(2, 15, hkv, block_size, dim, device=ON).to(FP8).transpose(2, 3)
    other = cache.clone().transpose(2, 3).contiguous().transpose(2, 3)
    last = lens - 1
    slots = tables.gather(1, (last // block_size)[:, None])[:, 0] * block_size + last % block_size
    rope = RotaryEmbedding(10000.0 ** -(torch.arange(0, dim, 2) / dim), 64).to(ON)
    qkv = torch.randn(5, (hq + 2 * hkv) * dim, device=ON, dtype=dtype)
    query, key, value = torch.split(qkv.view(5, -1, dim), [hq, hkv, hkv], dim=1)
    scales = with_offset(SCALES, hkv, dim) if offset else SCALES
    preparation = Preparation(rope.cos_sin_cache, scales=scales)

    rotated = qk_norm_rope_store(query, key, value, last, cache, slots, preparation)
    expected_query, expected_key = rope(last, query, key)
    written = cache[:, slots.long() // block_size, slots.long() % block_size]
    if dtype == torch.float32:  # else the two rotations may differ in the last bit
        assert torch.equal(written[0].float(), encode(scales.centred(expected_key), SCALES.key_factor).float())
        torch.testing.assert_close(rotated, expected_query)
    assert torch.equal(written[1].float(), encode(value, SCALES.value_factor).float())

    kernel = SplitKVDecode(8, hq, hkv, dim, block_size, torch.device(ON))
    kernel.plan(lens.int(), 5)
    out, raw = torch.empty_like(rotated), torch.empty_like(rotated)
    kernel(rotated, cache, tables, 5, dim**-0.5, out, scales=SCALES)
    kernel(qkv, other, tables, 5, dim**-0.5, raw, preparation, scales)
    differing = (cache.float() != other.float()).float().mean()
    assert differing == 0 if dtype == torch.float32 else differing < 1e-3
    rtol, atol = (1e-5, 1e-4) if dtype == torch.float32 else (2e-2, 2e-2)
    torch.testing.assert_close(raw, out, rtol=rtol, atol=atol)


def test_the_offset_is_about_the_mean_and_leaves_the_first_key_whole() -> None:
    """Worked by hand: keys 5, 8 and 11 of one dimension, in slots beside one that no token has."""
    cache = torch.zeros(2, 2, 2, 1, 1)
    cache[0].view(-1)[:] = torch.tensor([5.0, 8.0, 11.0, 999.0])
    cache[1].fill_(0.875)
    (scales,) = centred_scales_of([cache], 3)
    assert scales == KVScales(1 / 64, 1 / 256), (
        "twice 3, the largest once 8 is taken off, over 448 is 1/74.7; up to 1/64"
    )
    assert scales.offset is not None and scales.offset.tolist() == [[8.0]], "their mean: 5 - 8 is a number of 8 bits"
    cache[0].view(-1)[:3] = torch.tensor([4.7, 8.3, 11.0])
    (scales,) = centred_scales_of([cache], 3)
    assert scales.offset is not None
    (offset,) = scales.offset.flatten().tolist()
    assert offset == pytest.approx(7.95), "4.7 - 8 is -3.3, next to -3.25: so 7.95"
    left = torch.tensor([4.7]) - offset
    assert torch.allclose(decode(encode(left, scales.key_factor), scales.key, torch.float32), left, atol=1e-6)


def test_what_keys_have_in_common_costs_nothing() -> None:
    """Keys that lie far off zero, all by the same vector: attention over 8 bits is hardly off, as if they did not."""
    case = CASES[0]
    p = make_problem(contract.make_backend("torch_naive", case, torch.float32).config, case)
    common = 100 * torch.randn(case.num_kv_heads, case.head_dim, generator=torch.Generator().manual_seed(1)).to(ON)

    def error(scales: KVScales, added: torch.Tensor | float) -> float:
        backend = backend_for("torch_naive", case, torch.float32, scales)
        after = p.cache_after.clone()
        after[0] += added
        expected = TorchNaiveBackend(replace(backend.config, kv_dtype=None)).forward(p.query, after, p.batch)
        return float((backend.forward(p.query, in_8_bits(after, scales), p.batch) - expected).abs().max())

    near = error(UNSCALED, 0.0)
    assert error(KVScales(offset=common), common) <= 1.1 * near < error(UNSCALED, common) / 4


def answers(model: Path, count: int, arrival: str = "at_once", **fields: Any) -> list[list[int]]:
    """The tokens that an engine over 8 bits answers to requests of all kinds."""
    engine = make_engine(model, kv_cache_dtype="fp8", **fields)
    drawn = [list(o.outputs[0].token_ids) for o in serve(engine, mixed_requests(count=count), arrival)]
    engine.close()
    return drawn


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return answers(tiny_checkpoint(), 8, max_num_seqs=1, calculate_kv_scales=True)


LITTLE = {"num_kv_blocks": 36, "block_size": 8}
STEPS: list[tuple[str, dict[str, int]]] = [
    ("m2", {}), *((name, LITTLE) for name in ("m3", "m4", "m5", "m6")), ("m5", {"max_num_batched_tokens": 7, "max_num_seqs": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("milestone", "fields"), STEPS)
def test_all_milestones_answer_alike_from_8_bits(
    milestone: str, fields: dict[str, int], alone: list[list[int]]
) -> None:
    """Whatever the batch, the blocks, preemptions and prefixes: the bytes are the same, and so are the tokens.

    In small steps, too: the scales come from the same tokens, of which a small step would see a part.
    """
    assert answers(tiny_checkpoint(), 8, "random", milestone=milestone, calculate_kv_scales=True, **fields) == alone


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_an_engine_of_two_processes(tmp_path: Path) -> None:
    """Codes for weights and for K/V. A rank holds a part of the vocabulary: its scales do not come from that alone."""
    model, _ = write_quantized(tiny_checkpoint(), tmp_path, *KINDS["fp8 tensor"])
    fields: dict[str, Any] = {"milestone": "m6", "max_num_seqs": 8, "calculate_kv_scales": True}
    assert answers(model, 4, tensor_parallel_size=2, **fields) == answers(model, 4, **fields)


def test_all_layers_see_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded step is planned once. A layer's own copy of the backend, which has its scales, must know of it."""
    pytest.importorskip("triton", reason="Triton is for Linux only")
    from folovllm.worker import graph_runner
    from folovllm.worker.buckets import prompt_bucket

    greedy = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    model = tiny_checkpoint(num_heads=2, num_kv_heads=1, num_hidden_layers=2)
    requests = [Request(prompt, greedy) for prompt in prompts([1, 2, 9])]
    monkeypatch.setattr(graph_runner, "buckets_for", lambda *_: [prompt_bucket(16, 4)])
    used: list[object] = []
    graph = graph_runner.GraphRunner._graph

    def noted(self: Any, bucket: Any, work: Any) -> Any:
        used.extend([bucket] * bool(bucket.num_others))
        return graph(self, bucket, work)

    monkeypatch.setattr(graph_runner.GraphRunner, "_graph", noted)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 16}
    plain, captured = (
        [list(o.outputs[0].token_ids) for o in serve(make_engine(
            model, milestone=milestone, attention_backend=backend, kv_cache_dtype="fp8", calculate_kv_scales=True, **sizes
        ), requests)]
        for milestone, backend in (("m5", "torch_paged"), ("m6", "triton"))
    )  # fmt: skip
    assert plain == captured and used


def test_half_the_bytes_are_twice_the_blocks() -> None:
    """The same memory holds twice the tokens of float16."""
    config = EngineConfig(model=str(tiny_checkpoint()), dtype="float16")
    auto, fp8 = (set_up(replace(config, kv_cache_dtype=kv)).kv_bytes_per_token for kv in ("auto", "fp8"))
    assert auto == 2 * fp8


def with_tensors(tensors: dict[str, torch.Tensor], to: Path) -> str:
    """The tiny model's checkpoint with some tensors more."""
    shutil.copytree(tiny_checkpoint(), to)
    file = to / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    return str(to)


NAMES = [
    ("self_attn.k_scale", "self_attn.v_scale"),
    ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
]


@pytest.mark.parametrize("names", NAMES)
def test_each_scale_of_a_checkpoint_has_its_place(names: tuple[str, str]) -> None:
    model = Driver(tiny_checkpoint()).model
    for name, value in zip(names, (2.0, 3.0), strict=True):
        load_kv_scale(model, f"model.layers.1.{name}", torch.tensor(value))
    found = [layer.self_attn.attn.scales for layer in model.model.layers]
    assert found == [UNSCALED, KVScales(2.0, 3.0), UNSCALED], "keys' and values' in the layer that is named"


def test_a_checkpoints_scales_are_used(tmp_path: Path) -> None:
    """Scales that lose all but the coarsest numbers change the answer; without 8 bits nobody looks at them. Ranks have them."""
    names = [NAMES[0], NAMES[1], (NAMES[2][0], NAMES[3][1])]  # each layer's in another way
    scales = {f"model.layers.{i}.{name}": torch.tensor(300.0) for i, pair in enumerate(names) for name in pair}
    path, requests = Path(with_tensors(scales, tmp_path / "scaled")), mixed_requests(count=3)
    plain, whole = (
        [list(o.outputs[0].token_ids) for o in serve(make_engine(model, milestone="m5"), requests)]
        for model in (tiny_checkpoint(), path)
    )
    assert whole == plain and answers(path, 3, milestone="m5") != plain
    config = EngineConfig(model=str(path), device="cpu", kv_cache_dtype="fp8", tensor_parallel_size=2, use_tqdm=False)
    setup = set_up(config)
    for model in on_ranks(2, lambda group: load_sharded_model(setup, group)):
        layers: Any = model.model.layers
        assert [layer.self_attn.attn.scales for layer in layers] == [KVScales(300.0, 300.0)] * 3


@pytest.mark.parametrize("scale", [torch.tensor(0.0), torch.tensor(float("nan")), torch.ones(2), torch.tensor(-1.0)])
def test_a_scale_that_cannot_be_is_refused(scale: torch.Tensor, tmp_path: Path) -> None:
    model = with_tensors({"model.layers.0.self_attn.k_scale": scale}, tmp_path / "bad")
    with pytest.raises(ValueError, match=r"self_attn\.k_scale.* one positive number"):
        make_engine(Path(model), kv_cache_dtype="fp8")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"milestone": "m1", "kv_cache_dtype": "fp8"}, 'leave kv_cache_dtype out, or use milestone="m2"'),
    ({"calculate_kv_scales": True}, 'with kv_cache_dtype="fp8_e4m3" only'),
    ({"kv_cache_dtype": "fp8_e5m2"}, "unknown kv_cache_dtype 'fp8_e5m2': choose one of auto, fp8_e4m3"),
]


@pytest.mark.parametrize(("choices", "says"), REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence(choices: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EngineConfig(**choices)


@pytest.mark.parametrize(("backend", "head_dim", "says"), [
    ("triton", 16, "head_dim of 32 up, not 16"), pytest.param("flash_attn", 32, "flash_attn", marks=pytest.mark.gpu),
])  # fmt: skip
def test_backends_that_cannot_are_refused(backend: str, head_dim: int, says: str) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux only")
    device = {"device": "cuda"} if backend == "flash_attn" else {}
    with pytest.raises(BackendUnavailable, match=says):
        make_engine(
            tiny_checkpoint(head_dim=head_dim),
            milestone="m4",
            kv_cache_dtype="fp8",
            attention_backend=backend,
            **device,
        )
