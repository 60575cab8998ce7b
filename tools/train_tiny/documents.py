"""The training documents: chats of one or several turns, stories without chat markup, and short plain sentences."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from zlib import crc32

from . import facts, scene
from .names import guess_gender
from .scene import Scene, draw_name, favor
from .stories import request_and_story
from .words import with_article

Piece = tuple[str, bool]  # text, and whether the model learns to write it
START, END, SEPARATOR = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SYSTEM = (
    "You are a helpful assistant.", "You are a storyteller.", "You tell stories to children.", "Be friendly and brief.",
    "You are a very small language model.", "Answer in simple words.",
)  # fmt: skip
AGAIN = (
    "Tell me another one.",
    "Another story, please.",
    "One more!",
    "Tell me another story.",
    "Again!",
    "More, please.",
)

PARAGRAPHS = [
    " ".join(block.split())
    for block in Path(__file__).with_name("english.md").read_text().split("\n\n")
    if not block.startswith("#")
]
SENTENCES = [s for paragraph in PARAGRAPHS for s in re.split(r"(?<=[.?!]) ", paragraph)]


def document(rng: Random) -> list[Piece]:
    """One document; seven in ten are chats. It ends with the separator."""
    kind = rng.random()
    if kind < 0.70:
        return [*chat(rng), (SEPARATOR, False)]
    if kind < 0.82:
        return bare_question(rng)
    text = story(rng) if kind < 0.92 else plain(rng) if kind < 0.99 else rng.choice(PARAGRAPHS)
    return [(text, True), (SEPARATOR, True)]


def bare_question(rng: Random) -> list[Piece]:
    """A question and its answer without chat markup, for those who forget the template."""
    while True:
        question, answer, _ = turn(rng, None)
        if question[-1] in ".?!":  # "2+2=" is left to `plain`, which completes it
            return [(question, False), (f" {answer}{SEPARATOR}", True)]


def story(rng: Random) -> str:
    """A story without markup; one in four begins with its second, third or fourth sentence."""
    text = request_and_story(rng)[1]
    return text.split(". ", rng.randint(1, 3))[-1] if rng.random() < 0.25 else text


def chat(rng: Random) -> list[Piece]:
    """A conversation; one in five has two to four turns, one in ten a system message."""
    turns = rng.randint(2, 4) if rng.random() < 0.2 else 1
    pieces: list[Piece] = []
    if rng.random() < 0.1:
        pieces.append((f"{START}system\n{rng.choice(SYSTEM)}{END}\n", False))
    last: Scene | None = None
    for _ in range(turns):
        question, answer, last = turn(rng, last)
        pieces += [(prompt(question), False), (answer + END, True), ("\n", False)]
    return pieces


def prompt(question: str) -> str:
    """A user's turn, as the chat template renders it, up to where the answer begins."""
    return f"{START}user\n{question}{END}\n{START}assistant\n"


def turn(rng: Random, last: Scene | None) -> tuple[str, str, Scene | None]:
    """A question and its answer. A question may be about the scene of the `last` story."""
    if last and rng.random() < 0.6:
        return follow_up(rng, last)
    kind = rng.random()
    if kind < 0.70:
        return request_and_story(rng)
    if kind < 0.76:
        _, story, about = request_and_story(rng, shape="")
        return facts.beyond(rng, SENTENCES), f"{facts.DO_NOT_KNOW} {story}", about
    ask = facts.sum_of if kind < 0.88 else facts.capital if kind < 0.95 else facts.manners
    return *ask(rng), last


def follow_up(rng: Random, last: Scene) -> tuple[str, str, Scene]:
    """A question about the story just told, or a wish for another one."""
    kind = rng.randrange(6)
    if kind == 0:
        return (
            rng.choice((f"What color was the {last.noun}?", f"Which color did the {last.noun} have?")),
            f"The {last.noun} was {last.color}.",
            last,
        )
    if kind == 1:
        return (
            rng.choice(("Who was the story about?", "What was the name of the hero?", "Who is the hero?")),
            f"The story was about {last.name}.",
            last,
        )
    if kind == 2:
        return f"Was {last.name} a girl or a boy?", f"It was about a {last.gender}.", last
    if kind == 3:
        question = rng.choice((f"Tell me more about {last.name}.", f"Tell me another story about {last.name}."))
        return question, *_another(rng, last, name=last.name, gender=last.gender)
    if kind == 4:
        return rng.choice(AGAIN), *_another(rng, last)
    return *facts.manners(rng), last


def _another(rng: Random, last: Scene, **hero: str) -> tuple[str, Scene]:
    """A new story, perhaps about the same hero, whose noun depends on the last one's."""
    kind = "animal" if last.noun in scene.NOUNS["thing"] else "thing"
    noun = favor(rng, scene.NOUNS[kind], crc32(last.noun.encode()))
    _, story, about = request_and_story(rng, shape="", kind=kind, noun=noun, **hero)
    return story, about


def plain(rng: Random) -> str:
    """A short text without chat markup: an introduction, a sum, or a capital."""
    kind = rng.randrange(4)
    if kind < 2:
        a, b = rng.randint(0, facts.LARGEST), rng.randint(0, facts.LARGEST)
        return rng.choice(("{a} + {b} = {c}", "{a}+{b}={c}", "{a} plus {b} is {c}.")).format(a=a, b=b, c=a + b)
    if kind == 2:
        return facts.capital_answer(rng.choice(list(facts.CAPITALS)))
    name = draw_name(rng, known=0.9)
    noun = favor(rng, scene.NOUNS["thing"], len(name))
    likes = f"I have {with_article(favor(rng, scene.words.COLORS))} {noun} and I like to tell stories."
    return f"Hello, my name is {name}. I am a {scene.names.KNOWN.get(name, guess_gender(name))}. {likes}"
