"""Triton's interpreter at about twice its speed: it makes the language its own once a launch, not once a call.

Before it runs a function, the interpreter looks through all of `triton.language` and puts its own in the place of each
builtin. It does so again for every function that a kernel calls, and finds nothing left to do; that search takes longer
than most of the calls. Only the outermost function puts the builtins back, so what the inner ones find stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_the_language_once() -> None:
    patch: Callable[[Any], Any] = interpreter._patch_lang

    def patch_if_it_is_not(function: Any) -> Any:
        languages = [module for module in function.__globals__.values() if module is tl or module is tl.core]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_if_it_is_not
