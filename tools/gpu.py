"""How long work takes on a GPU, and what the card itself reaches: what the benchmarks of kernels share."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch

from folovllm.apps.bench.roofline import Rates, measure_rates


def microseconds(work: Callable[[], object], replays: int = 20, as_graph: bool = True) -> float:
    """Median time of `work`, captured as a graph. Replays follow each other, so the host's part is hidden."""
    work()  # compiles
    torch.cuda.synchronize()
    run = captured(work) if as_graph else work
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 3)]
    for event in events:
        event.record()
        run()
    torch.cuda.synchronize()
    return 1e3 * median(begin.elapsed_time(end) for begin, end in pairwise(events[2:]))  # the first two only warm up


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """The work as a graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def card_rates() -> Rates:
    """Bytes a second of a copy and FLOP/s of a bfloat16 product, measured and printed. Ends the program where there is no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    rates = measure_rates(torch.device("cuda"), torch.bfloat16)
    name, copy, matmul = torch.cuda.get_device_name(), rates.copy / 1e12, rates.matmul / 1e12
    print(f"{name}: copy {copy:.2f} TB/s, bfloat16 {matmul:.0f} TFLOP/s", flush=True)
    return rates
