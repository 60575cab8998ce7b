"""Time speculative decoding beside plain decoding: `python -m tools.measure_speculation --methods ngram suffix`.

CPU seconds (on a GPU: seconds) for each token of the answers to `tools/speculation/*.json`, one request at a time or
`--batches` of them, plain and speculating in turns, in random order. Drafts speed up what comes behind an answer's first token,
so that is told apart. A second line says where the time went: in plain steps, in steps for which no proposer had a draft, and
in steps with drafts. The texts are compared, too: they must be the same but for near ties. So where two part, a line gives
both tokens, and how likely they are in the plain engine and, with `--exact`, in float32.

Whether speculation loses one per cent takes many `--rounds` to see, and a second plain engine in the same turns (`--again`) to
believe it: what that one seems to gain or lose is chance.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from folovllm import LLM, SamplingParams
from folovllm.events import Event, StepBegan, StepEnded
from folovllm.spec_decode.policy import AdaptiveLength
from folovllm.step.schedule import SchedulerOutput
from folovllm.structured_outputs import StructuredOutputsParams

FOLDER = Path(__file__).parent / "speculation"


def requests(
    llm: LLM, name: str, temperature: float, times: int = 1, first_seed: int = 0
) -> tuple[list[str], list[SamplingParams]]:
    """The prompts of a set, taken several times, and how they are answered: no two with the same seed."""
    tasks = json.loads((FOLDER / f"{name}.json").read_text()) * times
    render = llm.get_tokenizer().apply_chat_template
    prompts = [render(task["messages"], tokenize=False, add_generation_prompt=True) for task in tasks]
    params = [
        SamplingParams(
            temperature=temperature,
            seed=first_seed + i,
            max_tokens=task["max_tokens"],
            structured_outputs=StructuredOutputsParams(**task["form"]) if task["form"] else None,
        )
        for i, task in enumerate(tasks)
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


class Watch:
    """Sorts the steps of a speculating engine by kind, and adds up the seconds from the end of one to that of the next.

    It listens within `with`, and not while anything is timed: a small model's steps would feel it.
    """

    KINDS = ("prompts", "plain", "no draft", "with drafts")

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.engine

    def __enter__(self) -> Watch:
        self.counts, self.seconds = dict.fromkeys(self.KINDS, 0), dict.fromkeys(self.KINDS, 0.0)
        self._kinds, self._last = deque[str](), time.perf_counter()
        self._engine.subscribe(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.unsubscribe(self)

    def __call__(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, StepBegan):
                self._kinds.append(self._kind(event.output))
            elif isinstance(event, StepEnded):
                kind = self._kinds.popleft()
                self.counts[kind] += 1
                self.seconds[kind] += event.end - self._last
                self._last = event.end

    def _kind(self, output: SchedulerOutput) -> str:
        if any(scheduled.sampling is not None for scheduled in output.scheduled_seqs):
            return "prompts"
        if any(scheduled.num_samples > 1 for scheduled in output.scheduled_seqs):
            return "with drafts"
        return "no draft" if self._engine.scheduler.speculation.asked else "plain"

    def told(self) -> str:
        """One line: steps of each kind, milliseconds of one, and its part of the time."""
        whole = sum(self.seconds.values())
        return ", ".join(
            f"{count} {kind} {1e3 * seconds / count:.3f} ms ({seconds / whole:.0%})"
            for kind, count, seconds in zip(self.KINDS, self.counts.values(), self.seconds.values(), strict=True)
            if count
        )


def main() -> None:
    """Print the lines of each method, batch size and set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="stories-5m")
    parser.add_argument("--methods", nargs="+", default=["ngram"])
    parser.add_argument(
        "--draft", default=None, help="the small model of draft_model; the embedded one if none is named"
    )
    parser.add_argument("--tokens", type=int, default=8, help="draft tokens for a sequence in a step, at most")
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument(
        "--rounds", nargs="+", type=int, default=[2], help="one number for all batches, or one for each"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--fixed", action="store_true", help="always propose as many tokens")
    parser.add_argument("--exact", action="store_true", help="load the model in float32, too, to judge texts that part")
    parser.add_argument(
        "--fresh", action="store_true", help="other seeds in each round: with a temperature nothing comes again"
    )
    parser.add_argument(
        "--again", action="store_true", help="let a second plain engine take turns, too: it shows what chance is"
    )
    parser.add_argument("--sets", nargs="*", default=["repetitive", "plain"])
    arguments = parser.parse_args()
    rounds = arguments.rounds * (len(arguments.batches) if len(arguments.rounds) == 1 else 1)
    if len(rounds) != len(arguments.batches):
        parser.error(f"--rounds: {len(rounds)} numbers for {len(arguments.batches)} --batches")
    common: dict[str, Any] = {"model": arguments.model, "use_tqdm": False, "max_num_seqs": max(8, *arguments.batches)}
    plain = LLM(**common)
    again = LLM(**common) if arguments.again else None
    exact = LLM(**common, dtype="float32", num_kv_blocks=256) if arguments.exact else None
    for llm in filter(None, (plain, again)):
        llm.engine.prepare_structured_outputs()  # it takes a second, once, before the first answer with a form
    for method in arguments.methods:
        config: dict[str, Any] = {"method": method, "num_speculative_tokens": arguments.tokens}
        config["adaptive"] = not arguments.fixed
        if "draft_model" in method:
            config["model"] = arguments.draft or "stories-draft"
        speculating = LLM(**common, speculative_config=config)
        speculating.engine.prepare_structured_outputs()
        engines = {"plain": plain, "speculating": speculating} | ({"again": again} if again else {})
        for batch, num_rounds in zip(arguments.batches, rounds, strict=True):
            for name in arguments.sets:
                compare(engines, name, batch, num_rounds, arguments, exact)
        speculating.close()


def compare(
    engines: dict[str, LLM], name: str, batch: int, num_rounds: int, arguments: argparse.Namespace, exact: LLM | None
) -> None:
    """Print the lines of a set. One that is smaller than a batch is taken several times; the last round is not timed, but watched."""
    plain, speculating = engines["plain"], engines["speculating"]
    counts = speculating.engine.scheduler.speculation
    num_tasks = len(requests(plain, name, 0.0)[0])
    times = -(-batch // num_tasks)

    def work(turn: int) -> tuple[list[str], list[SamplingParams], int]:
        return *requests(plain, name, arguments.temperature, times, 1000 * turn * arguments.fresh), batch

    before = counts.num_draft_tokens, counts.num_accepted, counts.num_drafts
    found: dict[str, list[Answers]] = {who: [] for who in engines}
    order, chance = list(engines), random.Random(0)
    for turn in range(num_rounds):
        chance.shuffle(order)
        for who in order:
            found[who].append(answer(engines[who], *work(turn)))
    now = counts.num_draft_tokens, counts.num_accepted, counts.num_drafts
    with Watch(speculating) as watch:
        answer(speculating, *work(num_rounds))
    drafted, accepted, steps = (one - other for one, other in zip(now, before, strict=True))
    texts = found["plain"][-1].texts, found["speculating"][-1].texts
    same = sum(one == other for one, other in zip(*texts, strict=True))
    told = []
    for kind, which in (("", "seconds"), ("behind the first ", "behind_first")):
        slow, fast = (
            1e3 * statistics.median(getattr(one, which) for one in found[who]) for who in ("plain", "speculating")
        )
        told.append(f"{kind}{slow:.3f} ms a token, speculating {fast:.3f} ms, {slow / fast:.2f} x")
    method = "+".join(speculating.engine.setup.config.speculative_config.methods)
    print(
        f"{arguments.model}, {name}, batch {batch}, {method}: {'; '.join(told)}; {accepted} of {drafted} draft tokens accepted, in "
        f"{steps} drafts {1 + accepted / max(1, steps):.2f} tokens; {same} of {times * num_tasks} texts equal; "
        f"rounds {gains(found['plain'], found['speculating'])}\n    {watch.told()}{opinion(counts.policy)}",
        flush=True,
    )
    if "again" in found:
        print(f"    plain again: {gains(found['plain'], found['again'])}", flush=True)
    tell_differences(plain, exact, work(0)[0], texts)


def gains(plain: list[Answers], other: list[Answers]) -> str:
    """How many times as fast the other engine was: each round, the ratio of the medians, the median ratio with its interval."""
    each = [one.seconds / two.seconds for one, two in zip(plain, other, strict=True)]
    slow, fast = (statistics.median(one.seconds for one in rounds) for rounds in (plain, other))
    low, high = interval(each)
    listed = " ".join(f"{gain:.3f}" for gain in each)
    return f"{listed}, of medians {slow / fast:.3f}, median {statistics.median(each):.3f} ({low:.3f} to {high:.3f})"


def interval(values: list[float], doubt: float = 0.05) -> tuple[float, float]:
    """Two of the values. The true median lies outside them with no more than this chance, whatever the distribution.

    Each value falls below the true median with chance 1/2, so how many do is binomial. Of fewer than six values even the
    lowest and the highest promise less; they are returned all the same.
    """
    ordered, num = sorted(values), len(values)
    outside, cut = 2 / 2**num, 0  # the chance that the true median lies below `ordered[cut]` or above its mirror image
    while (outside := outside + 2 * math.comb(num, cut + 1) / 2**num) <= doubt:
        cut += 1
    return ordered[cut], ordered[-1 - cut]


def tell_differences(
    plain: LLM, exact: LLM | None, prompts: list[Any], texts: tuple[list[list[int]], list[list[int]]]
) -> None:
    """A line for each text that differs: where, the token of the plain engine and the other one, and their log-probabilities."""
    ids = [plain.get_tokenizer().encode(prompt, add_special_tokens=False) for prompt in prompts]
    for i, (one, other) in enumerate(zip(*texts, strict=True)):
        if one == other:
            continue
        at = next(at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        told = []
        for name, llm in (("plain", plain), ("float32", exact)):
            if llm is not None:
                pair = [log_probability(llm, ids[i % len(ids)] + one[:at], text[at]) for text in (one, other)]
                told.append(f"{name} {pair[0]:.4f} and {pair[1]:.4f}")
        print(f"    text {i} parts at {at}: {one[at]} and {other[at]}; {'; '.join(told)}", flush=True)


def log_probability(llm: LLM, text: list[int], token: int) -> float:
    """Of a token behind a text."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": [*text, token]}], params, use_tqdm=False)
    return float(output.prompt_logprobs[-1][token].logprob)


def opinion(policy: object) -> str:
    """What `AdaptiveLength` estimates that steps of one sequence take."""
    if not isinstance(policy, AdaptiveLength):
        return ""
    cost = policy.cost
    plain, no_draft, verifying = (1e3 * of(1) for of in (cost.of_plain, cost.of_no_draft, cost.of_verifying))
    return f"; estimated {plain:.3f}, {no_draft:.3f}, {verifying:.3f} ms, draft tokens {1e3 * cost.first_draft_token:.4f}, and {1e3 * cost.per_draft_token:.4f} each"


if __name__ == "__main__":
    main()
