"""What checks of a user's values share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from numbers import Integral
from typing import Any, TypeVar

from folovllm.vllm_arguments import Neutral, refuse_unless_neutral

T = TypeVar("T", bound=Callable[..., Any])


def require(condition: bool, message: str) -> None:
    """Raise a ValueError with `message` if the condition does not hold."""
    if not condition:
        raise ValueError(message)


def is_whole(value: Any) -> bool:
    """Whether it is a whole number of any library's; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def also_takes(neutral: Neutral) -> Callable[[T], T]:
    """Decorate a function, or a class for its constructor, to take the arguments of `neutral` beside its own (`vllm_arguments`).

    Raises:
        ValueError: by what is decorated, for one of them whose value would change something.
    """

    def decorate(target: T) -> T:
        inner: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]

        @functools.wraps(inner)
        def outer(*args: Any, **given: Any) -> Any:
            for name in neutral.keys() & given.keys():
                refuse_unless_neutral(name, given.pop(name), neutral[name])
            return inner(*args, **given)

        if not isinstance(target, type):
            return outer  # type: ignore[return-value]
        target.__init__ = outer  # type: ignore[misc]
        return target

    return decorate
