"""Every kernel compiles for the cards people have, and keeps to what they have of registers and shared memory: no GPU needed."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.kernel_modules import kernel_modules

ROOT = Path(__file__).parents[2]
# By milestone the kernels, all of which sm_90 has, with the most registers of a thread, and bytes of stack, where what does not fit
# into registers goes: what Triton 3.6 and 3.7 make of a kernel on sm_80 and sm_90, and a little more. A stack is memory, and slow.
MOST = {
    "m4": {
        "prefill_kernel": (255, 0), "decode_kernel": (255, 16), "qk_norm_rope_store_kernel": (72, 0), "store_kvcache_kernel": (32, 0),
        "plan_kernel": (40, 0), "add_rms_norm_kernel": (40, 0), "deferred_add_rms_norm_kernel": (40, 0), "act_and_mul_kernel": (48, 0),
    },
    "m6": {
        "gumbel_max_kernel": (96, 0), "best_of_tiles_kernel": (24, 0), "scan_kernel": (128, 0), "finish_kernel": (128, 16),
        "plain_kernel": (80, 0), "special_kernel": (128, 0), "record_sampled_kernel": (40, 0), "unpack_decode_kernel": (48, 0),
        "unpack_ragged_kernel": (64, 0), "list_tiles_kernel": (40, 0), "skinny_linear_kernel": (255, 0),
        "summed_linear_kernel": (255, 0), "prefill_hopper_kernel": (168, 0), "prefetching_decode_kernel": (255, 0),
    },
    "x2": {
        "quant_gemv_kernel": (176, 0), "integer_gemv_kernel": (176, 112), "quant_matmul_kernel": (255, 0), "unpack_kernel": (64, 0),
        "int4_linear_kernel": (255, 0), "quantize_rows_kernel": (72, 0), "fp8_linear_kernel": (224, 0),
    },
    "x3": {
        "verify_kernel": (255, 0), "merge_verify_kernel": (96, 0), "list_verify_tiles_kernel": (48, 0), "plan_verify_kernel": (40, 0),
        "pair_up_kernel": (40, 0), "keep_kernel": (40, 0), "chain_start_kernel": (48, 0),
    },
    "x4": {
        "grouped_linear_kernel": (255, 0), "grouped_quant_kernel": (255, 0), "choose_kernel": (128, 0), "late_combine_kernel": (40, 0),
        "moe_gemv_kernel": (96, 0), "grouped_hopper_kernel": (255, 0), "order_kernel": (168, 0),
    },
    "x5": {
        "short_conv_kernel": (80, 0), "delta_decode_kernel": (88, 0), "delta_draft_kernel": (168, 0), "prepare_kernel": (255, 0), "scan_kernel": (255, 80), "gated_norm_kernel": (40, 0),
    },
    "x6": {"invariant_linear_kernel": (144, 16), "invariant_attention_kernel": (255, 16)},
    "x7": {"move_pieces_kernel": (48, 0)},
}  # fmt: skip
WITHIN_ANOTHER = {"combine_kernel"}  # never launched
STACK_OF_WIDE_HEADS = 64  # of the attention kernels where D is 256


def compiled(milestone: str) -> dict[str, list[dict]]:
    """In a process of its own, since here Triton may be interpreting. Compiled kernels stay in Triton's cache."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.m4.offline_compile", milestone]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


BEFORE_A_RELEASE = pytest.mark.skipif("FOLOVLLM_RELEASE" not in os.environ, reason="takes minutes: `make release`")


@pytest.mark.slow
@pytest.mark.timeout(900)  # five cards in one process, which imports torch once
@pytest.mark.parametrize("milestone", [
    "m4",
    pytest.param("m6", marks=pytest.mark.m6),
    *(pytest.param(f"x{i}", marks=[getattr(pytest.mark, f"x{i}"), BEFORE_A_RELEASE]) for i in range(2, 8)),
])  # fmt: skip
def test_compiles_and_fits(milestone):
    found = compiled(milestone)
    assert list(found) == ["75", "80", "86", "89", "90"]
    for capability, rows in found.items():
        check(int(capability), milestone, rows)


IN_REGISTERS = [f"{name}_kernel" for name in (  # weights that a program asks for ahead of time
    "prefetching_decode", "moe_gemv", "skinny_linear", "summed_linear", "quant_gemv", "int4_linear")]  # fmt: skip
OF_SUMS = ("quant_gemv_kernel", "integer_gemv_kernel")  # through shared memory go sums of several warps alone


def check(capability: int, milestone: str, rows: list[dict]) -> None:
    where = f"on sm_{capability}"
    if capability == 90:
        assert {row["kernel"] for row in rows} == MOST[milestone].keys()
    assert rows or (capability, milestone) == (75, "x3")
    too_large = [row for row in rows if row["shared"] > row["limit"]]
    assert not too_large, f"more shared memory than a block can have {where}"
    too_many = [row for row in rows if row["registers"] * row["warps"] * 32 > 65536]
    assert not too_many, f"more registers than there are {where}"
    assert not [row for row in rows if row["stack"] and row["kernel"] in IN_REGISTERS], where
    assert not [row for row in rows if row["kernel"] in OF_SUMS and row["shared"] > row["warps"] // 2 * 1024], where
    for row in rows if capability in (80, 90) else ():
        registers, stack = MOST[milestone][row["kernel"]]
        is_wide = row["kernel"] in ("prefill_kernel", "decode_kernel") and "'D': 256" in row["shape"]
        stack += STACK_OF_WIDE_HEADS * is_wide
        assert row["registers"] <= registers and row["stack"] <= stack, f"{row} {where}"


def test_no_kernel_is_left_out():
    pytest.importorskip("triton.compiler")
    modules = map(import_module, kernel_modules())
    names = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert names - WITHIN_ANOTHER == {name for most in MOST.values() for name in most}
