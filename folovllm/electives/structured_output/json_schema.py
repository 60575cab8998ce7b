"""JSON schemas that llguidance takes and that have no end: rewritten where that keeps their documents, else refused.

The library lets a comma follow where no name of a property is left: the names that `patternProperties` describes may all be
those of `properties`, and with patterns for all names none is left for `additionalProperties`. And it follows references
that lead back to themselves, so that no document is finite. It reads all numbers as float64, and takes whole ones that are
beyond 64 bits for the largest there is; -2**63 ends the process.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any

import numpy as np

Schema = dict[str, Any]
LARGEST = 2**63 - 1024  # the largest float64 below 2**63, up to which llguidance counts
SMALLEST = 1e-64  # the library's pattern for a fraction nests once for each zero
MOST_OPTIONAL = 1900  # items: the library's parser keeps 2,000 places at once
MOST_NAMES = 64  # of patterns, that are written out
LEAST, MOST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
FEW_NAMES = r"\^(\([^()*+{}]*\)|[^()|*+{}]*)\$"  # patterns of which no name goes on matching
ONE = ("additionalProperties", "items", "additionalItems")  # keywords whose value is a schema
SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # a list of them
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # a dictionary of them


def with_an_end(schema: Schema) -> Schema:
    """Return a schema of the same documents without commas that lead nowhere, and without whole numbers beyond 64 bits.

    Raises:
        ValueError: no document is finite; a name may begin that cannot end; a number is none of the library's; or, unless the
            library is told to be lenient, repeated names could make up `minProperties`.
    """
    schema = _map(schema, _with_bounds)  # first of all: the library meets no other numbers below
    endless = _endless_references(schema)
    shared: Schema = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    is_strict = not schema.get("x-guidance", {}).get("lenient")

    def change(inner: Schema) -> Schema | bool:
        if inner.get("$ref") in endless:
            return False
        inner = _without_empty_patterns(_without_forbidden_names(inner, shared))
        if is_strict:
            _require_countable(inner)
        return inner

    rewritten: Schema = _map(schema, change)
    return rewritten


def _numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(inner)
    elif _is_number(value):
        yield value


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _without_forbidden_names(schema: Schema, shared: Schema) -> Schema:
    """Drop patterns for names that no value may have. Raises ValueError if others may, for then such a name begins and never ends."""
    patterns = schema.get("patternProperties")
    if not isinstance(patterns, dict):
        return schema
    kept, properties = dict(patterns), schema.get("properties") or {}
    error = _matcher({"type": "object", "patternProperties": {pattern: {} for pattern in patterns}}).get_error()
    if "disjoint" in error:  # the library does not look at a pattern of names that may not be
        raise ValueError(" ".join(error.split()))
    for pattern, inner in patterns.items():
        if re.fullmatch(FEW_NAMES, pattern) or not _has_no_document(inner, shared):
            continue
        if schema.get("additionalProperties") is not False:
            raise ValueError(
                f"patternProperties forbids all names with {pattern!r:.100}, and a name that has begun so could not end: "
                "describe the names that may be"
            )
        del kept[pattern]
        properties = {name: not _matches(pattern, name) and described for name, described in properties.items()}
    return {**schema, "properties": properties, "patternProperties": kept}


def _has_no_document(schema: Any, shared: Schema) -> bool:
    """Return whether the library finds that no document is valid."""
    if not isinstance(schema, dict):
        return schema is False
    matcher = _matcher({**shared, **schema})
    return "nsatisfiable" in matcher.get_error()


def _map(schema: Any, change: Callable[[Schema], Schema | bool]) -> Any:
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


def _with_bounds(schema: Schema) -> Schema:
    """Bound a whole number to 64 bits where the schema does not: a model may go on with its digits for ever.

    Bounds that are no float64 move inwards to the next one. Raises ValueError for those beyond 64 bits that leave nothing, and
    for a number that an answer must hold and that the library writes as another one.
    """
    for number in _numbers_in([schema.get("const"), schema.get("enum")]):
        whole = int(number) if isinstance(number, int) or number.is_integer() else 0
        if abs(whole) > LARGEST or int(float(whole)) != whole:
            raise ValueError(f"the number {number!r:.40} is beyond those that are kept exactly: write it as a text")
    items, fixed = schema.get("prefixItems"), schema.get("minItems", 0)
    if isinstance(items, list) and _is_number(fixed) and len(items) - fixed > MOST_OPTIONAL:
        raise ValueError(
            f"prefixItems has {len(items)} items, and at most {MOST_OPTIONAL} more than minItems can be kept"
        )
    schema = {key: _bound(key, value) if key in (*LEAST, *MOST) else value for key, value in schema.items()}
    types, said = schema.get("type"), {*LEAST, *MOST, "enum", "const"}
    is_whole = "integer" in types and "number" not in types if isinstance(types, list) else types == "integer"
    if is_whole:
        return {**schema, "minimum": -LARGEST, "maximum": LARGEST} if said.isdisjoint(schema) else schema
    for exclusive, inclusive, sign in ("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1):
        bound: Any = schema.get(exclusive)
        if _is_number(bound):  # 1.00000000000000000001 is 1 to whoever reads it
            next_one = math.nextafter(bound, sign * math.inf) if abs(bound) > SMALLEST else sign * SMALLEST
            given = schema.get(inclusive, next_one)
            schema = {**schema, inclusive: sign * max(sign * given, sign * next_one) if _is_number(given) else given}
    return schema


def _bound(key: str, value: Any) -> Any:
    if not _is_number(value):
        return value
    sign = 1 if key in LEAST else -1
    if sign * value > LARGEST:
        raise ValueError(f"{key} is {value!r:.40}, beyond numbers of 64 bits")
    if sign * value < -LARGEST:
        return -sign * LARGEST
    inwards = float(value)
    if sign * int(inwards) < sign * value and isinstance(value, int):
        inwards = math.nextafter(inwards, sign * math.inf)
    return int(inwards) if isinstance(value, int) else value


def _without_empty_patterns(schema: Schema) -> Schema:
    """Drop the patterns that match no name but those of `properties` and `required`, which get the patterns' schemas."""
    patterns = schema.get("patternProperties")
    if not patterns or not isinstance(patterns, dict):
        return schema
    properties, least = dict(schema.get("properties") or {}), schema.get("minProperties", 0)
    names = [*dict.fromkeys([*properties, *(schema.get("required") or [])])]
    if schema.get("additionalProperties") is False and _is_number(least) and least > 1:
        # The library counts a name as often as it comes, and not where all names are known and required.
        names = [*dict.fromkeys([*names, *(name for pattern in patterns for name in _few_names(pattern))])]
        if least > len(names) and not _has_names(names, patterns, False):
            raise ValueError(
                f"minProperties asks for {least} properties, and only {len(names)} have a name that may be"
            )
    kept = dict(patterns)
    for pattern, inner in patterns.items():
        if not _has_names(names, {pattern: {}}, False):
            del kept[pattern]
            properties |= {n: {"allOf": [properties.get(n, {}), inner]} for n in names if _matches(pattern, n)}
    found = {**schema, "properties": properties, "patternProperties": kept}
    if not _has_names(names, dict.fromkeys(kept, False), {}):
        found["additionalProperties"] = False
    return found


