"""Rules of a user's values: of which type a field is and how large, and what is taken beside our own arguments."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T", bound=Callable[..., Any])


class Limits(NamedTuple):
    """What numbers a field takes, and how an error says so."""

    least: float = 1
    most: float = 2**63 - 1
    works: str = "at least 1"


ABOVE_0 = math.ulp(0.0)  # the least number above 0
COUNT = Limits()
TYPES: dict[str, tuple[type, str]] = {  # by annotation, what a value is, and how an error says so
    "str": (str, "a text"),
    "bool": (bool, "True or False"),
    "float": (Real, "a number"),
    "int": (Integral, "a whole number"),
}


def require(condition: bool, message: str) -> None:
    """Raise a ValueError with `message` if the condition does not hold."""
    if not condition:
        raise ValueError(message)


def require_text(name: str, value: Any) -> None:
    """Raise a ValueError unless `value` is a string that has bytes: no lone surrogate in it."""
    fits = isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)
    require(fits, f"{name} must be a text, not {value!r}")


def is_whole(value: Any) -> bool:
    """Whether it is a whole number of any library's; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_fields(kind: type, values: Mapping[str, Any], limits: Mapping[str, Limits] | None = None) -> None:
    """Raise ValueError for the value of a dataclass's field that is not of its type, or outside its limits.

    Whole numbers without limits are counts: at least 1. Other types than numbers, texts and switches are not checked.
    """
    for own in fields(kind):
        annotation, _, may_be_none = str(own.type).partition(" | ")
        if own.name not in values or annotation not in TYPES or ((value := values[own.name]) is None and may_be_none):
            continue
        type_, says = TYPES[annotation]
        limit = (limits or {}).get(own.name, COUNT if annotation == "int" else None)
        if limit is None:
            require(isinstance(value, type_), f"{own.name} must be {says}, not {value!r}")
        else:
            fits = isinstance(value, type_) and not (annotation == "int" and isinstance(value, bool))
            fits = fits and limit.least <= value <= limit.most
            require(fits, f"{own.name} must be {limit.works} ({says}), not {value!r}")


def takes_vllm_arguments(table: str) -> Callable[[T], T]:
    """Decorate a function or a class to take the arguments of a table of `vllm_arguments`, too: a ValueError if one changes something."""

    def decorate(target: T) -> T:
        inner: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
        known = inspect.signature(inner).parameters.keys()

        @functools.wraps(inner)
        def outer(*args: Any, **given: Any) -> Any:
            if not given.keys() <= known:
                from folovllm.engine.vllm_arguments import drop_neutral  # here, for few need it

                drop_neutral(table, given)
            return inner(*args, **given)

        if not isinstance(target, type):
            return outer  # type: ignore[return-value]
        target.__init__ = outer  # type: ignore[misc]
        return target

    return decorate
