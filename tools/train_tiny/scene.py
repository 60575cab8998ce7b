"""A scene: everything that a story is about. Asked-for parts are drawn evenly, the others from favorites."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar
from zlib import crc32

from . import names, words

T = TypeVar("T")
NOUNS = {"thing": words.THINGS, "animal": words.ANIMALS, "food": words.FOODS}
PRONOUNS = {
    "girl": {"he": "she", "He": "She", "him": "her", "his": "her", "His": "Her", "child": "girl"},
    "boy": {"he": "he", "He": "He", "him": "him", "his": "his", "His": "His", "child": "boy"},
}


@dataclass(frozen=True, slots=True)
class Scene:
    """The values of a story's slots; `size` may be empty, all others are words."""

    name: str
    gender: str
    adjective: str
    size: str
    color: str
    noun: str
    friend: str
    animal: str
    place: str
    family: str
    weather: str
    hiding: str

    @property
    def the_thing(self) -> str:
        return f"{self.size} {self.color} {self.noun}".lstrip()

    def slots(self) -> dict[str, str]:
        """What the templates may mention: the fields, and phrases and pronouns made of them."""
        fields = {key: getattr(self, key) for key in self.__slots__}
        phrases = {
            "a_thing": words.with_article(self.the_thing),
            "a_noun": words.with_article(self.noun),
            "an_animal": words.with_article(self.animal),
            "an_adjective": words.with_article(self.adjective),
        }
        return fields | phrases | PRONOUNS[self.gender]


def favor(rng: Random, values: Sequence[T], turn: int = 0, sharpness: int = 3) -> T:
    """A draw that prefers early values: the first of n with probability n ** (-1 / sharpness).

    Even draws would leave a greedy decoder with near ties. `turn` rotates the order, so that different requests have
    different favorites.
    """
    return values[(int(len(values) * rng.random() ** sharpness) + turn) % len(values)]


def held_out(scene: Scene) -> bool:
    """Whether this combination belongs to the evaluation (one in ten, and every name of `never_trained`)."""
    key = f"{scene.name} {scene.noun} {scene.color} {scene.adjective}"
    return crc32(key.encode()) % 10 == 0 or names.never_trained(scene.name)


def draw_name(rng: Random, known: float = 0.5) -> str:
    """A name to be copied from a request: of the lists with probability `known`, else made up."""
    return rng.choice(names.EVERYBODY) if rng.random() < known else names.made_up(rng)


def draw_noun(rng: Random, kind: str) -> str:
    """A noun to be copied from a request; one in twelve is a made-up word."""
    return rng.choice(NOUNS[kind]) if rng.random() > 0.08 else names.made_up(rng).lower()


def draw(
    rng: Random, kind: str, asked: frozenset[str], *, gender: str | None = None, evaluation: bool = False, **fixed: str
) -> Scene:
    """A scene whose `asked` slots come from the whole open lists, and which is held out just if `evaluation`.

    `fixed` sets slots; `gender` is used for a made-up name, a known one has its own.
    """
    while True:
        scene = _draw(rng, kind, asked, gender, fixed)
        if held_out(scene) == evaluation and not (names.never_trained(scene.friend) and not evaluation):
            return scene


def turn_of(word: str, known: Container[str], slot: str = "") -> int:
    """Every known word rotates the favorites in its own way; made-up words, which cannot be learned, do not."""
    return crc32(f"{word} {slot}".encode()) if word in known else 0


def _draw(rng: Random, kind: str, asked: frozenset[str], gender: str | None, fixed: dict[str, str]) -> Scene:
    """One scene. What nobody asked for follows from the noun, and the noun from the name."""
    if "name" in asked and "name" not in fixed:
        fixed = {**fixed, "name": draw_name(rng)}
    if "noun" in asked and "noun" not in fixed:
        fixed = {**fixed, "noun": draw_noun(rng, kind)}
    noun = fixed.get("noun") or favor(rng, NOUNS[kind], turn_of(fixed.get("name", ""), names.KNOWN))

    def value(slot: str, values: Sequence[str]) -> str:
        if slot in fixed:
            return fixed[slot]
        return rng.choice(values) if slot in asked else favor(rng, values, turn_of(noun, NOUNS[kind], slot))

    name = value("name", names.EVERYBODY)
    friend = draw_name(rng) if "friend" in asked else value("friend", names.EVERYBODY)
    while friend == name:
        friend = draw_name(rng)
    return Scene(
        name=name,
        gender=names.KNOWN.get(name) or gender or names.guess_gender(name),
        adjective=value("adjective", words.ADJECTIVES),
        size=value("size", words.SIZES) if "size" in asked or "size" in fixed else "",
        color=value("color", words.COLORS),
        noun=noun,
        friend=friend,
        animal=value("animal", [a for a in words.ANIMALS[:40] if a != noun]),
        place=value("place", words.PLACES),
        family=value("family", words.FAMILY),
        weather=value("weather", words.WEATHER),
        hiding=value("hiding", words.HIDING),
    )
