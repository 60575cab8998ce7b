"""How long sums over GPUs take: `torchrun --standalone --nproc-per-node 2 -m tools.bench_tp`. Rank 0 prints.

Microseconds of one sum of several sizes, ours and NCCL's; of products whose parts the ranks add up, with the sum in a kernel of its
own and in the product's last lines; and of one gather. Each alone, many in a row in a captured graph. How latency and throughput
scale says `folovllm bench latency` or `throughput` with `--random-weights qwen3-8b --compare m6,m6:tensor_parallel_size=2`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import cycle

import torch
import torch.distributed as dist

from folovllm.distributed.group import ProcessGroup
from folovllm.kernels.skinny_linear import skinny_linear
from folovllm.kernels.summed_linear import summed_linear
from tools.gpu import microseconds_a_call

SHAPES = ((1, 1024), (1, 4096), (16, 4096), (64, 4096), (256, 1024), (256, 4096), (4096, 4096))  # [tokens, H]
PRODUCTS = ((2560, 4096), (2560, 9728), (4096, 4096), (4096, 12288))  # [outputs, inputs]: o and down of Qwen3-4B and 8B
CALLS = 72  # all-reduces of a step of 36 layers


def microseconds_of(call: Callable[[], object]) -> float:
    """The median of a call, of many in a graph."""
    return microseconds_a_call(lambda _: call(), range(CALLS), replays=10)


def sums(group: ProcessGroup, tokens: int, hidden: int) -> str:
    """A line about one size."""
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    ours, nccl = microseconds_of(lambda: group.all_reduce(x)), microseconds_of(lambda: dist.all_reduce(x))
    is_one_shot = group._one_shot is not None and group._one_shot.can_handle(x)
    way = "read by everyone" if is_one_shot else "by NCCL"
    return f"sum of {tokens:4} x {hidden}, {x.nbytes:9,} bytes: ours {ours:6.1f} ({way}), NCCL {nccl:6.1f}"


def products(group: ProcessGroup, tokens: int, outputs: int, inputs: int) -> str:
    """A line about a product that ranks share. The weights are never those of the call before, so they come from memory."""
    inputs //= group.size
    weights = torch.randn(2**28 // (outputs * inputs), outputs, inputs, dtype=torch.bfloat16, device="cuda")
    x, residual = (torch.randn(tokens, n, dtype=torch.bfloat16, device="cuda") for n in (inputs, outputs))
    turn = cycle(weights)
    ways: dict[str, Callable[[], object]] = {
        "alone": lambda: skinny_linear(x, next(turn)),
        "and a sum": lambda: group.all_reduce(skinny_linear(x, next(turn))),
    }
    if group.one_shot_buffers is not None:
        ways["with the sum in it"] = lambda: summed_linear(x, next(turn), group.one_shot_buffers, residual)
    times = ", ".join(f"{name} {microseconds_of(way):6.1f}" for name, way in ways.items())
    return f"product of {tokens} x {inputs} with {outputs} outputs: {times}"


def main() -> None:
    """Print the lines; all ranks measure all of it."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = ProcessGroup(rank, size, torch.device("cuda", rank))
    best = torch.zeros(2, 1, dtype=torch.int32, device="cuda")
    lines = [sums(group, *shape) for shape in SHAPES]
    lines += [products(group, tokens, *shape) for tokens in (1, 2, 4) for shape in PRODUCTS]
    lines.append(f"gather of the best: {microseconds_of(lambda: group.all_gather(best)):6.1f}")
    if rank == 0:
        print(f"{size} x {torch.cuda.get_device_name()}, microseconds", *lines, sep="\n")
    group.close()


if __name__ == "__main__":
    main()
