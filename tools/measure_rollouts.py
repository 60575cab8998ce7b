"""What rollouts cost, over random weights of Qwen3-0.6B's geometry: `python tools/measure_rollouts.py` (on a GPU; `--device cpu`).

Prints: seconds to update the weights from tensors on the device and from a file; bytes in use before the engine, while it serves
and asleep, at both levels, and seconds to wake; output tokens a second without and with `batch_invariant`, and their ratio; and how
far the trainer's log-probabilities are from the engine's, in the engine's dtype, without and with it.

`--chapter` prints the tables of chapter X6 instead, on a CPU with one thread, about a minute: which products give a row the same
bits; how far engine and trainer are apart on the embedded model; and the processor time of a decode step.
"""

from __future__ import annotations

import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from folovllm import LLM, SamplingParams
from folovllm.electives.rollouts.demo import engine_logprobs, prompt_of
from folovllm.electives.rollouts.demo_options import COLOURS
from folovllm.electives.rollouts.trainer import Policy
from folovllm.models.registry import PLAIN_LAYERS
from tools.gpu import parser_of, random_weights, seconds_of

ROUNDS = 5
PROMPT = list(range(100, 228))
SHAPES = ((192, 512), (256, 768), (256, 1536), (768, 256), (1024, 3072))  # inputs, outputs
ROWS = (1, 2, 3, 4, 8, 16, 32, 64)
EMBEDDED: dict[str, Any] = {
    "device": "cpu", "max_model_len": 256, "max_num_seqs": 64, "num_kv_blocks": 1000, "use_tqdm": False,
}  # fmt: skip


def in_use() -> int:
    """Bytes of the card that are taken, by whomever."""
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    return total - free


def updates(fields: dict[str, Any], folder: Path) -> None:
    """Weights in place, from the device and from a file."""
    with LLM(**fields) as llm:
        weights = {name: w.clone() for name, w in llm.get_weights().items()}
        save_file({name: w.cpu().contiguous() for name, w in weights.items()}, folder / "model.safetensors")
        for source, given in (("tensors on the device", weights), ("a file", folder)):
            taken = [seconds_of(lambda given=given: llm.update_weights(given)) for _ in range(ROUNDS)]
            print(f"update from {source}: {median(taken):.3f} s, of {[round(each, 3) for each in taken]}")


def sleeps(fields: dict[str, Any], level: int) -> None:
    """Memory, asleep and awake."""
    if torch.cuda.is_available():
        torch.empty(1, device="cuda")  # what CUDA itself takes is there before
        torch.cuda.empty_cache()
    before = in_use()
    with LLM(**fields) as llm:
        serving = in_use() - before
        asleep = seconds_of(lambda: llm.sleep(level))
        left = in_use() - before
        awake = seconds_of(llm.wake_up)
    share = f", {left / serving:.1%} of it" if serving else ""
    print(f"sleep {level}: {serving / 2**30:.2f} GiB in use, asleep {left / 2**30:.2f} GiB{share}; ", end="")
    print(f"{asleep:.2f} s, awake after {awake:.2f} s")


def costs(fields: dict[str, Any], tokens: int) -> None:
    """Batch invariance as a ratio of speeds, and what it buys."""
    for n in (1, 64):
        speeds = []
        for invariant in (False, True):
            with LLM(**fields, batch_invariant=invariant) as llm:
                params = SamplingParams(n=n, temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, seed=0)
                llm.generate([PROMPT], params, use_tqdm=False)
                start = time.perf_counter()
                (output,) = llm.generate([PROMPT], params, use_tqdm=False)
                speeds.append(n * tokens / (time.perf_counter() - start))
                gap = logprob_differences(llm, [(PROMPT, answer) for answer in output.outputs[:4]], invariant).abs()
                print(f"n={n}, batch_invariant={invariant}: {speeds[-1]:.0f} tokens/s, trainer's logprobs: {told(gap)}")
        print(f"n={n}: {speeds[0] / speeds[1]:.2f} times slower")


def told(gap: torch.Tensor) -> str:
    """Distances in words."""
    return f"{(gap == 0).float().mean():.1%} equal, mean distance {gap.mean():.2e}, largest {gap.max():.2e}"


