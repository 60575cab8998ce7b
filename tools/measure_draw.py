"""Time the draw of a recorded step on a GPU, beside torch's with sorts: `python tools/measure_draw.py`.

Microseconds a step, each a replay of a CUDA graph of ten draws; logits as a model makes them, bfloat16, in the L2 cache
as far as they fit, for the language model head has just written them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from folovllm.draw_row import pack_updates, row_update
from folovllm.kernels.gumbel_max import gumbel_max
from folovllm.sample.draw_state import DrawState, adjust, sampling_batch
from folovllm.sample.sampler import Sampler
from folovllm.step.draw import DrawSpec

VOCAB_SIZE = 151_936
CASES = {
    "plain": DrawSpec(temperature=0.7),
    "top_k 50, top_p 0.9": DrawSpec(temperature=0.7, top_k=50, top_p=0.9),
    "top_k 50": DrawSpec(temperature=0.7, top_k=50),
    "top_p 0.9": DrawSpec(temperature=0.7, top_p=0.9),
    "min_p 0.05": DrawSpec(temperature=0.7, min_p=0.05),
    "top_p 0.9, hot (more than fit)": DrawSpec(temperature=3.0, top_p=0.9),
    "penalties": DrawSpec(temperature=0.7, repetition_penalty=1.1, presence_penalty=0.5),
    "penalties, top_k 50, top_p 0.9": DrawSpec(temperature=0.7, repetition_penalty=1.1, top_k=50, top_p=0.9),
}


def model_like(count: int) -> torch.Tensor:
    """Logits [count, V] bfloat16: a wide bulk, and some dozens of tokens that stand out."""
    logits = 2.5 * torch.randn(count, VOCAB_SIZE, device="cuda")
    likely = torch.randint(0, VOCAB_SIZE, (count, 60), device="cuda")
    return logits.scatter_add_(1, likely, 14 * torch.rand(count, 60, device="cuda")).bfloat16()


def microseconds(work: Callable[[], object], calls: int = 10) -> float:
    """The median of some replays of a graph of `calls` calls, for one call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / calls)
    return statistics.median(times[2:])


def measure(num_seqs: int, params: DrawSpec, with_torch: bool) -> tuple[float, float, float]:
    """Microseconds of `gumbel_max`, of `DrawState.draw` with `note`, and of torch's draw (nan: not measured)."""
    state = DrawState(num_seqs, VOCAB_SIZE, torch.device("cuda"))
    history = np.array([*range(100, 600), *range(50)], np.int32)
    specs = [replace(params, seed=i, num_prompt_tokens=500, history=history) for i in range(num_seqs)]
    update = pack_updates([row_update(i, spec) for i, spec in enumerate(specs)])
    state.set_rows(torch.from_numpy(update.buffer).cuda(), update.num_rows, update.num_with_line)
    logits, rows = model_like(num_seqs), torch.arange(num_seqs, dtype=torch.int32, device="cuda")
    positions = rows + 700
    temperature, low = torch.full((num_seqs,), params.temperature, device="cuda"), rows
    batch = sampling_batch(state.fields[:num_seqs], positions)
    batch.min_p = batch.min_p if params.min_p > 0 else None  # as a host that knows which filters are in use
    batch.top_k = batch.top_k if params.top_k > 0 else None
    batch.top_p = batch.top_p if params.top_p < 1 else None
    plain = microseconds(lambda: gumbel_max(logits, temperature, low, low, positions))
    drawn = microseconds(lambda: state.note(state.draw(logits, rows, positions), rows, positions))
    if not with_torch:
        return plain, drawn, float("nan")

    def by_torch() -> None:
        Sampler().sample(adjust(logits, state.fields[:num_seqs], state.words, rows, positions), batch)

    return plain, drawn, microseconds(by_torch, 1)


def main() -> None:
    """A line for each case and number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--no-torch", action="store_true", help="leave out torch's draw")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, V = {VOCAB_SIZE}, bfloat16; microseconds a step")
    print(f"{'':32}{'S':>5}{'gumbel_max':>12}{'draw + note':>12}{'torch':>12}")
    for name, params in CASES.items():
        for num_seqs in args.num_seqs:
            plain, drawn, by_torch = measure(num_seqs, params, not args.no_torch)
            print(f"{name:32}{num_seqs:>5}{plain:>12.1f}{drawn:>12.1f}{by_torch:>12.1f}", flush=True)


if __name__ == "__main__":
    main()
