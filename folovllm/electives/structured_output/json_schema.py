"""JSON schemas whose numbers, names and white space llguidance keeps: rewritten where that keeps their documents, else refused.

The library reads all numbers as float64, a tenth of those with 16 digits or more as a neighbour, and takes whole ones beyond 64 bits
for the largest there is; -2**63 ends the process.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

Schema = dict[str, Any]
LARGEST = 2**63 - 1024  # the largest float64 below 2**63, up to which llguidance counts
SMALLEST = 1e-64  # the library's pattern for a fraction nests once for each zero
MOST_SPACES = 16  # times that a part of a user's own pattern of white space repeats itself
BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}  # times the sign: lower bounds
EXCLUSIVE = (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1))
ONE = ("additionalProperties", "items", "additionalItems")  # keywords whose value is a schema
SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # a list of them
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # a dictionary of them


def bounded_schema(schema: Schema, options: dict[str, Any], **defaults: Any) -> str:
    """Return a schema of the same documents as JSON, in which whole numbers without a bound have 64 bits, and white space an end.

    Of the schema's own options (`x-guidance`), `options` replace those of the same name, and `defaults` do not; what is None is
    left out.

    Raises:
        ValueError: a number is none of the library's; names are forbidden by a pattern, so that one may begin and never end;
            repeated names could make up `minProperties`, unless the schema is to be read leniently; or it is no schema.
    """
    if not isinstance(given := schema.get("x-guidance", {}), dict):
        raise ValueError("x-guidance must be an object")
    given = {key: bounded_pattern(v) if isinstance(v, str) else v for key, v in given.items() if v is not None}
    options = {key: v for key, v in (defaults | given | options).items() if v is not None}
    schema = schema | {"x-guidance": options}

    def change(inner: Schema) -> Schema:
        _require_kept(inner, is_strict=not options.get("lenient"))
        return _with_bounds(inner)

    try:
        return json.dumps(_map(schema, change))
    except (TypeError, AttributeError) as error:
        raise ValueError("patternProperties must be an object, and required a list of names") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def bounded_pattern(pattern: str) -> str:
    """Return a regular expression whose parts repeat themselves at most `MOST_SPACES` times where it set no limit."""

    def bound(found: re.Match[str]) -> str:
        least = {"*": "0", "+": "1"}.get(found[0], found[1])
        return found[0] if least is None else f"{{{least},{int(least) + MOST_SPACES}}}"

    return re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[*+]|\{(\d{1,4}),\}", bound, pattern)


def _map(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """Return the schema with `change` made to it and to all schemas in it, the inner ones first."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            found[key] = {name: _map(inner, change) for name, inner in value.items()}
        elif key in SEVERAL and isinstance(value, list):
            found[key] = [_map(inner, change) for inner in value]
        elif key in ONE:
            found[key] = _map(value, change)
    return change(found)


def _require_kept(schema: Schema, is_strict: bool) -> None:
    """Raise ValueError if a pattern forbids names, or if one name could fill up `minProperties`: the library counts each time.

    Nor may first items be given in both ways: it passes over one of them.
    """
    if "prefixItems" in schema and isinstance(schema.get("items"), list):
        raise ValueError("prefixItems and a list of items describe the same: give one of them")
    patterns, least = schema.get("patternProperties") or {}, schema.get("minProperties", 0)
    if any(inner is False for inner in patterns.values()):
        raise ValueError("patternProperties forbids names: describe those that may be, with additionalProperties false")
    names = {*(schema.get("required") or [])}  # an optional one may be impossible
    has_others = patterns or schema.get("additionalProperties") is not False
    if is_strict and _is_number(least) and least > len(names) + 1 and has_others:
        raise ValueError(
            f"minProperties asks for {least} properties, and one name could be given several times: name at least {int(least) - 1} "
            "of them in required, or say strict=False, which lets a name count as often as it comes"
        )


def _with_bounds(schema: Schema) -> Schema:
    """Return the schema with numbers that the library counts with. Raises ValueError for one that it would take for another."""
    for number in _numbers_in([schema.get("const"), schema.get("enum")]):
        _require_exact(number)
    schema = dict(schema)
    for key, sign in BOUNDS.items():
        bound: Any = schema.get(key)
        if _is_number(bound):
            if sign * bound < -LARGEST:  # beyond 64 bits, and leaves all numbers on this side
                schema[key] = -sign * LARGEST
            else:
                _require_exact(bound)
    types = schema["type"] if isinstance(schema.get("type"), list) else [schema.get("type")]
    if "integer" in types and "number" not in types:
        for key, _, sign in EXCLUSIVE:  # the library goes on to the next whole number, which is a float64 too
            if _is_number(bound := schema.get(key)) and abs(bound) < LARGEST:
                _require_exact(math.floor(bound) + sign)
        has_end = not schema.keys().isdisjoint({*BOUNDS, "enum", "const"})
        return schema if has_end else {**schema, "minimum": -LARGEST, "maximum": LARGEST}
    for exclusive, inclusive, sign in EXCLUSIVE:
        bound = schema.get(exclusive)
        if _is_number(bound):  # 0 passes an exclusiveMinimum of 0, and 1.00000000000000000001 is 1 to whoever reads it
            next_one = math.nextafter(bound, sign * math.inf) if abs(bound) > SMALLEST else sign * SMALLEST
            other = schema.get(inclusive, next_one)
            schema[inclusive] = sign * max(sign * other, sign * next_one) if _is_number(other) else other
    return schema


def _require_exact(number: int | float) -> None:
    whole = int(number) if isinstance(number, int) or number.is_integer() else 0
    is_read = isinstance(number, int) or _as_read(number) == abs(number)
    if abs(whole) > LARGEST or int(float(whole)) != whole or not is_read:
        raise ValueError(
            f"the number {number!r:.40} is beyond those that are kept exactly: give it fewer digits, or write it as a text"
        )


def _as_read(number: float) -> float:
    """The absolute value that the library reads: all digits as a whole number, times a power of ten or by one, each rounded."""
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    whole, power = float("".join(map(str, digits))), float(f"1e{abs(int(exponent))}")
    return whole * power if int(exponent) > 0 else whole / power


def _numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(inner)
    elif _is_number(value):
        yield value


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))
