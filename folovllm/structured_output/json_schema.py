"""JSON schemas that llguidance takes and that have no end: rewritten where that keeps their documents, else refused.

The library lets a comma follow where no name of a property is left: the names that `patternProperties` describes may all be
those of `properties`, and with patterns for all names none is left for `additionalProperties`. And it follows references
that lead back to themselves, so that no document is finite.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

Schema = dict[str, Any]
LARGEST = 2**63 - 1024  # the largest float64 below 2**63, up to which llguidance counts
ONE = ("additionalProperties", "items", "additionalItems")  # keywords whose value is a schema
SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # a list of them
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # a dictionary of them


def with_an_end(schema: Schema) -> Schema:
    """Return a schema of the same documents without commas that lead nowhere. Raises ValueError if no document is finite."""
    if not is_finite(schema):
        raise ValueError("its references lead back to themselves, so no document under it is finite")
    rewritten: Schema = _map(schema, lambda inner: _with_bounds(_without_empty_patterns(inner)))
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


def _with_bounds(schema: Schema) -> Schema:
    """Bound a whole number to 64 bits where the schema does not: a model may go on with its digits for ever."""
    types, said = schema.get("type"), {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum", "const"}
    is_whole = "integer" in types and "number" not in types if isinstance(types, list) else types == "integer"
    return {**schema, "minimum": -LARGEST, "maximum": LARGEST} if is_whole and said.isdisjoint(schema) else schema


def _without_empty_patterns(schema: Schema) -> Schema:
    """Drop the patterns that match no name but those of `properties` and `required`, which get the patterns' schemas."""
    patterns = schema.get("patternProperties")
    if not patterns or not isinstance(patterns, dict):
        return schema
    properties = dict(schema.get("properties") or {})
    names = [*dict.fromkeys([*properties, *(schema.get("required") or [])])]
    kept = dict(patterns)
    for pattern, inner in patterns.items():
        if not _has_names(names, {pattern: {}}, False):
            del kept[pattern]
            properties |= {n: {"allOf": [properties.get(n, {}), inner]} for n in names if _matches(pattern, n)}
    found = {**schema, "properties": properties, "patternProperties": kept}
    if not _has_names(names, dict.fromkeys(kept, False), {}):
        found["additionalProperties"] = False
    return found


def _has_names(taken: list[str], patterns: Schema, additional: Schema | bool) -> bool:
    """Return whether an object of this schema may have a property that is none of `taken`: a name may begin in it."""
    schema = {"properties": dict.fromkeys(taken, False), "patternProperties": patterns}
    matcher = _matcher({"type": "object", **schema, "additionalProperties": additional})
    return bool(matcher.is_error() or matcher.validate_tokens(list(b'{"')) == 2)


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


def is_finite(schema: Schema) -> bool:
    """Return whether some document under the schema may be finite, as far as its references within it tell.

    The least fixed point: a reference is finite once its target is, where the references in it are that are known to be.
    """
    finite: set[str] = set()
    references = {ref: target for ref in _references(schema) if (target := _target(schema, ref)) is not None}
    while new := {ref for ref, target in references.items() if ref not in finite and _ends(target, finite, references)}:
        finite |= new
    return _ends(schema, finite, references)


def _ends(schema: Any, finite: set[str], known: dict[str, Any]) -> bool:
    if not isinstance(schema, dict):
        return True
    ref, least = schema.get("$ref"), schema.get("minItems")
    if ref in known and ref not in finite:
        return False
    needed: list[Any] = list(schema.get("allOf") or [])
    properties = schema.get("properties") or {}
    if schema.get("type") == "object":
        needed += [properties[name] for name in schema.get("required") or [] if name in properties]
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
