"""Time guessing beside plain decoding: `python -m tools.measure_speculation --method ngram`.

CPU seconds (on a GPU: seconds) for each token of the answers to `tools/speculation/*.json`, one request at a time or
`--batch` of them, in turns: plain, with guesses, plain, ... The texts are compared, too: they must be the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from folovllm import LLM, SamplingParams
from folovllm.structured_outputs import StructuredOutputsParams

FOLDER = Path(__file__).parent / "speculation"


def requests(llm: LLM, name: str, temperature: float) -> tuple[list[str], list[SamplingParams]]:
    """The prompts of a set, and how they are answered."""
    tasks = json.loads((FOLDER / f"{name}.json").read_text())
    render = llm.get_tokenizer().apply_chat_template
    prompts = [render(task["messages"], tokenize=False, add_generation_prompt=True) for task in tasks]
    params = [
        SamplingParams(
            temperature=temperature,
            seed=i,
            max_tokens=task["max_tokens"],
            structured_outputs=StructuredOutputsParams(**task["form"]) if task["form"] else None,
        )
        for i, task in enumerate(tasks)
    ]
    return prompts, params


def answer(llm: LLM, prompts: list[str], params: list[SamplingParams], batch: int) -> tuple[float, list[list[int]]]:
    """Seconds a token, and the answers."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    start, answers = clock(), []
    for i in range(0, len(prompts), batch):
        outputs = llm.generate(prompts[i : i + batch], params[i : i + batch], use_tqdm=False)
        answers += [list(output.outputs[0].token_ids) for output in outputs]
    return (clock() - start) / sum(map(len, answers)), answers


def main() -> None:
    """Print a line for each set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="stories-5m")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--draft", default=None, help="the small model of draft_model")
    parser.add_argument("--tokens", type=int, default=8, help="guesses for a sequence in a step, at most")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--fixed", action="store_true", help="always guess as many tokens")
    parser.add_argument("--sets", nargs="*", default=["repetitive", "plain"])
    arguments = parser.parse_args()
    config: dict[str, Any] = {"method": arguments.method, "num_speculative_tokens": arguments.tokens}
    config["adaptive"] = not arguments.fixed
    if arguments.draft:
        config["model"] = arguments.draft
    common: dict[str, Any] = {"model": arguments.model, "use_tqdm": False, "max_num_seqs": max(8, arguments.batch)}
    plain, guessing = LLM(**common), LLM(**common, speculative_config=config)
    counts = guessing.engine.scheduler.speculation
    for name in arguments.sets:
        work = (*requests(plain, name, arguments.temperature), arguments.batch)
        before = counts.num_guessed, counts.num_accepted, counts.num_drafts
        seconds: dict[bool, list[float]] = {False: [], True: []}
        texts = {}
        for is_guessing in [False, True] * arguments.rounds:
            took, texts[is_guessing] = answer(guessing if is_guessing else plain, *work)
            seconds[is_guessing].append(took)
        slow, fast = (statistics.median(seconds[key]) for key in (False, True))
        now = counts.num_guessed, counts.num_accepted, counts.num_drafts
        guessed, accepted, steps = (one - other for one, other in zip(now, before, strict=True))
        same = sum(one == other for one, other in zip(*texts.values(), strict=True))
        print(
            f"{name}, batch {arguments.batch}, {arguments.method}: plain {1e3 * slow:.2f} ms a token, guessing "
            f"{1e3 * fast:.2f} ms, {slow / fast:.2f} x; {accepted} of {guessed} guesses right, in steps with guesses "
            f"{1 + accepted / max(1, steps):.2f} tokens; "
            f"{same} of {len(work[0])} texts equal"
        )


if __name__ == "__main__":
    main()
