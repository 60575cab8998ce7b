"""Guess with FoloVLLM and with vLLM, one after the other on one machine: `python -m tools.beside_guesses`.

The embedded model answers the tasks of `tools/speculation/repetitive.json`, so many at once, greedily; plain, and with guesses
that n-grams of the text make (`--guesses`, at most so many a step). Each engine with each setting has a process of its own, and
keeps its own defaults. The same prompts come in each pass, so that both find them in their prefix caches; the first pass is not timed.
A line tells the tokens a second of each pass, and the last table the best ones. vLLM must be there to import, with numba and,
for the forms, lmformatenforcer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from typing import Any

from transformers import AutoTokenizer

from folovllm.models.files import ASSETS
from tools.beside_vllm import told_by
from tools.measure_speculation import FOLDER

ENGINES = ("folovllm", "vllm")


def serve(engine: str, num_guesses: int, at_once: list[int], passes: int, forms: bool) -> None:
    """Print a line of JSON for each number at once: the tokens a second of each pass."""
    if engine == "vllm":
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import StructuredOutputsParams
    else:
        from folovllm import LLM, SamplingParams
        from folovllm.structured_outputs import StructuredOutputsParams
    model = str(ASSETS / "stories-5m")
    config: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": num_guesses}
    llm = LLM(
        model=model, max_num_seqs=max(at_once), max_model_len=4096, speculative_config=config if num_guesses else None
    )
    tasks = json.loads((FOLDER / "repetitive.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(model)
    render = partial(tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=True)
    prompts = [{"prompt_token_ids": render(task["messages"])["input_ids"]} for task in tasks]
    for batch in at_once:
        order = [i % len(tasks) for i in range(max(batch, len(tasks)))]
        rates = []
        for _ in range(passes + 1):
            num_tokens, began = 0, time.perf_counter()
            for start in range(0, len(order), batch):
                these = order[start : start + batch]
                how = [
                    SamplingParams(
                        temperature=0.0,
                        max_tokens=tasks[i]["max_tokens"],
                        structured_outputs=StructuredOutputsParams(**tasks[i]["form"]) if forms else None,
                    )
                    for i in these
                ]
                outputs = llm.generate([prompts[i] for i in these], how, use_tqdm=False)
                num_tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
            rates.append(round(num_tokens / (time.perf_counter() - began)))
        print(json.dumps({"at once": batch, "tokens a second": rates[1:], "tokens": num_tokens}), flush=True)


def best_of(engine: str, num_guesses: int, args: argparse.Namespace) -> dict[int, int]:
    """The most tokens a second for each number at once, from a process of its own."""
    command = [sys.executable, "-m", "tools.beside_guesses", "--engine", engine, "--guesses", str(num_guesses)]
    command += ["--passes", str(args.passes), *(["--free"] if args.free else []), "--at-once", *map(str, args.at_once)]
    told = told_by(command, f"{engine:9} {num_guesses:2} guesses")
    return {result["at once"]: max(result["tokens a second"]) for result in told}


def main() -> None:
    """Run all, or one engine with one setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--guesses", nargs="+", type=int, default=[5, 15], help="at most so many a step; each in turn")
    parser.add_argument("--passes", type=int, default=3, help="measured ones; the best counts")
    parser.add_argument("--free", action="store_true", help="without the forms that some answers must have")
    parser.add_argument(
        "--engine", choices=ENGINES, help="this one alone, with the first of --guesses, in this process"
    )
    args = parser.parse_args()
    if args.engine:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        serve(args.engine, args.guesses[0], args.at_once, args.passes, not args.free)
        return
    for engine in ENGINES:
        found = {num_guesses: best_of(engine, num_guesses, args) for num_guesses in (0, *args.guesses)}
        for batch, plain in found[0].items():
            gains = ", ".join(
                f"{n} guesses {best[batch]} ({best[batch] / plain:.2f} x)"
                for n, best in found.items()
                if n and batch in best
            )
            print(f"{engine}, {batch} at once: {plain} tokens a second; {gains}", flush=True)


if __name__ == "__main__":
    main()
