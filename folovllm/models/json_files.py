"""Read the JSON files of a model's folder, and say what is wrong with them before anything builds on them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from folovllm.require import is_whole

DTYPES = ("float64", "float32", "float16", "bfloat16")


class Kind(NamedTuple):
    """What a field may hold, in words and as a test."""

    says: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


OBJECT = Kind("an object {...}", lambda value: isinstance(value, dict))
SIZE = Kind("a whole number of at least 1", lambda value: is_whole(value) and 1 <= value < 2**31)
SIZES = Kind(
    "a whole number of at least 1, or a list of them",
    lambda value: value != [] and all(map(SIZE.fits, _as_list(value))),
)
WINDOW = Kind("a whole number, 0 for none", lambda value: is_whole(value) and 0 <= value < 2**31)
INDEX = Kind("a whole number of at least 0", lambda value: is_whole(value) and 0 <= value < 2**31)
LAYERS = Kind("a whole number from 1 to 10,000", lambda value: is_whole(value) and 1 <= value <= 10_000)
ABOVE_0 = Kind("a number above 0", lambda value: _is_number(value) and 0 < value < 2**63)
NUMBER = Kind("a number", lambda value: is_whole(value) or isinstance(value, float))
SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
TEXTS = Kind("a list of texts", lambda value: _is_list_of(str, value))
DTYPE = Kind(f"one of {', '.join(DTYPES)}", lambda value: value in DTYPES)
OBJECTS = Kind("a list of objects", lambda value: _is_list_of(dict, value))
TOKEN = Kind("a text or an object", lambda value: isinstance(value, str | dict))
TEMPLATE = Kind("a text or a list of objects", lambda value: isinstance(value, str) or _is_list_of(dict, value))
IDS = Kind("a token id or a list of them", lambda value: all(map(is_whole, _as_list(value))))


def check_fields(where: str, content: dict[str, Any], kinds: dict[str, Kind], may_be_null: bool = True) -> None:
    """Raise ValueError at the first field that is not of its kind."""
    if not isinstance(content, dict):
        raise ValueError(f"{where} is {_short(content)}, and must be {OBJECT.says}")
    for name, kind in kinds.items():
        if name not in content or (may_be_null and content[name] is None):
            continue
        if not kind.fits(content[name]):
            raise ValueError(f"{where}: {name} is {_short(content[name])}, and must be {kind.says}")


def _short(value: Any) -> str:
    """Return the beginning of a value, as JSON writes it, for a sentence."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
