"""The kernels of Gated DeltaNet give what the torch form gives: a ragged batch, chunks that end anywhere, padding, slots of others."""

from operator import add
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from folovllm.electives.hybrid.delta_rule import delta_rule as in_torch
from folovllm.electives.hybrid.delta_rule import l2norm
from folovllm.electives.hybrid.fused import FusedGatedDeltaNet
from folovllm.electives.hybrid.gated_delta_net import GatedDeltaNet, GatedRMSNorm
from folovllm.electives.hybrid.kernels import gated_norm
from folovllm.electives.hybrid.kernels.delta_chunks import CHUNK
from folovllm.electives.hybrid.kernels.delta_rule import DeltaHeads, delta_rule
from folovllm.layers.layer_set import LayerSet
from folovllm.step.forward_batch import ForwardBatch
from tests import contract
from tests.helpers import Driver, assert_as_accurate, assert_logits_equal, hf_logits, prompts
from tests.workloads import Request, answered, make_engine, serve
from tests.x5.checkpoints import hybrid_checkpoint

ON = contract.DEVICE
GEOMETRIES = {"grouped": (2, 4, 16, 8, 4), "odd sizes": (1, 3, 24, 40, 3), "one by one": (2, 2, 8, 32, 2)}


def config(hk: int, hv: int, dk: int, dv: int, width: int) -> Any:
    return SimpleNamespace(
        hidden_size=32, hidden_act="silu", rms_norm_eps=1e-6, linear_num_key_heads=hk, linear_num_value_heads=hv,
        linear_key_head_dim=dk, linear_value_head_dim=dv, linear_conv_kernel_dim=width,
    )  # fmt: skip


def two_layers(geometry: str, most_samples: int = 1) -> tuple[GatedDeltaNet, GatedDeltaNet]:
    """The torch form and the kernels', with the same weights and the same states of 6 slots, if no inputs are kept."""
    generator, layers = torch.Generator().manual_seed(0), LayerSet(most_samples=most_samples)
    plain = GatedDeltaNet(config(*GEOMETRIES[geometry]), layers)
    for parameter in plain.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
    fused = FusedGatedDeltaNet(config(*GEOMETRIES[geometry]), layers)
    fused.load_state_dict(plain.state_dict())
    for layer in (plain, fused):
        generator.manual_seed(1)
        layer.states = tuple(torch.randn(6, *s, generator=generator).to(ON, dtype) for s, dtype in layer.state_shapes())
    return plain, fused


def batch_of(lengths: list[int], computed: list[int], rows: list[int]) -> ForwardBatch:
    """A batch that goes on with sequences; nothing of it but what these layers read."""
    starts, none = torch.tensor([0, *lengths]).cumsum(0).int(), torch.empty(0)
    seq_lens = [n + c for n, c in zip(lengths, computed, strict=True)]
    return ForwardBatch(
        none, none, none, starts, torch.tensor(seq_lens).int(), none, none, num_seqs=len(lengths),
        num_decodes=next((i for i, n in enumerate(lengths) if n > 1), len(lengths)), max_query_len=max(lengths),
        max_seq_len=max(seq_lens), query_lens_host=lengths, seq_lens_host=seq_lens, rows=torch.tensor(rows),
    )  # fmt: skip


def to_device(batch: ForwardBatch) -> ForwardBatch:
    for name in ("query_start_loc", "seq_lens", "rows"):
        setattr(batch, name, getattr(batch, name).to(ON))
    return batch