def _require_countable(schema: Schema) -> None:
    """Raise ValueError if the library may fill up `minProperties` with one name again and again: it counts each time."""
    least, names = schema.get("minProperties", 0), {*(schema.get("required") or [])}  # all others: the library refuses
    has_others = schema.get("patternProperties") or schema.get("additionalProperties") is not False
    if _is_number(least) and least > len(names) + 1 and has_others:
        raise ValueError(
            f"minProperties asks for {least} properties, and one name could be given several times: name at least {int(least) - 1} "
            "of them in required, or say strict=False, which lets a name count as often as it comes"
        )


def _has_names(taken: list[str], patterns: Schema, additional: Schema | bool) -> bool:
    """Return whether an object of this schema may have a property that is none of `taken`: a name may begin in it."""
    schema = {"properties": dict.fromkeys(taken, False), "patternProperties": patterns}
    matcher = _matcher({"type": "object", **schema, "additionalProperties": additional})
    return bool(matcher.is_error() or matcher.validate_tokens(list(b'{"')) == 2)


def _few_names(pattern: str) -> list[str]:
    """Return the names that match a pattern, or none if they are more than `MOST_NAMES`."""
    if not re.fullmatch(FEW_NAMES, pattern):
        return []
    start = _matcher({"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False})
    names, begun = set[str](), [(start, b'{"')]
    start.consume_tokens(list(b'{"'))
    while begun and len(names) <= MOST_NAMES:
        place, text = begun.pop()
        for byte in np.unpackbits(np.frombuffer(place.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0]:
            if byte == ord('"'):
                names.add(json.loads(text[1:] + b'"'))
            else:
                further = place.deep_copy()
                further.consume_token(int(byte))
                begun.append((further, text + bytes([byte])))
    return sorted(names) if len(names) <= MOST_NAMES else []


@lru_cache(4096)
def _matches(pattern: str, name: str) -> bool:
    return bool(_matcher({"type": "object", "required": [name], "patternProperties": {pattern: False}}).is_error())


def _matcher(schema: Schema) -> Any:
    """Return the library's matcher of a schema, over bytes, in the library's own dialect of patterns."""
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})
    return LLMatcher(byte_tokenizer(), grammar, log_level=0)


@cache
def byte_tokenizer() -> Any:
    """Return a tokenizer of the library whose tokens 0 to 255 are bytes."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _endless_references(schema: Schema) -> set[Any]:
    """Return the references within the schema to which no document is finite. Raises ValueError if no document of all of it is.

    The least fixed point: a reference is finite once its target is, where the references in it are that are known to be.
    """
    finite: set[str] = set()
    references = {ref: target for ref in _references(schema) if (target := _target(schema, ref)) is not None}
    while new := {ref for ref, target in references.items() if ref not in finite and _ends(target, finite, references)}:
        finite |= new
    if not _ends(schema, finite, references):
        raise ValueError("its references lead back to themselves, so no document under it is finite")
    return references.keys() - finite


def _ends(schema: Any, finite: set[str], known: dict[str, Any]) -> bool:
    if not isinstance(schema, dict):
        return True
    ref, least = schema.get("$ref"), schema.get("minItems")
    if ref in known and ref not in finite:
        return False
    needed: list[Any] = list(schema.get("allOf") or [])
    properties = schema.get("properties") or {}
    if schema.get("type") == "object":
        patterns = schema.get("patternProperties") or {}
        for name in schema.get("required") or []:
            described = [properties[name]] if name in properties else []
            described += [inner for pattern, inner in patterns.items() if _matches(pattern, name)]
            needed += described or [schema.get("additionalProperties")]
    if schema.get("type") == "array" and isinstance(least, int | float) and least > 0:
        first = schema.get("prefixItems") or []
        needed += first[: int(least)] if least <= len(first) else [*first, schema.get("items")]
    choices = [options for name in ("anyOf", "oneOf") if (options := schema.get(name))]
    return all(_ends(inner, finite, known) for inner in needed) and all(
        any(_ends(inner, finite, known) for inner in options) for options in choices
    )


def _references(schema: Any) -> set[str]:
    """Return all references to a place in the same schema."""
    found: set[str] = set()

    def note(inner: Schema) -> Schema:
        if isinstance(ref := inner.get("$ref"), str) and ref.startswith("#"):
            found.add(ref)
        return inner

    _map(schema, note)
    return found


def _target(schema: Any, ref: str) -> Any:
    """Return the schema at a JSON pointer, "#/$defs/node" say; None if there is none."""
    for part in ref[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        schema = schema[int(part)] if isinstance(schema, list) and part.isdigit() else schema
        if isinstance(schema, dict):
            schema = schema.get(part)
    return schema