def logprob_differences(llm: LLM, answers: list[tuple[list[int], Any]], invariant: bool) -> torch.Tensor:
    """The trainer's log-probability of each token of some answers to prompts, less the engine's."""
    policy = Policy(llm, None if invariant else PLAIN_LAYERS)
    with torch.no_grad():
        found = policy.logprobs([[*p, *a.token_ids] for p, a in answers], [len(p) for p, _ in answers])
    return torch.cat(found).cpu() - torch.cat([engine_logprobs(answer) for _, answer in answers])


def products() -> None:
    """Print, for products of few rows, in how many shapes of weights their rows are the same bits as in other products."""
    equal, anywhere = dict.fromkeys(ROWS, 0), dict.fromkeys(ROWS, 0)
    for (inputs, outputs), rows in product(SHAPES, ROWS):
        x, w = torch.randn(256, inputs), torch.randn(outputs, inputs)
        used = x[: len(x) // rows * rows].split(rows)
        parts = torch.cat([F.linear(part, w) for part in used])
        turned = (torch.cat([F.linear(part.roll(n, 0), w).roll(-n, 0) for part in used]) for n in range(1, rows))
        equal[rows] += torch.equal(parts, F.linear(x, w)[: len(parts)])
        anywhere[rows] += all(torch.equal(parts, each) for each in turned)
    for name, counts in (("as in a product of 256 rows", equal), ("wherever the row stands", anywhere)):
        print(f"equal {name}, of {len(SHAPES)} shapes: {', '.join(f'{n} rows {count}' for n, count in counts.items())}")


def ratios(dtype: str, batch_invariant: bool) -> torch.Tensor:
    """Return how far the importance ratio of each sampled token is from 1, for 32 answers of 40 tokens."""
    params = SamplingParams(n=8, temperature=1.0, max_tokens=40, logprobs=0, seed=0, ignore_eos=True)
    with LLM(dtype=dtype, batch_invariant=batch_invariant, **EMBEDDED) as llm:
        prompts = [prompt_of(llm, colour) for colour in COLOURS[:4]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers = [(p, answer) for p, output in zip(prompts, outputs, strict=True) for answer in output.outputs]
        return (logprob_differences(llm, answers, batch_invariant).exp() - 1).abs()


def milliseconds(n: int, batch_invariant: bool, count: int = 40) -> float:
    """Return the processor time of a decode step of `n` sequences."""
    params = SamplingParams(n=n, temperature=1.0, max_tokens=count, seed=0, ignore_eos=True)
    with LLM(batch_invariant=batch_invariant, **EMBEDDED) as llm:
        taken = []
        for _ in range(4):
            start = time.process_time()
            llm.generate([prompt_of(llm, "blue")], params, use_tqdm=False)
            taken.append(time.process_time() - start)
    return 1e3 * min(taken[1:]) / count


def chapter() -> None:
    """Print the chapter's tables."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, one thread, {torch.backends.cpu.get_cpu_capability()}")
    products()
    for invariant, dtype in product((False, True), ("float32", "bfloat16")):
        print(f"{dtype}, {'batch-invariant' if invariant else 'plain'}: {told(ratios(dtype, invariant))}")
    for n in (1, 64):
        plain, invariant = milliseconds(n, False), milliseconds(n, True)
        print(f"{n} sequences: {plain:.1f} and {invariant:.1f} ms a step, {invariant / plain:.1f} times as long")


def main() -> None:
    """Measure all of it."""
    parser = parser_of(__doc__, "qwen3-0.6b")
    parser.add_argument("--device")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--chapter", action="store_true", help="the tables of chapter X6")
    asked = parser.parse_args()
    if asked.chapter:
        chapter()
        return
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{asked.geometry}, {card}, torch {torch.__version__}")
    with random_weights(asked.geometry, device=asked.device, max_num_seqs=64, max_model_len=1024) as fields:
        with tempfile.TemporaryDirectory() as folder:
            updates(fields, Path(folder))
        for level in (1, 2):
            sleeps(fields, level)
        costs(fields, asked.tokens)


if __name__ == "__main__":
    main()
