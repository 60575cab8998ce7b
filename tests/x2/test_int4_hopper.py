"""The product of 17 to 256 tokens with codes of 4 bits: for Hopper's own matrix units, so most of it needs such a card."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton.experimental.gluon", reason="Triton is for Linux only")

from folovllm.electives.hopper import int4
from folovllm.electives.hopper.int4 import MOST, int4_hopper, is_supported, kernel_config
from folovllm.electives.quantization.int4 import Grouped
from folovllm.electives.quantization.kernels.quant_matmul import MANY, unpacked
from folovllm.kernels.split_sum import MOST_TILES
from folovllm.worker.warm_up import small_steps
from tests.x2.test_int4_kernels import Kept, made_up, weight_of

GROUP = 128
ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernel is for Hopper"
    ),
]


@given(st.integers(129, 256), st.integers(1, 40_000), st.integers(1, 200), st.integers(2, 200))
def test_a_tile_of_many_tokens_has_two_parts_at_most(tokens: int, rows: int, groups: int, sms: int) -> None:
    """Registers have no room for a second sum beside one of 256 tokens; and there is no program without work."""
    tile, programs = kernel_config(tokens, rows, groups * GROUP, sms)
    tiles = -(-rows // GROUP) * -(-tokens // tile)
    work = tiles * groups
    assert 1 <= programs <= min(sms, work)
    begins = [program * work // programs for program in range(programs + 1)]
    assert begins[-1] == work and all(a < b for a, b in pairwise(begins))
    if tile == 256:
        assert min(b - a for a, b in pairwise(begins)) >= groups


@given(st.integers(1, 300), st.integers(2, 40), st.data())
def test_each_part_of_a_tile_has_a_place_of_its_own(tiles: int, groups: int, data: st.DataObject) -> None:
    """Who has a unit is found without a search, and what a program leaves for one tile lies beside what it leaves for another."""
    work = tiles * groups
    programs = data.draw(st.integers(1, min(work, 200)))
    with pytest.MonkeyPatch.context() as patch:  # as plain functions
        patch.setattr(int4, "gl", SimpleNamespace(num_programs=lambda _: programs, int32=torch.int32))
        program_of, part_of = int4.program_of.fn, int4.part_of.fn
        patch.setattr(int4, "first_unit", int4.first_unit.fn)
        units = torch.arange(work)
        begins = torch.arange(programs + 1) * work // programs
        owner = program_of(units, work)
        assert torch.equal(owner, torch.searchsorted(begins, units, right=True) - 1)
        first = units // groups * groups
        parts = torch.stack([part_of(owner, first, which, work, 1) for which in (0, 1)], 1)
    shared = owner[first] != owner[first + groups - 1]  # the others are left by nobody
    left = {
        (int(p), int(f)): tuple(at)
        for p, f, at in zip(owner[shared], first[shared], parts[shared].tolist(), strict=True)
    }
    places = [place for both in left.values() for place in both]
    assert len(set(places)) == len(places) and all(0 <= place < 4 * programs for place in places)


@given(st.integers(1, 1 << 20), st.integers(2, 64), st.integers(16, 200))
def test_there_are_counters_for_all_tiles(rows: int, groups: int, sms: int) -> None:
    tile, _ = kernel_config(MOST, rows, groups * GROUP, sms)
    assert 4 * -(-rows // GROUP) * -(-MOST // tile) <= MOST_TILES


@given(st.integers(1, 400), st.integers(1, 9000), st.integers(1, 400))
def test_the_start_has_a_step_of_so_many_tokens(max_model_len: int, budget: int, max_num_seqs: int) -> None:
    """If there can be one."""
    setup = SimpleNamespace(
        max_model_len=max_model_len, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, block_size=16,
        attention=SimpleNamespace(long_prompts=False), hf_config=SimpleNamespace(quantization_config={"bits": 4}),
    )  # fmt: skip
    can_be = min(budget, max_num_seqs * max_model_len) >= MANY
    assert not can_be or any(MANY <= step.num_tokens <= MOST for step in small_steps(setup))


@given(st.integers(MANY, MOST), st.integers(1, 40_000), st.integers(2, 200), st.integers(16, 200))
def test_one_such_step_has_compiled_for_all(tokens: int, rows: int, groups: int, sms: int) -> None:
    assert kernel_config(tokens, rows, groups * GROUP, sms)[0] == kernel_config(MOST, rows, groups * GROUP, sms)[0]


def poison(like: torch.Tensor) -> None:
    """Fill memory that a product is about to get: what is not written shows."""
    filled = [torch.full_like(like, float("nan")), torch.full((16 << 20,), float("nan"), device=like.device)]
    filled.clear()


def multiplied(x: torch.Tensor, kept: Kept, residual: torch.Tensor | None = None) -> torch.Tensor:
    assert is_supported(x, kept[1], kept[2])
    poison(x.new_empty(len(x), len(kept[0])))
    return int4_hopper(x, *kept, residual)


class TestOnHopper:
    """Few outputs, whose tiles many programs share; and enough for tiles of 256 tokens."""

    pytestmark = ON_HOPPER

    @pytest.mark.parametrize("with_residual", [False, True])
    @pytest.mark.parametrize(
        ("outputs", "inputs", "zeros"),
        [(1, 256, "codes"), (1000, 4096, "none"), (130, 9728, "codes"), (17_001, 640, "none")],
    )
    def test_as_in_double_precision(self, outputs: int, inputs: int, zeros: str, with_residual: bool) -> None:
        kept, weight = made_up(outputs, inputs, GROUP, zeros)
        for tokens in (17, 64, 100, 129, 200, 256):
            x = torch.randn(tokens, inputs + 16, device="cuda").to(torch.bfloat16)[:, :inputs]
            residual = torch.randn(tokens, outputs, device="cuda").to(torch.bfloat16) if with_residual else None
            expected = x.double() @ weight.to("cuda").t() + (0 if residual is None else residual.double())
            y = multiplied(x, kept, residual)
            assert (y.double() - expected).norm() <= 0.006 * expected.norm()
            assert all(torch.equal(y, multiplied(x, kept, residual)) for _ in range(3)), "the same bits again"

    @pytest.mark.parametrize("zeros", ["none", "codes"])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_multiplies_by_the_very_weights(self, zeros: str, dtype: torch.dtype) -> None:
        """A row of x with a single one picks an input's weights: those that the library is given."""
        (words, scales, kept), _ = made_up(300, 256, GROUP, zeros)
        grouped = words, scales.to(dtype), kept
        x = torch.eye(256, dtype=torch.bfloat16, device="cuda")
        assert torch.equal(multiplied(x, grouped), unpacked(weight_of(*grouped), torch.bfloat16).t())

    def test_a_token_does_not_depend_on_others(self) -> None:
        """The same bits beside others and beside none that are numbers; what is behind the last token is not read."""
        kept, _ = made_up(2560, 1024, GROUP, "none")
        x = torch.randn(256, 1024, device="cuda").to(torch.bfloat16)
        y = multiplied(x, kept)
        broken = x.clone()
        broken[150:] = float("nan")
        assert torch.equal(multiplied(broken, kept)[:150], y[:150])
        assert torch.equal(multiplied(broken[:150], kept), y[:150])

    @pytest.mark.parametrize(("inputs", "zeros"), [(512, "none"), (512, "minimums"), (128, "none")])
    def test_a_layer_takes_what_serves(self, inputs: int, zeros: str) -> None:
        """With minimums, in other dtypes, of one group and with inputs in another order the product is right, too."""
        (words, scales, kept), weight = made_up(384, inputs, GROUP, zeros)
        order = torch.randperm(inputs, device="cuda")
        layer = Grouped(words, scales, kept, order=order)
        for dtype in (torch.bfloat16, torch.float16):
            x = torch.randn(200, inputs, device="cuda").to(dtype)
            expected = x.double()[:, order] @ weight.to("cuda").t()
            assert (layer.product(x).double() - expected).norm() <= 0.006 * expected.norm()
