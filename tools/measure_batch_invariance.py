"""The tables of chapter X6, on a CPU with one thread, about a minute: `python tools/measure_batch_invariance.py`.

Prints: which products give a row the same bits; how far engine and trainer are apart on the embedded model, without and with
`batch_invariant`; and the processor time of a decode step, without and with it.
"""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from folovllm import LLM, SamplingParams
from folovllm.electives.rollouts.demo import prompt_of
from folovllm.electives.rollouts.demo_options import COLOURS
from tools.measure_rollouts import logprob_differences

SHAPES = ((192, 512), (256, 768), (256, 1536), (768, 256), (1024, 3072))  # inputs, outputs
ROWS = (1, 2, 3, 4, 8, 16, 32, 64)
ENGINE: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 64, "num_kv_blocks": 1000}


def products() -> None:
    """Print, for products of few rows, in how many shapes of weights their rows are the same bits as in other products."""
    equal, anywhere = dict.fromkeys(ROWS, 0), dict.fromkeys(ROWS, 0)
    for inputs, outputs in SHAPES:
        x, w = torch.randn(256, inputs), torch.randn(outputs, inputs)
        for rows in ROWS:
            used = x[: len(x) // rows * rows]
            parts = torch.cat([F.linear(part, w) for part in used.split(rows)])
            turned = [(places, [part.roll(places, 0) for part in used.split(rows)]) for places in range(1, rows)]
            moved = [torch.cat([F.linear(part, w).roll(-places, 0) for part in each]) for places, each in turned]
            equal[rows] += torch.equal(parts, F.linear(x, w)[: len(used)])
            anywhere[rows] += all(torch.equal(parts, each) for each in moved)
    for name, counts in (("as in a product of 256 rows", equal), ("wherever the row stands", anywhere)):
        print(f"equal {name}, of {len(SHAPES)} shapes: {', '.join(f'{n} rows {count}' for n, count in counts.items())}")


def distances(dtype: str, batch_invariant: bool) -> torch.Tensor:
    """Return how far the importance ratio of each sampled token is from 1, for 32 answers of 40 tokens."""
    params = SamplingParams(n=8, temperature=1.0, max_tokens=40, logprobs=0, seed=0, ignore_eos=True)
    with LLM(dtype=dtype, batch_invariant=batch_invariant, use_tqdm=False, **ENGINE) as llm:
        prompts = [prompt_of(llm, colour) for colour in COLOURS[:4]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers = [(p, answer) for p, output in zip(prompts, outputs, strict=True) for answer in output.outputs]
        return (logprob_differences(llm, answers, batch_invariant).exp() - 1).abs()


def milliseconds(n: int, batch_invariant: bool, count: int = 40) -> float:
    """Return the processor time of a decode step of `n` sequences."""
    params = SamplingParams(n=n, temperature=1.0, max_tokens=count, seed=0, ignore_eos=True)
    with LLM(batch_invariant=batch_invariant, use_tqdm=False, **ENGINE) as llm:
        taken = []
        for _ in range(4):
            start = time.process_time()
            llm.generate([prompt_of(llm, "blue")], params, use_tqdm=False)
            taken.append(time.process_time() - start)
    return 1e3 * min(taken[1:]) / count


def main() -> None:
    """Print all of it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, one thread, {torch.backends.cpu.get_cpu_capability()}")
    products()
    for batch_invariant, dtype in product((False, True), ("float32", "bfloat16")):
        gap = distances(dtype, batch_invariant)
        name = f"{dtype}, {'batch-invariant' if batch_invariant else 'plain'}"
        print(f"{name}: equal {(gap == 0).float().mean():.0%}, mean {gap.mean():.1e}, largest {gap.max():.1e}")
    for n in (1, 64):
        plain, invariant = milliseconds(n, False), milliseconds(n, True)
        print(f"{n} sequences: {plain:.1f} and {invariant:.1f} ms a step, {invariant / plain:.1f} times as long")


if __name__ == "__main__":
    main()