@pytest.mark.parametrize("geometry", GEOMETRIES)
@torch.inference_mode()
def test_a_ragged_batch(geometry: str) -> None:
    """Decodes, one of them a first token; a prompt of three chunks, a later piece shorter than the convolution, a whole chunk."""
    plain, fused = two_layers(geometry)
    lengths, computed, rows = [1, 1, 2 * CHUNK + 2, 2, CHUNK], [9, 0, 0, 17, 5], [3, 0, 5, 1, 2]
    for row, start in zip(rows, computed, strict=True):
        fused.states[0][row] = plain.states[0][row].roll(start, 0).to(ON)  # the ring of a sequence that is so long
    x = torch.randn(sum(lengths), 32, generator=torch.Generator().manual_seed(1))
    expected = plain(x, batch_of(lengths, computed, rows))
    actual = fused.to(ON)(x.to(ON), to_device(batch_of(lengths, computed, rows)))
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fused.states[1].cpu(), plain.states[1], rtol=1e-4, atol=1e-4)
    for row, end in zip(rows, map(add, lengths, computed), strict=True):
        last = min(end, len(plain.states[0][row]))  # inputs before the first token are not stored
        ours, theirs = fused.states[0][row].cpu().roll(-end, 0), plain.states[0][row]
        torch.testing.assert_close(ours[len(ours) - last :], theirs[len(ours) - last :], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_prompt_of_equal_tokens() -> None:
    """Then the triangular system is full of large entries, and its powers grow beyond what float32 holds exactly."""
    plain, fused = two_layers("grouped")
    for layer in (plain, fused):
        layer.A_log.data.fill_(-8.0)  # nothing fades
    x, batch = torch.ones(CHUNK, 32), batch_of([CHUNK], [0], [0])
    expected = plain(x, batch)
    torch.testing.assert_close(fused.to(ON)(x.to(ON), to_device(batch)).cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dk", "dv"), [(16, 8), (24, 40), (32, 32), (64, 64), (128, 128)])
@torch.inference_mode()
def test_heads_of_any_size_in_half_precision(dk: int, dv: int, dtype: torch.dtype) -> None:
    """Each size has products of its own on tensor cores, and an interpreter has none. A last chunk that is full, and one that is not."""
    for tokens in (CHUNK, CHUNK + 16, 3 * CHUNK + 1):
        mixed = torch.randn(tokens, 4 * dk + 4 * dv, dtype=dtype, device=ON)
        a, b = torch.randn(2, tokens, 4, dtype=dtype, device=ON)
        A_log, dt_bias = torch.full((4,), -3.0, device=ON), torch.zeros(4, device=ON)
        state = torch.full((2, 4, dk, dv), torch.nan, device=ON)
        starts, lens, rows = (torch.tensor(x, dtype=torch.int32, device=ON) for x in ([0, tokens], [tokens], [1]))
        heads = DeltaHeads(2, 4, dk, dv)
        actual = delta_rule(mixed, (a, b, A_log, dt_bias), state, heads, starts, lens, rows, 0, tokens)
        query, key, value = mixed.float().split([2 * dk, 2 * dk, 4 * dv], 1)
        query, key = (l2norm(x.view(tokens, 2, dk)).repeat_interleave(2, 1) for x in (query, key))
        g = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)
        start = torch.zeros(4, dk, dv, device=ON)
        expected, end = in_torch(start, query * dk**-0.5, key, value.view(tokens, 4, dv), g, b.float().sigmoid())
        for ours, theirs in ((actual.float(), expected), (state[1], end)):
            assert (ours - theirs).abs().max() < 0.02 * theirs.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("few", [0, 4096], ids=["many heads", "few heads"])
def test_the_gated_norm(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program for each head and for 16 of them, the last of which has fewer; a gate whose tokens lie apart."""
    monkeypatch.setattr(gated_norm, "MOST_ALONE", few)
    x, gates = (torch.randn(7, 2 * 3 * 24).to(ON) for _ in range(2))
    x, gate = x[:, :72].reshape(7, 3, 24).contiguous(), gates[:, 72:].unflatten(1, (3, 24))
    norm = GatedRMSNorm(24, 1e-6).to(ON)
    norm.weight.data.copy_(torch.randn(24))
    torch.testing.assert_close(gated_norm.gated_norm(x, gate, norm.weight, 1e-6), norm(x, gate))


@torch.inference_mode()
def test_padding_changes_no_state_of_others() -> None:
    """As in a captured step: a decode of no tokens, and a last sequence of padding that has tokens and no length."""
    _, fused = two_layers("grouped")
    before = [state.clone() for state in fused.states]
    x = torch.randn(5, 32).to(ON)
    batch = to_device(batch_of([1, 0, 2, 2], [3, 0, 4, -2], [0, 5, 1, 5]))
    batch.num_decodes = 2
    alone = to_device(batch_of([1, 2], [3, 4], [0, 1]))
    actual = fused.to(ON)(x, batch)
    after = [state.clone() for state in fused.states]
    for state, old in zip(fused.states, before, strict=True):
        state.copy_(old)
    torch.testing.assert_close(actual[:3], fused(x[:3], alone))
    for state, padded, old in zip(fused.states, after, before, strict=True):
        torch.testing.assert_close(padded[:5], state[:5])
        torch.testing.assert_close(padded[2:5].cpu(), old[2:5].cpu())


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_a_model_over_kernels(family: str) -> None:
    """Slots begin as NaN."""
    path, (ids,) = hybrid_checkpoint(family, "LF"), prompts([40])
    driver = Driver(path, "torch_naive", max_seqs=1, device=ON, layers=LayerSet(kernels=True))
    assert_logits_equal(driver.feed(ids, [35, 1, 4]), hf_logits(path, ids))


@pytest.mark.parametrize("where", ["torch", pytest.param("kernels", marks=pytest.mark.gpu)])
def test_bfloat16_is_as_accurate_as_hugging_face(where: str) -> None:
    """Keys and states are rounded for the products of a chunk, the state itself stays in float32."""
    path, (ids,) = hybrid_checkpoint(linear_key_head_dim=32, linear_value_head_dim=32), prompts([80])
    device, layers = ("cuda", LayerSet(kernels=True)) if where == "kernels" else ("cpu", LayerSet())
    driver = Driver(path, "torch_naive", max_seqs=1, dtype=torch.bfloat16, device=device, layers=layers)
    truth = hf_logits(path, ids)
    assert_as_accurate(driver.step({0: ids})[0], hf_logits(path, ids, torch.bfloat16), truth)


def test_the_engine_over_kernels() -> None:
    """M6 with all kernels: chunks, snapshots, captured decodes."""
    from folovllm import SamplingParams

    path = hybrid_checkpoint("qwen3_next", "LF", num_heads=2, num_kv_heads=1)
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    (first, second) = prompts([19, 3])
    load = answered(path, [Request(first, greedy), Request(second, greedy), Request([*first[:12], 7], greedy)])
    fields: dict[str, Any] = {"milestone": "m6", "attention_backend": "triton", "dtype": "float32", "device": ON}
    fields |= {"max_num_seqs": 2, "max_num_batched_tokens": 12, "block_size": 4, "max_model_len": 32}
    engine = make_engine(path, **fields, num_snapshots=8, snapshot_interval=4)
    load.check(serve(engine, load.requests, "one_by_one"))
    assert engine.scheduler.kv.stats.tokens_hit == 12
