"""What rollouts cost, over random weights of Qwen3-0.6B's geometry: `python tools/measure_rollouts.py` (on a GPU; `--device cpu`).

Prints: seconds to update the weights from tensors on the device and from a file; bytes in use before the engine, while it serves
and asleep, at both levels, and seconds to wake; output tokens a second without and with `batch_invariant`, and their ratio; and how
far the trainer's log-probabilities are from the engine's, in the engine's dtype, without and with it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from folovllm import LLM, SamplingParams
from folovllm.electives.rollouts.demo import engine_logprobs
from folovllm.electives.rollouts.trainer import Policy
from folovllm.models.registry import PLAIN_LAYERS
from tools.gpu import parser_of, random_weights, seconds_of

ROUNDS = 5
PROMPT = list(range(100, 228))


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
            print(f"update from {source}: {statistics.median(taken):.3f} s, of {[round(each, 3) for each in taken]}")


def sleeps(fields: dict[str, Any]) -> None:
    """Memory, asleep and awake."""
    for level in (1, 2):
        if torch.cuda.is_available():
            torch.cuda.init()
            torch.empty(1, device="cuda")
            torch.cuda.empty_cache()
        before = in_use()
        with LLM(**fields) as llm:
            serving = in_use() - before
            asleep = seconds_of(lambda llm=llm, level=level: llm.sleep(level))
            left = in_use() - before
            awake = seconds_of(llm.wake_up)
        share = f", {left / serving:.1%} of it" if serving else ""
        print(
            f"sleep {level}: {serving / 2**30:.2f} GiB in use, asleep {left / 2**30:.2f} GiB{share}; {asleep:.2f} s, awake after {awake:.2f} s"
        )


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
                distance = gap(llm, output.outputs[:4], invariant)
                print(f"n={n}, batch_invariant={invariant}: {speeds[-1]:.0f} tokens/s, {distance}")
        print(f"n={n}: {speeds[0] / speeds[1]:.2f} times slower")


def gap(llm: LLM, answers: list[Any], invariant: bool) -> str:
    """How far the trainer's log-probabilities are from the engine's."""
    distance = logprob_differences(llm, [(PROMPT, answer) for answer in answers], invariant).abs()
    return f"trainer's logprobs: {(distance == 0).float().mean():.1%} equal, mean distance {distance.mean():.2e}, largest {distance.max():.2e}"


def logprob_differences(llm: LLM, answers: list[tuple[list[int], Any]], invariant: bool) -> torch.Tensor:
    """The trainer's log-probability of each token of some answers to prompts, less the engine's."""
    policy = Policy(llm, None if invariant else PLAIN_LAYERS)
    with torch.no_grad():
        found = policy.logprobs([[*p, *a.token_ids] for p, a in answers], [len(p) for p, _ in answers])
    return torch.cat(found).cpu() - torch.cat([engine_logprobs(answer) for _, answer in answers])


def main() -> None:
    """Measure all of it."""
    parser = parser_of(__doc__, "qwen3-0.6b")
    parser.add_argument("--device")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    asked = parser.parse_args()
    print(
        asked.geometry,
        torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        f"torch {torch.__version__}",
        sep=", ",
    )
    with random_weights(asked.geometry, device=asked.device, max_num_seqs=64, max_model_len=1024) as fields:
        with tempfile.TemporaryDirectory() as folder:
            updates(fields, Path(folder))
        sleeps(fields)
        costs(fields, asked.tokens)


if __name__ == "__main__":
    main()
