"""JSON schemas whose numbers llguidance keeps: rewritten where that keeps their documents, else refused.

The library reads all numbers as float64, and takes whole ones beyond 64 bits for the largest there is; -2**63 ends the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

Schema = dict[str, Any]
LARGEST = 2**63 - 1024  # the largest float64 below 2**63, up to which llguidance counts
SMALLEST = 1e-64  # the library's pattern for a fraction nests once for each zero
LEAST, MOST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
BOUNDED = {*LEAST, *MOST, "enum", "const"}  # keywords with which a whole number has an end
ONE = ("additionalProperties", "items", "additionalItems")  # keywords whose value is a schema
SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # a list of them
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # a dictionary of them


def with_an_end(schema: Schema) -> Schema:
    """Return a schema of the same documents in which whole numbers without a bound have 64 bits.

    Raises:
        ValueError: a number is none of the library's; names are forbidden by a pattern, so that one may begin and never end; or,
            unless the library is told to be lenient, repeated names could make up `minProperties`.
    """
    is_strict = not schema.get("x-guidance", {}).get("lenient")

    def change(inner: Schema) -> Schema:
        _require_names(inner, is_strict)
        return _with_bounds(inner)

    rewritten: Schema = _map(schema, change)
    return rewritten


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


def _require_names(schema: Schema, is_strict: bool) -> None:
    """Raise ValueError if a pattern forbids names, or if one name could fill up `minProperties`: the library counts each time."""
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
    for number in _numbers_in([schema.get("const"), schema.get("enum")]):
        _require_exact(number)
    schema = {key: _bound(key, value) if key in (*LEAST, *MOST) else value for key, value in schema.items()}
    types = schema.get("type")
    is_whole = "integer" in types and "number" not in types if isinstance(types, list) else types == "integer"
    if is_whole:
        return {**schema, "minimum": -LARGEST, "maximum": LARGEST} if BOUNDED.isdisjoint(schema) else schema
    for exclusive, inclusive, sign in ("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1):
        bound: Any = schema.get(exclusive)
        if _is_number(bound):  # 0 passes an exclusiveMinimum of 0, and 1.00000000000000000001 is 1 to whoever reads it
            next_one = math.nextafter(bound, sign * math.inf) if abs(bound) > SMALLEST else sign * SMALLEST
            given = schema.get(inclusive, next_one)
            schema = {**schema, inclusive: sign * max(sign * given, sign * next_one) if _is_number(given) else given}
    return schema


def _bound(key: str, value: Any) -> Any:
    """A bound; one beyond 64 bits that leaves numbers on this side is that of 64 bits."""
    if not _is_number(value):
        return value
    if key in LEAST and value < -LARGEST:
        return -LARGEST
    if key in MOST and value > LARGEST:
        return LARGEST
    _require_exact(value)
    return value


def _require_exact(number: int | float) -> None:
    whole = int(number) if isinstance(number, int) or number.is_integer() else 0
    if abs(whole) > LARGEST or int(float(whole)) != whole:
        raise ValueError(f"the number {number!r:.40} is beyond those that are kept exactly: write it as a text")


def _numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(inner)
    elif _is_number(value):
        yield value


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


@cache
def byte_tokenizer() -> Any:
    """Return a tokenizer of the library whose tokens 0 to 255 are bytes."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")
