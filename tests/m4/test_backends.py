"""Whole backends on mixed batches, against the plain torch one; and what they say where they cannot run."""

from dataclasses import replace

import pytest
import torch

from folovllm.attention.backends.abstract import AttentionConfig, BackendUnavailable
from folovllm.attention.backends.composite import compose, decodes_of, prefills_of
from folovllm.attention.backends.flash_attn import FlashAttentionBackend
from folovllm.attention.backends.registry import get_backend
from folovllm.attention.backends.select import choose_backend
from folovllm.attention.backends.torch_naive import TorchNaiveBackend
from folovllm.attention.backends.torch_paged import TorchPagedBackend
from folovllm.attention.backends.triton import TritonBackend
from folovllm.forward_batch import ForwardBatch
from tests.m4.cases import DEVICE, assert_close

HQ, HKV, D, B = 4, 2, 16, 16
CONFIG = AttentionConfig(HQ, HKV, D, torch.float32, DEVICE, B, 8)
CASES = {  # (tokens, of which new), decodes first
    "decodes": [(1, 1), (16, 1), (17, 1), (70, 1)],
    "prefills": [(20, 20), (1, 1), (33, 33)],
    "chunks": [(40, 7), (33, 16)],
    "mixed": [(9, 1), (48, 1), (20, 20), (37, 5)],
}


