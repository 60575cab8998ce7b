"""Random JSON schemas that bound the length of what is valid under them."""

from __future__ import annotations

import random
from typing import Any

VALUES: list[Any] = ["red", "dark blue", 'a "b"', "é\n", 7, None, True, [1, 2]]
PATTERNS = ["^[a-c]{1,3}$", "^(on|off)$", "^[0-9]{2}-[0-9]{2}$"]


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """One schema; `depth` levels of arrays, objects and alternatives at most."""
    low, least = rng.randint(-50, 50), rng.randint(0, 2)
    leaves: list[dict[str, Any]] = [
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)},
        {"type": "integer", "exclusiveMinimum": -1, "exclusiveMaximum": rng.randint(1, 9)},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 5)},
        {"type": "string", "pattern": rng.choice(PATTERNS)},
        {"enum": rng.sample(VALUES, rng.randint(1, 4))},
        {"const": rng.choice(["fixed", 42, False, {"a": [1]}])},
        {"type": "string", "format": rng.choice(["ipv4", "uuid"])},
    ]
    kind = rng.choice([*leaves, *["array", "object", "object", "anyOf"] * 2 * bool(depth)])
    if kind == "array":
        bounds = {"minItems": least, "maxItems": least + rng.randint(0, 2)}
        return {"type": "array", "items": random_schema(rng, depth - 1), **bounds}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    return random_object(rng, depth) if kind == "object" else kind


def random_object(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema as a request has it: of an object."""
    names = rng.sample("abcdefgh", rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
