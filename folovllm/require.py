"""What checks of a user's values share."""

from __future__ import annotations

from numbers import Integral
from typing import Any


def require(condition: bool, message: str) -> None:
    """Raise a ValueError with `message` if the condition does not hold."""
    if not condition:
        raise ValueError(message)


def is_whole(value: Any) -> bool:
    """Whether it is a whole number of any library's; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)