def make_batch(rows, num_decodes):
    """A `ForwardBatch` of sequences (tokens, new) in shuffled blocks, and how many tokens are cached before it."""
    lens, new = [n for n, _ in rows], [k for _, k in rows]
    width = max(-(-n // B) for n in lens)
    tables = torch.randperm(len(rows) * width).view(len(rows), width).to(torch.int32)
    slots, positions = [], []
    for table, n, k in zip(tables, lens, new, strict=True):
        position = torch.arange(n - k, n)
        positions.append(position)
        slots.append(table[position // B].long() * B + position % B)
    starts = torch.tensor([0, *new]).cumsum(0)
    tensors = {
        "input_ids": torch.zeros(sum(new), dtype=torch.int64), "positions": torch.cat(positions),
        "slot_mapping": torch.cat(slots), "query_start_loc": starts.to(torch.int32),
        "seq_lens": torch.tensor(lens, dtype=torch.int32), "block_tables": tables, "logits_indices": starts[1:] - 1,
    }  # fmt: skip
    return ForwardBatch(
        **{name: x.to(DEVICE) for name, x in tensors.items()}, num_seqs=len(rows), num_decodes=num_decodes,
        max_query_len=max(new), max_seq_len=max(lens), query_lens_host=new, seq_lens_host=lens,
    )  # fmt: skip


def attend(backend_class, rows, num_decodes, config=CONFIG):
    """Store the new tokens' K/V and attend; seeded, so that every backend gets the same."""
    torch.manual_seed(1)
    batch = make_batch(rows, num_decodes)
    blocks = batch.block_tables.numel()
    make = {"dtype": config.dtype, "device": DEVICE}
    cache = torch.randn(2, blocks, HKV, B, config.head_dim).to(**make).permute(0, 1, 3, 2, 4)
    tokens = sum(batch.query_lens_host)
    query = torch.randn(tokens, HQ, config.head_dim).to(**make)
    key, value = (torch.randn(tokens, HKV, config.head_dim).to(**make) for _ in "kv")
    backend = backend_class(config)
    backend.plan(batch)
    backend.store(key, value, cache, batch.slot_mapping)
    return backend.forward(query, cache, batch)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_equals_torch(case, dtype):
    """The same K/V stored, the same attention, whatever the batch is made of."""
    rows, config = CASES[case], replace(CONFIG, dtype=dtype)
    num_decodes = {"decodes": 4, "mixed": 2}.get(case, 0)
    TritonBackend.check_available(config)
    expected = attend(TorchNaiveBackend, rows, num_decodes, config)
    assert_close(attend(TritonBackend, rows, num_decodes, config), expected)


@pytest.mark.parametrize("case", ["decodes", "prefills", "mixed"])
@pytest.mark.parametrize(
    "pair",
    [(TorchNaiveBackend, TritonBackend), (TritonBackend, TorchNaiveBackend)],
    ids=lambda p: f"{p[0].name},{p[1].name}",
)
def test_two_backends_behind_one_face(case, pair):
    """The composite sends each part of a batch to its backend and puts the results back in order."""
    rows, num_decodes = CASES[case], {"decodes": 4, "mixed": 2}.get(case, 0)
    composite = compose(*pair)
    assert composite.name == f"{pair[0].name},{pair[1].name}"
    assert_close(attend(composite, rows, num_decodes), attend(TorchNaiveBackend, rows, num_decodes))


def test_halves_of_a_batch():
    """Cut after the decodes: tokens, tables and prefix sums of each half stand on their own."""
    batch = make_batch(CASES["mixed"], 2)
    first, second = decodes_of(batch), prefills_of(batch)
    assert first.query_start_loc.tolist() == [0, 1, 2] and second.query_start_loc.tolist() == [0, 20, 25]
    assert (first.num_seqs, first.num_decodes, first.max_query_len) == (2, 2, 1)
    assert (second.num_seqs, second.num_decodes) == (2, 0)
    assert second.seq_lens_host == [20, 37] and second.query_lens_host == [20, 5]
    assert second.logits_indices.tolist() == [19, 24]
    assert len(second.positions) == len(second.slot_mapping) == 25


@pytest.mark.parametrize("name", ["torch_paged", "torch_paged,torch_naive"])
def test_what_a_backend_declares_is_kept(name, monkeypatch):
    """A backend need only name the blocks that it can use; the smallest is taken, and another refused in a sentence."""
    monkeypatch.setattr(TorchPagedBackend, "supported_block_sizes", (64,))
    config = replace(CONFIG, device=torch.device("cpu"), dtype=torch.float32, block_size=None)
    assert choose_backend(name, config) == (name, 64)
    with pytest.raises(BackendUnavailable, match=f"{name} cannot use blocks of 48 tokens: leave block_size open"):
        choose_backend(name, replace(config, block_size=48))


def test_composite_asks_both():
    """A block must suit both, and either may refuse."""
    composite = compose(FlashAttentionBackend, TritonBackend)
    assert composite.supports_block_size(256) and not composite.supports_block_size(16)
    assert composite.supports_cuda_graph and not compose(TritonBackend, TorchNaiveBackend).supports_cuda_graph
    with pytest.raises(BackendUnavailable, match="flash_attn"):
        composite.check_available(replace(CONFIG, device=torch.device("cpu")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks about the interpreter, which does not run beside a GPU")
@pytest.mark.parametrize(
    ("change", "message"),
    [({"head_dim": 80}, "power of two"), ({"head_dim": 8}, "power of two"), ({"dtype": torch.bfloat16}, "float16")],
    ids=str,
)
def test_triton_says_why_not(change, message):
    """What it lacks on a CPU, and what to choose instead."""
    with pytest.raises(BackendUnavailable, match=message):
        TritonBackend.check_available(replace(CONFIG, device=torch.device("cpu"), **change))


def test_triton_has_no_tiles_for_very_wide_heads():
    """They would not fit a small card's shared memory."""
    wide = replace(CONFIG, device=torch.device("cuda"), head_dim=256)
    with pytest.raises(BackendUnavailable, match="128 in float32"):
        TritonBackend.check_available(wide)
    TritonBackend.check_available(replace(wide, dtype=torch.float16))


def test_triton_needs_a_gpu_or_the_interpreter(monkeypatch):
    """Without either it names the variable to set."""
    monkeypatch.setattr("folovllm.attention.backends.triton.interpreted", lambda: False)
    with pytest.raises(BackendUnavailable, match="TRITON_INTERPRET=1"):
        TritonBackend.check_available(replace(CONFIG, device=torch.device("cpu")))


GPU = replace(CONFIG, device=torch.device("cuda"), dtype=torch.float16, head_dim=64, block_size=256)


@pytest.mark.parametrize(
    ("capability", "installed", "change", "message"),
    [
        ((8, 0), True, {"device": torch.device("cpu")}, "CUDA"),
        ((7, 5), True, {}, "8.0"),
        ((8, 0), False, {}, "pip install flash-attn"),
        ((8, 0), True, {"dtype": torch.float32}, "float16 or bfloat16"),
        ((8, 0), True, {"head_dim": 264}, "head_dim"),
        ((8, 0), True, {"block_size": 16}, "multiple of 256"),
    ],
)
def test_flash_attn_says_why_not(monkeypatch, capability, installed, change, message):
    """Each of its demands, on a machine that we only pretend to have."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(
        "folovllm.attention.backends.flash_attn.find_spec", lambda name: object() if installed else None
    )
    with pytest.raises(BackendUnavailable, match=message):
        FlashAttentionBackend.check_available(replace(GPU, **change))


def test_flash_attn_accepts_what_it_can(monkeypatch):
    """And says nothing where all is there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("folovllm.attention.backends.flash_attn.find_spec", lambda name: object())
    FlashAttentionBackend.check_available(GPU)


def test_names_of_two():
    """ "prefill,decode" is a name too; either half must be known, and there are two."""
    assert get_backend("flash_attn,triton").name == "flash_attn,triton"
    for name in ("triton,nothing", "nothing,triton", "triton,triton,triton", "triton,"):
        with pytest.raises(ValueError, match="unknown attention_backend"):
            get_backend(name)
