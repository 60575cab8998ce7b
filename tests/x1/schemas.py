"""Random JSON schemas that bound the length of what is valid under them."""

from __future__ import annotations

import random
from typing import Any

LETTERS = "abcdefgh"


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """One schema; `depth` levels of arrays, objects and alternatives at most."""
    leaves = [_integer, _number, _boolean, _null, _string, _pattern, _enum, _const, _format]
    nested = [_array, _object, _object, _any_of] if depth else []
    return rng.choice([*leaves, *nested * 2])(rng, depth)


def random_object(rng: random.Random) -> dict[str, Any]:
    """A schema as a request has it: of an object."""
    return _object(rng, 2)


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "integer", "exclusiveMinimum": -1, "exclusiveMaximum": rng.randint(1, 9)}


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "null"}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 5)}


def _pattern(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(["^[a-c]{1,3}$", "^(on|off)$", "^[0-9]{2}-[0-9]{2}$"])}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    values: list[Any] = ["red", "dark blue", 'a "b"', "é\n", 7, None, True, [1, 2]]
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice(["fixed", 42, False, {"a": [1]}])}


def _format(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "format": rng.choice(["ipv4", "uuid"])}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {
        "type": "array", "items": random_schema(rng, depth - 1), "minItems": least, "maxItems": least + rng.randint(0, 2)
    }  # fmt: skip


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(LETTERS, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
