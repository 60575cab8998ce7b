"""Ragged prefill over paged K/V against float64, at and around every boundary."""

import pytest
import torch

from folovllm.kernels.prefill import PrefillConfig, prefill
from tests.m4.cases import DEVICE, Paged, assert_close, starts
from tests.tiny import worked_case

TILES = PrefillConfig(16, 16, 4, 2)


def check(lens, query_lens, block_size, heads=(2, 1), dim=16, dtype=torch.float32, config=TILES, bound=None):
    """Run the kernel on random data with NaN wherever it must not read, and compare."""
    torch.manual_seed(0)
    paged = Paged.make(lens, block_size, heads[1], dim, dtype)
    query = torch.randn(sum(query_lens), heads[0], dim, device=DEVICE, dtype=dtype)
    out = torch.full_like(query, float("nan"))
    prefill(query, paged.kv_cache, starts(query_lens), paged.seq_lens, paged.block_tables,
            bound or max(query_lens), dim**-0.5, out, config=config)  # fmt: skip
    says = f"the last {query_lens} of {lens} tokens are new, blocks of {block_size}"
    assert_close(out, paged.attention(query, query_lens), says=says)


def test_a_worked_case():
    """A prompt of 18 tokens, in tiles of 16. All scores are 0, the value of token i is i: the mean of 0 to i is i / 2."""
    paged = Paged.make([18], 16, 1, 16)
    position = torch.arange(18, device=DEVICE)
    blocks = paged.block_tables[0, position // 16]
    paged.kv_cache[1, blocks, position % 16, 0] = position[:, None].float()
    query = torch.zeros(18, 1, 16, device=DEVICE)
    out = prefill(query, paged.kv_cache, starts([18]), paged.seq_lens, paged.block_tables, 18, 0.25, config=TILES)
    rows = [0, 1, 15, 16, 17]
    says = "each token sees those before it and itself, with equal weights, so token i gets i / 2"
    got = {f"token {i}": out[i, 0, 0] for i in rows}
    paged.kv_cache[:, paged.block_tables[0, 1], 2:] = torch.tensor([0.0, 99.0], device=DEVICE).view(2, 1, 1, 1)
    out = prefill(query, paged.kv_cache, starts([18]), paged.seq_lens, paged.block_tables, 18, 0.25, config=TILES)
    got["token 17, with 99 for NaN behind it"] = out[17, 0, 0]
    worked_case("m4.3", got, dict(zip(got, [0.0, 0.5, 7.5, 8.0, 8.5, 8.5], strict=True)), says)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 33])
def test_whole_prompts_around_tile_boundaries(length):
    """All tokens are new: the plain causal case."""
    check([length], [length], block_size=16)


@pytest.mark.parametrize(("length", "new"), [(17, 1), (32, 16), (33, 16), (40, 7), (48, 31), (50, 49)])
def test_the_rest_after_cached_tokens(length, new):
    """Chunks and cached prefixes: queries start in the middle, and see all that is cached before them."""
    check([length], [new], block_size=16)


@pytest.mark.parametrize("block_size", [4, 16, 24, 64])
def test_ragged_batch_in_blocks_of_any_size(block_size):
    """Blocks smaller than a tile, of its size, larger, and of a size that no tile fits into."""
    check([5, 20, 1, 37], [5, 3, 1, 20], block_size)


def test_float16():
    """Half precision in and out, float32 in between."""
    check([20, 33], [20, 10], block_size=16, dim=32, dtype=torch.float16)


@pytest.mark.parametrize(("lens", "new", "options"), [
    *(([19], [9], {"heads": heads}) for heads in ((1, 1), (4, 2), (6, 2), (3, 1))),  # also groups of three
    ([21, 8, 0], [6, 0, 0], {"config": None, "bound": 50}),  # the table's tiles; a loose bound costs programs alone
])  # fmt: skip
def test_grouped_heads_and_default_tiles(lens, new, options):
    """Query head h reads KV head h // (Hq / Hkv). A row may be empty."""
    check(lens, new, block_size=16, **options)


def test_decodes_before_are_left_alone():
    """`first_seq` skips the sequences that the decode kernel serves."""
    paged = Paged.make([9, 20], 16, 1, 16)
    query = torch.randn(6, 2, 16, device=DEVICE)
    out = torch.full_like(query, -5.0)
    prefill(query, paged.kv_cache, starts([1, 5]), paged.seq_lens, paged.block_tables, 5, 0.25, out, 1, TILES)
    assert (out[0] == -5).all()
    assert_close(out[1:], paged.attention(query, [1, 5])[1:])


def test_whole_tiles_are_loaded_without_a_mask(loads):
    """The last 16 of 48 tokens, in blocks of 4: two tiles that all of them see, and one with the diagonal in it."""
    check([48], [16], block_size=4, heads=(1, 1))
    if DEVICE.type == "cuda":
        return  # compiled: there is nothing to see
    _, *others = loads
    kinds = [kind for kind in others if kind != "ids"]
    assert kinds == ["plain"] * 4 + ["masked"] * 2, (
        f"K and V of two tiles without a mask, then those of the last with one, not {kinds}: most of a long prompt needs none"
    )
    assert others[:2] == ["ids"] * 2, f"the ids of a tile are asked for a tile ahead, before the K before it: {others}"


def test_sums_are_float32_whatever_the_queries_are():
    """33 values of 5,000 in float16 add up to 165,000, which has no place there: the largest number is 65,504."""
    paged = Paged.make([33], 16, 1, 16, torch.float16)
    position = torch.arange(33, device=DEVICE)
    paged.kv_cache[1, paged.block_tables[0, position // 16], position % 16] = 5000.0
    query = torch.zeros(33, 1, 16, device=DEVICE, dtype=torch.float16)
    out = prefill(query, paged.kv_cache, starts([33]), paged.seq_lens, paged.block_tables, 33, 0.25, config=TILES)
    assert (out == 5000).all(), f"the mean of equal values is their value, and the last token gets {out[-1, 0, 0]}"


def test_what_a_mask_leaves_out_is_set(like_a_gpu):
    """A masked load needs its `other`: on a GPU what it left out may be anything, a NaN for one."""
    check([20, 33], [20, 10], block_size=16)
