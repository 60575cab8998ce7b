"""Time speculative decoding beside plain decoding: `python -m tools.measure_speculation --methods ngram suffix`.

CPU seconds (on a GPU: seconds) for each token of the answers to `tools/speculation/*.json`, one request at a time or
`--batches` of them, plain and speculating in turns; medians, and the gain in each round. Drafts speed up what comes behind an
answer's first token, so that is told apart. The texts are counted that are equal: all of them, but for near ties.

`--geometry` has weights from chance, of which hardly a draft is accepted. With `--fixed` each step then has all its drafts, and the
milliseconds of a step tell what they cost (`--methods eagle3 --tokens 3 --sets plain --batches 1 8 64`). Without it draft lengths
follow acceptance, and the gain should be at least 0.98; in the first round the policy learns.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from folovllm import LLM, SamplingParams
from folovllm.electives.structured_output.params import StructuredOutputsParams
from tools.beside_vllm import write_head
from tools.gpu import in_turns, parser_of, random_weights

FOLDER = Path(__file__).parent / "speculation"


def requests(llm: LLM, name: str, temperature: float, batch: int) -> tuple[list[str], list[SamplingParams]]:
    """The prompts of a set, taken several times if they are fewer than a batch, and how they are answered: no two with the same seed."""
    tasks = json.loads((FOLDER / f"{name}.json").read_text())
    tasks *= -(-batch // len(tasks))
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

    token: float  # seconds a token, of the whole
    behind_first: (
        float  # seconds a token, on average over the tokens behind the first one of each answer, by the wall clock
    )
    step: float  # seconds a step
    texts: list[list[int]]


def answer(llm: LLM, prompts: list[str], params: list[SamplingParams], batch: int) -> Answers:
    """Serve the requests, `batch` at a time."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    before, start, outputs = llm.engine.stats().steps, clock(), []
    for i in range(0, len(prompts), batch):
        outputs += llm.generate(prompts[i : i + batch], params[i : i + batch], use_tqdm=False)
    seconds, texts = clock() - start, [list(output.outputs[0].token_ids) for output in outputs]
    writing = sum(output.metrics.finish_time - output.metrics.first_token_time for output in outputs)
    num_tokens, num_steps = sum(map(len, texts)), llm.engine.stats().steps - before
    return Answers(seconds / num_tokens, writing / (num_tokens - len(texts)), seconds / num_steps, texts)


def compare(plain: LLM, speculating: LLM, name: str, batch: int, args: argparse.Namespace) -> str:
    """A line about a set."""
    work = *requests(plain, name, args.temperature, 4 * batch), batch
    counts = speculating.engine.scheduler.speculation
    before = counts.num_draft_tokens, counts.num_accepted, counts.num_drafts
    found: dict[LLM, list[Answers]] = {plain: [], speculating: []}
    for _, llm in in_turns([plain, speculating], args.rounds):
        found[llm].append(answer(llm, *work))
    now = counts.num_draft_tokens, counts.num_accepted, counts.num_drafts
    drafted, accepted, drafts = (one - other for one, other in zip(now, before, strict=True))
    pairs = list(zip(*found.values(), strict=True))
    same = sum(one == other for one, other in zip(pairs[-1][0].texts, pairs[-1][1].texts, strict=True))
    parts = []
    for kind in ("token", "behind_first", "step"):
        slow, fast = (1e3 * median(getattr(each, kind) for each in own) for own in found.values())
        parts.append(f"{kind.replace('_', ' ')} {slow:.3f} ms, speculating {fast:.3f} ms, {slow / fast:.2f} x")
    gains = " ".join(f"{one.token / other.token:.3f}" for one, other in pairs)
    return (
        f"{'; '.join(parts)}; {accepted} of {drafted} draft tokens accepted, in {drafts} drafts "
        f"{1 + accepted / max(1, drafts):.2f} tokens; {same} of {len(work[0])} texts equal; rounds {gains}"
    )


def main() -> None:
    """Print the line of each method, batch size and set."""
    parser = parser_of(__doc__, "")
    parser.add_argument("--model", default="stories-5m", help="if no geometry is given")
    parser.add_argument("--gpus", type=int, default=1, help="of one model (tensor parallelism)")
    parser.add_argument("--methods", nargs="+", default=["ngram"])
    parser.add_argument("--draft", default="stories-draft", help="the small model of draft_model")
    parser.add_argument("--head", default="stories-eagle3", help="the head of eagle3; of a geometry one from chance")
    parser.add_argument("--tokens", type=int, default=8, help="draft tokens for a sequence in a step, at most")
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--fixed", action="store_true", help="always propose as many tokens")
    parser.add_argument("--sets", nargs="*", default=["repetitive", "plain"])
    args = parser.parse_args()
    common: dict[str, Any] = {
        "use_tqdm": False,
        "max_num_seqs": max(8, *args.batches),
        "tensor_parallel_size": args.gpus,
    }
    chance = common | {"num_kv_blocks": 8192, "max_model_len": 2048}  # two such engines fit on a card
    given = random_weights(args.geometry, **chance) if args.geometry else nullcontext(common | {"model": args.model})
    with given as fields, LLM(**fields) as plain:
        if "repetitive" in args.sets:
            plain.engine.prepare_structured_outputs()  # it takes a second, once, before the first answer with a form
        for method in args.methods:
            config = {"method": method, "num_speculative_tokens": args.tokens, "adaptive": not args.fixed}
            if "draft_model" in method:
                config["model"] = args.draft
            if "eagle3" in method:
                config["model"] = str(write_head(Path(fields["model"]))) if args.geometry else args.head
            with LLM(**fields, speculative_config=config) as speculating:
                if "repetitive" in args.sets:
                    speculating.engine.prepare_structured_outputs()
                for batch in args.batches:
                    for name in args.sets:
                        line = compare(plain, speculating, name, batch, args)
                        print(f"{args.geometry or args.model}, {name}, batch {batch}, {method}: {line}", flush=True)


if __name__ == "__main__":
    main()
