"""Requests and the stories that honor them: a plot, a scene, and one sentence chosen for every step of the plot."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from . import scene, words
from .plots_animals import ANIMAL_PLOTS, FOOD_PLOTS
from .plots_things import THING_PLOTS
from .scene import Scene, favor

OPENINGS = """
Once upon a time, there was {an_adjective} {child} named {name}. | Once upon a time, {an_adjective} {child} named {name} lived near the {place}. | Once there was {an_adjective} {child} called {name}. | Long ago, in a little house at the {place}, there lived {an_adjective} {child} named {name}. | There once was a {child} called {name} who was very {adjective}.
"""
ENDINGS = "? The end. | And that is the end of the story."


@dataclass(frozen=True, slots=True)
class Step:
    """One sentence of a plot, in several wordings; an optional step is told in two stories of three."""

    wordings: tuple[str, ...]
    optional: bool

    @staticmethod
    def parse(line: str) -> Step:
        wordings = line.removeprefix("? ").split("|")
        return Step(tuple(wording.strip() for wording in wordings), line.startswith("? "))

    def mentions(self) -> set[str]:
        """The slots that a story with this step names, whichever wording is chosen."""
        if self.optional:
            return set()
        return set.intersection(*(set(re.findall(r"{(\w+)}", wording)) for wording in self.wordings))


@dataclass(frozen=True, slots=True)
class Plot:
    """A sequence of steps about one kind of noun; a request may ask only for what the plot `always` names."""

    kind: str
    steps: tuple[Step, ...]
    always: frozenset[str]

    @staticmethod
    def parse(kind: str, text: str) -> Plot:
        lines = [*OPENINGS.strip().splitlines(), *text.strip().splitlines(), ENDINGS]
        steps = tuple(Step.parse(line) for line in lines)
        return Plot(kind, steps, frozenset(set().union(*(step.mentions() for step in steps))))


PLOTS = {
    kind: [Plot.parse(kind, text) for text in plots.values()]
    for kind, plots in {"thing": THING_PLOTS, "animal": ANIMAL_PLOTS, "food": FOOD_PLOTS}.items()
}


def choose_plot(rng: Random, kind: str, noun: str) -> Plot:
    """A plot for a noun: every noun that can be learned has its own favorites."""
    return favor(rng, PLOTS[kind], scene.turn_of(noun, scene.NOUNS[kind]))


def tell(rng: Random, plot: Plot, about: Scene) -> str:
    """The story as one paragraph."""
    slots = about.slots()
    told = [step for step in plot.steps if not step.optional or rng.random() < 0.67]
    return " ".join(favor(rng, step.wordings, sharpness=2) for step in told).format(**slots)


# What a request may ask for, with its weight. "stated" says whether the hero is a boy or a girl.
SHAPES: dict[frozenset[str], int] = {
    frozenset(shape.split()): weight
    for shape, weight in {
        "": 4,
        "name": 6,
        "name stated": 3,
        "name stated adjective": 3,
        "noun": 2,
        "noun color": 3,
        "noun color size": 1,
        "name noun": 4,
        "name noun color": 12,
        "name noun color place": 2,
        "name noun color size": 2,
        "name stated noun color": 8,
        "name stated noun color adjective": 20,
        "name stated noun color adjective size": 4,
        "name stated noun color adjective place": 4,
        "name friend": 3,
        "name friend noun color": 3,
        "place": 1,
    }.items()
}

REQUESTS = """
Tell me a story about {}. | Tell me a story about {} | Write a story about {}. | Write a short story about {}. | Can you tell me a story about {}? | Please tell me a story about {}. | I want a story about {}. | Can you write a story about {}? | tell me a story about {} | Please write a short story about {}. | A story about {}, please. | Once more, a story about {}! | I would like to hear a story about {}. | Do you know a story about {}? | Make up a story about {}. | Give me a short story about {}.
"""
ANY_REQUESTS = """
Tell me a story. | Tell me a story! | Please tell me a story. | Can you tell me a story? | Write a story. | Write a short story. | Do you know a story? | I want to hear a story. | Tell me something. | A story, please. | tell me a story
"""
JOINTS = ("{} and {}", "{} and {}", "{} with {}", "{} who sees {}", "{} who has {}")


def alternatives(text: str) -> list[str]:
    return [part.strip() for part in text.split("|")]


REQUEST_FORMS, ANY_FORMS = alternatives(REQUESTS), alternatives(ANY_REQUESTS)


def describe_hero(rng: Random, about: Scene, asked: frozenset[str]) -> str:
    """ "Lily", "a girl named Lily" or "a brave girl named Lily", as much as is asked for."""
    if "stated" not in asked:
        return about.name
    who = f"{about.adjective} {about.gender}" if "adjective" in asked else about.gender
    return f"{words.with_article(who)} {rng.choice(('named', 'called', 'named'))} {about.name}"


def describe_noun(about: Scene, asked: frozenset[str]) -> str:
    parts = [about.size if "size" in asked else "", about.color if "color" in asked else "", about.noun]
    return words.with_article(" ".join(part for part in parts if part))


def phrase(rng: Random, about: Scene, asked: frozenset[str]) -> str:
    """The request in words. The same scene and `asked` may be worded in many ways."""
    topics = []
    if "name" in asked:
        topics.append(describe_hero(rng, about, asked))
    if "friend" in asked:
        topics.append(about.friend)
    if "noun" in asked:
        topics.append(describe_noun(about, asked))
    if not topics:
        return f"Tell me a story at the {about.place}." if "place" in asked else rng.choice(ANY_FORMS)
    topic = (
        topics[0]
        if len(topics) == 1
        else rng.choice(JOINTS[:2] if "friend" in asked else JOINTS).format(", ".join(topics[:-1]), topics[-1])
    )
    if "place" in asked:
        topic += f" at the {about.place}"
    return rng.choice(REQUEST_FORMS).format(topic)


def request_and_story(
    rng: Random,
    shape: str | None = None,
    kind: str | None = None,
    gender: str | None = None,
    evaluation: bool = False,
    **fixed: str,
) -> tuple[str, str, Scene]:
    """A request, a story that honors it, and its scene.

    `shape` is a key of SHAPES, `kind` one of PLOTS, `fixed` sets slots; what is not given is drawn.
    """
    asked = frozenset(shape.split()) if shape is not None else rng.choices(list(SHAPES), SHAPES.values())[0]
    if "stated" in asked:
        gender = rng.choice(("girl", "boy"))
    while True:
        about_kind = kind or rng.choices(("thing", "animal", "food"), (6, 3, 1))[0]
        about = scene.draw(rng, about_kind, asked, gender=gender, evaluation=evaluation, **fixed)
        plot = choose_plot(rng, about_kind, about.noun)
        if asked & {"friend", "place"} <= plot.always:
            return phrase(rng, about, asked), tell(rng, plot, about), about
