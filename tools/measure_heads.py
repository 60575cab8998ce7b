"""What a draft head costs on a GPU: `python -m tools.measure_heads`.

The milliseconds of a step with three drafts, beside a plain step, with weights from chance (`--geometry`), of which hardly a draft is accepted.

`--rule`: throughput with a head whose draft lengths follow acceptance, divided by that without a head: at least 0.98, whatever the text. Answers to
`tools/speculation/plain.json`, both engines in turns; in the first round the policy learns. Weights from chance are the worst case, for no draft is right.
`--model stories-5m` (or `stories-hybrid --method mtp`) has the embedded models with their heads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from folovllm import LLM, SamplingParams
from tools.beside_vllm import DRAFTS, write_head
from tools.gpu import parser_of, random_weights
from tools.measure_speculation import answer, requests

TOKENS, TASKS = 96, 8  # tokens of an answer where steps are timed; requests in `plain.json`


def step_seconds(llm: LLM, num_seqs: int) -> float:
    """Seconds of a step over so many sequences, the median of three rounds."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    prompts = [[1000 + 7 * i + j for j in range(64)] for i in range(num_seqs)]
    rounds = []
    for _ in range(4):
        before, start = llm.engine.stats().steps, time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        rounds.append((time.perf_counter() - start) / (llm.engine.stats().steps - before))
    return statistics.median(rounds[1:])


def print_steps(args: argparse.Namespace, fields: dict[str, Any], speculative: dict[str, Any]) -> None:
    """Print what a step costs with drafts, always three of them."""
    with LLM(**fields) as llm:
        plain = {n: step_seconds(llm, n) for n in args.at_once}
    with LLM(**fields, speculative_config=speculative | {"adaptive": False}) as llm:
        for n in args.at_once:
            seconds = step_seconds(llm, n)
            print(
                f"{n:4} at once: plain {1e3 * plain[n]:.2f} ms, with {DRAFTS} drafts {1e3 * seconds:.2f} ms, {seconds / plain[n]:.2f} plain steps"
            )


def print_rule(args: argparse.Namespace, fields: dict[str, Any], speculative: dict[str, Any]) -> None:
    """Print throughput with the head over throughput without, of each round. Every second round has the head first."""
    with LLM(**fields) as plain, LLM(**fields, speculative_config=speculative) as drafting:
        for n in args.at_once:
            prompts, params = requests(plain, "plain", 0.0, max(1, n // TASKS * 4))
            ratios, counts = [], drafting.engine.scheduler.speculation  # type: ignore[attr-defined]
            before = counts.num_draft_tokens, counts.num_accepted
            for number in range(args.rounds):
                turns = [plain, drafting][:: 1 if number % 2 == 0 else -1]
                seconds = {llm: answer(llm, prompts, params, n).seconds for llm in turns}
                ratios.append(seconds[plain] / seconds[drafting])
            drafted, accepted = counts.num_draft_tokens - before[0], counts.num_accepted - before[1]
            print(
                f"{n:4} at once: rounds {' '.join(f'{ratio:.3f}' for ratio in ratios)}, behind the first at median {statistics.median(ratios[1:]):.3f}; "
                f"without the head {1e3 * seconds[plain]:.4f} ms a token; {accepted} of {drafted} draft tokens accepted",
                flush=True,
            )


def main() -> None:
    """Print a line for each number of requests."""
    parser = parser_of(__doc__, "qwen3-8b")
    parser.add_argument("--method", choices=["eagle3", "mtp"], default="eagle3")
    parser.add_argument("--model", help="an embedded model, in place of weights from chance")
    parser.add_argument("--rule", action="store_true", help="throughput where draft lengths follow acceptance")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--gpus", type=int, default=1, help="of one model (tensor parallelism)")
    args = parser.parse_args()
    # Two such engines fit on a card.
    common = {"max_num_seqs": max(args.at_once), "num_kv_blocks": 8192, "tensor_parallel_size": args.gpus}
    speculative = {"method": args.method, "num_speculative_tokens": DRAFTS}
    with random_weights(args.geometry, **common, max_model_len=2048) as fields:
        fields = common | {"model": args.model} if args.model else fields
        if args.method == "eagle3":
            speculative["model"] = "stories-eagle3" if args.model else str(write_head(Path(fields["model"])))
        (print_rule if args.rule else print_steps)(args, fields, speculative)


if __name__ == "__main__":
    main()
