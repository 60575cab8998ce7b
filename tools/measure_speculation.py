"""Time speculative decoding beside plain decoding: `python -m tools.measure_speculation --methods ngram suffix`.

CPU seconds (on a GPU: seconds) for each token of the answers to `tools/speculation/*.json`, one request at a time or
`--batches` of them, plain and speculating in turns; medians, and the gain in each round. Drafts speed up what comes behind an
answer's first token, so that is told apart. The texts are counted that are equal: all of them, but for near ties.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from folovllm import LLM, SamplingParams
from folovllm.electives.structured_output.params import StructuredOutputsParams
from tools.gpu import parser_of

FOLDER = Path(__file__).parent / "speculation"


def requests(llm: LLM, name: str, temperature: float, times: int) -> tuple[list[str], list[SamplingParams]]:
    """The prompts of a set, taken several times, and how they are answered: no two with the same seed."""
    tasks = json.loads((FOLDER / f"{name}.json").read_text()) * times
    render = llm.get_tokenizer().apply_chat_template
    prompts = [render(task["messages"], tokenize=False, add_generation_prompt=True) for task in tasks]
    forms = [StructuredOutputsParams(**task["form"]) if task["form"] else None for task in tasks]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=task["max_tokens"], structured_outputs=form)
        for i, (task, form) in enumerate(zip(tasks, forms, strict=True))
    ]
    return prompts, params


@dataclass(frozen=True)
class Answers:
    """The answers to some requests, and how long they took."""

    seconds: float  # a token, of the whole
    behind_first: float  # a token, on average over the tokens behind the first one of each answer, by the wall clock
    texts: list[list[int]]


def answer(llm: LLM, prompts: list[str], params: list[SamplingParams], batch: int) -> Answers:
    """Serve the requests, `batch` at a time."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    start, outputs = clock(), []
    for i in range(0, len(prompts), batch):
        outputs += llm.generate(prompts[i : i + batch], params[i : i + batch], use_tqdm=False)
    seconds, texts = clock() - start, [list(output.outputs[0].token_ids) for output in outputs]
    writing = sum(output.metrics.finish_time - output.metrics.first_token_time for output in outputs)
    num_tokens = sum(map(len, texts))
    return Answers(seconds / num_tokens, writing / (num_tokens - len(texts)), texts)


def compare(plain: LLM, speculating: LLM, name: str, batch: int, rounds: int, temperature: float) -> str:
    """A line about a set. One that is smaller than a batch is taken several times."""
    num_tasks = len(requests(plain, name, temperature, 1)[0])
    work = *requests(plain, name, temperature, -(-batch // num_tasks)), batch
    counts = speculating.engine.scheduler.speculation
    before = counts.num_draft_tokens, counts.num_accepted, counts.num_drafts
    pairs = [(answer(plain, *work), answer(speculating, *work)) for _ in range(rounds)]
    now = counts.num_draft_tokens, counts.num_accepted, counts.num_drafts
    drafted, accepted, drafts = (one - other for one, other in zip(now, before, strict=True))
    same = sum(one == other for one, other in zip(pairs[-1][0].texts, pairs[-1][1].texts, strict=True))
    parts = []
    for kind, which in (("", "seconds"), ("behind the first ", "behind_first")):
        slow, fast = (1e3 * statistics.median(getattr(pair[i], which) for pair in pairs) for i in (0, 1))
        parts.append(f"{kind}{slow:.3f} ms a token, speculating {fast:.3f} ms, {slow / fast:.2f} x")
    gains = " ".join(f"{one.seconds / other.seconds:.3f}" for one, other in pairs)
    return (
        f"{'; '.join(parts)}; {accepted} of {drafted} draft tokens accepted, in {drafts} drafts "
        f"{1 + accepted / max(1, drafts):.2f} tokens; {same} of {len(work[0])} texts equal; rounds {gains}"
    )


def main() -> None:
    """Print the line of each method, batch size and set."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="stories-5m")
    parser.add_argument("--methods", nargs="+", default=["ngram"])
    parser.add_argument("--draft", default="stories-draft", help="the small model of draft_model")
    parser.add_argument("--head", default="stories-eagle3", help="the head of eagle3")
    parser.add_argument("--tokens", type=int, default=8, help="draft tokens for a sequence in a step, at most")
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--fixed", action="store_true", help="always propose as many tokens")
    parser.add_argument("--sets", nargs="*", default=["repetitive", "plain"])
    args = parser.parse_args()
    common: dict[str, Any] = {"model": args.model, "use_tqdm": False, "max_num_seqs": max(8, *args.batches)}
    with LLM(**common) as plain:
        plain.engine.prepare_structured_outputs()  # it takes a second, once, before the first answer with a form
        for method in args.methods:
            config = {"method": method, "num_speculative_tokens": args.tokens, "adaptive": not args.fixed}
            for name, model in (("draft_model", args.draft), ("eagle3", args.head)):
                if name in method:
                    config["model"] = model
            with LLM(**common, speculative_config=config) as speculating:
                speculating.engine.prepare_structured_outputs()
                for batch in args.batches:
                    for name in args.sets:
                        line = compare(plain, speculating, name, batch, args.rounds, args.temperature)
                        print(f"{args.model}, {name}, batch {batch}, {method}: {line}", flush=True)


if __name__ == "__main__":
    main()
