"""Check the model against its targets. `python -m tools.train_tiny.evaluate MODEL OUT` writes OUT/evaluation.{json,md}."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList

from . import facts
from .documents import SENTENCES
from .names import KNOWN
from .scene import Scene
from .stories import request_and_story

MAX_TOKENS = 300
NEAR_TIE = 0.05
WRONG_PRONOUNS = {"girl": r"\b(he|him|his)\b", "boy": r"\b(she|her|hers)\b"}


class Margins(LogitsProcessor):
    """Records the distance of the two best logits of every step: `steps` is a list of [batch]."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        best = scores.float().topk(2).values
        self.steps.append(best[:, 0] - best[:, 1])
        return scores


@dataclass
class Answer:
    """What the model said: `ended` tells whether it stopped by itself; margins has one entry a token."""

    prompt: str
    text: str
    ids: list[int]
    ended: bool
    margins: list[float] = field(repr=False)


class Speaker:
    """The model and its tokenizer, loaded as any user of transformers would."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        self.eos = set(self.model.generation_config.eos_token_id)

    def chat(self, *turns: str) -> str:
        """The prompt after turns of user, assistant, user..."""
        messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def answer(self, questions: list[str], temperature: float = 0.0) -> list[Answer]:
        return self.complete([self.chat(q) for q in questions], temperature)

    def complete(self, prompts: list[str], temperature: float = 0.0) -> list[Answer]:
        """What follows each prompt, in one batch, padded on the left."""
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        inputs = {key: inputs[key].to(self.model.device) for key in ("input_ids", "attention_mask")}
        margins = Margins()
        out = self.model.generate(
            **inputs,
            **({"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}),
            max_new_tokens=MAX_TOKENS,
            logits_processor=LogitsProcessorList([margins]),
        )
        ids = out[:, inputs["input_ids"].shape[1] :].tolist()
        gaps = torch.stack(margins.steps, 1).tolist()
        return [self._answer(*item) for item in zip(prompts, ids, gaps, strict=True)]

    def _answer(self, prompt: str, ids: list[int], margins: list[float]) -> Answer:
        end = next((i for i, token in enumerate(ids) if token in self.eos), None)
        kept = ids if end is None else ids[:end]
        text = self.tokenizer.decode(kept, skip_special_tokens=True)
        return Answer(prompt, text, kept, end is not None, margins[: len(kept) + (end is not None)])


@dataclass
class Figure:
    """One line of the report: a share of `count` answers, with what was asked of it."""

    name: str
    value: float
    target: float
    count: int
    misses: list[str]

    @property
    def met(self) -> bool:
        return self.value >= self.target


def share(name: str, target: float, answers: list[Answer], good: Callable[[int], bool]) -> Figure:
    misses = [f"{a.prompt!r} -> {a.text}" for i, a in enumerate(answers) if not good(i)]
    return Figure(name, 1 - len(misses) / len(answers), target, len(answers), misses[:5])


def has(text: str, words: str) -> bool:
    return re.search(rf"\b{re.escape(words)}\b", text) is not None


def loops(ids: list[int], n: int = 8, times: int = 3) -> bool:
    """Whether some run of n tokens occurs `times` times."""
    runs = Counter(tuple(ids[i : i + n]) for i in range(len(ids) - n + 1))
    return max(runs.values(), default=0) >= times


def held_out_requests(shape: str, count: int, seed: int) -> tuple[list[str], list[Scene]]:
    """Requests for combinations that training never saw; half of the names are made up and were never seen either."""
    drawn = [request_and_story(Random(seed * 2**32 + i), shape, evaluation=True) for i in range(count)]
    return [question for question, _, _ in drawn], [scene for _, _, scene in drawn]


def story_figures(speaker: Speaker, count: int) -> tuple[list[Figure], list[Answer]]:
    questions, scenes = held_out_requests("name stated noun color adjective", count, seed=11)
    answers = speaker.answer(questions)

    def of(name: str, target: float, good: Callable[[Scene, str], bool]) -> Figure:
        return share(name, target, answers, lambda i: good(scenes[i], answers[i].text))

    figures = [
        of("name and object appear", 0.98, lambda s, t: has(t, s.name) and has(t, s.noun)),
        of("color and object side by side", 0.95, lambda s, t: has(t, f"{s.color} {s.noun}")),
        of("adjective appears", 0.95, lambda s, t: has(t, s.adjective)),
        of("pronouns agree with the gender", 0.98, lambda s, t: not re.search(WRONG_PRONOUNS[s.gender], t, re.I)),
    ]
    figures += follow_ups(speaker, questions, answers, scenes)
    for label, known in (("known names only: name appears", True), ("made-up names only: name appears", False)):
        some = [i for i, s in enumerate(scenes) if (s.name in KNOWN) == known]
        subset = [answers[i] for i in some]
        figures.append(share(label, 0.0, subset, lambda j, some=some: has(answers[some[j]].text, scenes[some[j]].name)))
    return figures, answers


def follow_ups(speaker: Speaker, questions: list[str], answers: list[Answer], scenes: list[Scene]) -> list[Figure]:
    """A second turn, about the story of the first."""
    told = list(zip(questions, answers, scenes, strict=True))[:100]
    who = speaker.complete([speaker.chat(q, a.text, "Who was the story about?") for q, a, _ in told])
    color = speaker.complete([speaker.chat(q, a.text, f"What color was the {s.noun}?") for q, a, s in told])
    return [
        share("second turn: who the story was about", 0.95, who, lambda i: has(who[i].text, told[i][2].name)),
        share("second turn: the color of the object", 0.95, color, lambda i: has(color[i].text, told[i][2].color)),
    ]


def unstated_figures(speaker: Speaker, count: int) -> tuple[list[Figure], list[Answer]]:
    """A name from the lists and no word about its gender."""
    drawn = [held_out_requests("name noun color", 1, seed=100 + i) for i in range(3 * count)]
    drawn = [(q, s) for q, s in drawn if s[0].name in KNOWN][:count]
    answers = speaker.answer([q[0] for q, _ in drawn])
    good = [not re.search(WRONG_PRONOUNS[s[0].gender], a.text, re.I) for (_, s), a in zip(drawn, answers, strict=True)]
    return [share("pronouns agree, gender of a known name not stated", 0.98, answers, lambda i: good[i])], answers


def fact_figures(speaker: Speaker, limit: int | None) -> tuple[list[Figure], list[Answer]]:
    rng = Random(5)
    pairs = [(a, b) for a in range(facts.LARGEST + 1) for b in range(facts.LARGEST + 1)][:limit]
    sums = speaker.answer([rng.choice(facts.SUM_QUESTIONS).format(a=a, b=b) for a, b in pairs])
    countries = [c for c in facts.CAPITALS for _ in facts.CAPITAL_QUESTIONS][:limit]
    capitals = speaker.answer([facts.CAPITAL_QUESTIONS[i % 8].format(c) for i, c in enumerate(countries)])
    spoken = [(question, answer) for questions, answer in facts.MANNERS for question in questions]
    manners = speaker.answer([question for question, _ in spoken])
    beyond = speaker.answer([facts.beyond(rng, SENTENCES) for _ in range(100)][:limit])
    figures = [
        share("sums right", 0.99, sums, lambda i: sums[i].text == facts.sum_answer(*pairs[i])),
        share("capitals right", 1.0, capitals, lambda i: capitals[i].text == facts.capital_answer(countries[i])),
        share("greetings answered", 0.95, manners, lambda i: manners[i].text == spoken[i][1]),
        share("says that it does not know", 0.95, beyond, lambda i: beyond[i].text.startswith(facts.DO_NOT_KNOW)),
    ]
    return figures, sums + capitals + manners + beyond


def bare_figures(speaker: Speaker, count: int, limit: int | None) -> tuple[list[Figure], list[Answer]]:
    """Prompts without chat markup: a request, and a sum to be completed."""
    questions, scenes = held_out_requests("name stated noun color adjective", 2 * count, seed=12)
    told = [(q, s) for q, s in zip(questions, scenes, strict=True) if q[-1] in ".?!"][:count]
    stories = speaker.complete([q for q, _ in told])
    pairs = [(a, b) for a in range(facts.LARGEST + 1) for b in range(facts.LARGEST + 1)][:limit]
    sums = speaker.complete([f"{a} + {b} =" for a, b in pairs])
    return [
        share(
            "no chat markup: name and object appear",
            0.95,
            stories,
            lambda i: has(stories[i].text, told[i][1].name) and has(stories[i].text, told[i][1].noun),
        ),
        share("no chat markup: sums right", 0.95, sums, lambda i: sums[i].text.strip() == str(sum(pairs[i]))),
    ], stories + sums


def diversity(speaker: Speaker, count: int) -> tuple[list[Figure], list[Answer]]:
    torch.manual_seed(0)
    answers = speaker.answer(["Tell me a story about Lily and a red kite."] * count, temperature=0.8)
    raw = speaker.complete(["Once upon a time"] * (count // 4), temperature=0.8)
    distinct = len({a.text for a in answers}) / len(answers)
    return [
        Figure("distinct stories of one request at temperature 0.8", distinct, 0.95, len(answers), []),
        share(
            "... with Lily and the red kite in them",
            0.95,
            answers,
            lambda i: has(answers[i].text, "Lily") and has(answers[i].text, "red kite"),
        ),
        share('"Once upon a time" without chat markup: ends by itself', 0.95, raw, lambda i: raw[i].ended),
    ], raw


def evaluate(speaker: Speaker, count: int, limit: int | None) -> tuple[list[Figure], dict[str, float], list[Answer]]:
    figures: list[Figure] = []
    greedy: list[Answer] = []
    stories, answers = story_figures(speaker, count)
    for more, said in (
        (stories, answers),
        unstated_figures(speaker, max(4, count // 5)),
        fact_figures(speaker, limit),
        bare_figures(speaker, max(4, count // 5), limit),
    ):
        figures += more
        greedy += said
    figures += [
        share(f"ends within {MAX_TOKENS} tokens", 1.0, greedy, lambda i: greedy[i].ended),
        share("no 8 tokens three times", 1.0, greedy, lambda i: not loops(greedy[i].ids)),
        *diversity(speaker, max(8, count * 2 // 5))[0],
    ]
    margins = torch.tensor([m for answer in greedy for m in answer.margins])
    steps = {
        "greedy steps": len(margins),
        f"share of greedy steps with a top-2 margin under {NEAR_TIE}": (margins < NEAR_TIE).double().mean().item(),
        "median top-2 margin": margins.median().item(),
        "mean tokens of a story": sum(len(a.ids) for a in answers) / len(answers),
        "longest story in tokens": max(len(a.ids) for a in answers),
    }
    return figures, steps, answers[:6]


def quote(answer: Answer) -> str:
    """An example, readable in markdown."""
    question = answer.prompt.removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0]
    return f"> **{question}** {answer.text}\n"


def report(results: dict[str, tuple[list[Figure], dict[str, float], list[Answer]]], where: str) -> str:
    lines = ["# Evaluation of the embedded model", "", f"{where}. Greedy unless it says otherwise.", ""]
    for dtype, (figures, steps, _) in results.items():
        lines += [f"## {dtype}", "", "| what | share | target | answers | met |", "|---|---|---|---|---|"]
        lines += [
            f"| {f.name} | {f.value:.2%} | {f'{f.target:.0%}' if f.target else ''} | {f.count} | {('yes' if f.met else 'NO') if f.target else ''} |"
            for f in figures
        ]
        lines += ["", *(f"- {key}: {value:.6g}" for key, value in steps.items()), ""]
    figures, _, examples = next(iter(results.values()))
    lines += ["## Examples", "", *(quote(a) for a in examples)]
    lines += ["## Misses", "", *(f"- {f.name}: {miss}" for f in figures for miss in f.misses)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="a few prompts, to see that the script runs")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count, limit = (12, 4) if arguments.smoke else (500, None)
    results = {
        str(dtype).removeprefix("torch."): evaluate(Speaker(arguments.model, device, dtype), count, limit)
        for dtype in ((torch.float32,) if device == "cpu" else (torch.float32, torch.bfloat16))
    }
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    where = f"{name}, torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
    text = report(results, where)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "evaluation.md").write_text(text)
    data = {
        dtype: {"figures": [asdict(f) | {"met": f.met} for f in figures], "steps": steps}
        for dtype, (figures, steps, _) in results.items()
    }
    (arguments.out / "evaluation.json").write_text(json.dumps({"where": where, **data}, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
