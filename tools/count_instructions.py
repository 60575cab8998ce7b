"""How long one token's products take at least, by their bytes and by their instructions: `python -m tools.count_instructions`. Needs no GPU.

Triton compiles each product of a layer for sm_90, and the instructions of its machine code are counted. All loops are unrolled, so each warp executes each
instruction once. The card's 528 schedulers issue an instruction a cycle each; the unit for integers takes one every second cycle. The largest of the three
times (bytes, issue, integers) is the least that a product can take. It does not include waits for inputs, loads and barriers, nor the start and end of a
kernel. Also printed: how many warps a scheduler gets, and how many instructions a warp has.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch

from tests.m4 import offline_compile as offline

SCHEDULERS, CLOCK, BANDWIDTH = 528, 1.75e9, 4.25e12  # 132 x 4; hertz; bytes a second of a copy on an H200
INTEGERS = set("LOP3 PLOP3 SHF PRMT IADD3 ISETP SEL LEA MOV IABS VIMNMX FSETP FMNMX FSEL SGXT".split())  # noqa: SIM905
# Hidden size, heads, KV heads, size of the MLP.
SIZES = {"qwen3-4b": (2560, 32, 8, 9728), "qwen3-8b": (4096, 32, 8, 12288)}
FORMATS = {"bf16": 16, "fp8": 8 + 32 / 128**2, "int4": 4 + 16 / 128}  # bits a weight, scales included
# Of each launch: us of issue, us of the unit for integers, warps a scheduler, instructions a warp.
counted: list[tuple[float, float, float, int]] = []


def count_instead(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Compile a kernel instead of launching it, and append its times to `counted`."""
    compiled = offline.launch(kernel, *args, grid=grid, warmup=True, **kwargs)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [offline.triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9]*)[^;]*?(0x[0-9a-f]+)? ?;", code)
    is_loop = any(name == "BRA" and int(to, 16) < int(at, 16) for at, name, to in lines)
    assert not is_loop, f"{kernel.__name__} has a loop"
    names = Counter(name for _, name, _ in lines if name != "NOP")
    warps = grid[0] * compiled.metadata.num_warps / SCHEDULERS
    each, integers = 1e6 * warps / CLOCK, sum(count for name, count in names.items() if name in INTEGERS)
    counted.append((each * names.total(), 2 * each * integers, warps, names.total()))


def products(size: str) -> dict[str, tuple[int, int, bool]]:
    """Return of each of a layer's four products the rows of weights, the inputs, and whether it is gated."""
    hidden, heads, kv_heads, mlp = SIZES[size]
    return {
        "QKV": ((heads + 2 * kv_heads) * 128, hidden, False),
        "output": (hidden, heads * 128, False),
        "gate and up": (2 * mlp, hidden, True),
        "down": (hidden, mlp, False),
    }


def launch(kind: str, rows: int, width: int, gated: bool, norm: bool) -> None:
    """One product of one token, as a layer calls it."""
    eps, outputs = 1e-6 if norm else None, rows // (1 + gated)
    x, residual = offline.new(1, width), None if norm else offline.new(1, outputs)
    if kind == "bf16":
        offline.skinny_linear(x, offline.new(rows, width), eps, gated, residual)
        return
    weight = offline.in_4_bits(rows, width, 128) if kind == "int4" else offline.in_8_bits(rows, width, kind)
    offline.quant_gemv(x, weight, eps, gated, residual, offline.new(width) if norm else None)


def main() -> None:
    """Print a table for each size."""
    offline.JITFunction.run = count_instead
    torch.Tensor.is_cuda, torch.Tensor.device = property(lambda _: True), property(lambda _: offline.CUDA)  # type: ignore[assignment, method-assign]
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)  # type: ignore[assignment, return-value]
    with offline.OnTheCpu():
        offline.pretend_card(90)
        for size in SIZES:
            print(f"{size}, 1 token, us: bytes, issue, integers, the largest; warps a scheduler, instructions a warp")
            for kind, bits in FORMATS.items():
                total = [0.0] * 4
                for name, (rows, width, gated) in products(size).items():
                    counted.clear()
                    launch(kind, rows, width, gated, name in ("QKV", "gate and up"))
                    [(issue, integers, warps, instructions)] = counted
                    memory = 1e6 * rows * width * bits / 8 / BANDWIDTH
                    row = [memory, issue, integers, max(memory, issue, integers)]
                    total = [a + b for a, b in zip(total, row, strict=True)]
                    print(
                        f"  {kind:5} {name:12}" + "".join(f"{us:8.2f}" for us in row) + f"{warps:8.1f}{instructions:8}",
                        flush=True,
                    )
                print(f"  {kind:5} {'a layer':12}" + "".join(f"{us:8.2f}" for us in total), flush=True)


if __name__ == "__main__":
    main()
