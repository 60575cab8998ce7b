"""Triton's interpreter at about twice its speed: it makes the language its own once a launch, not once a call.

Before it runs a function, the interpreter looks through all of `triton.language` and puts its own in the place of each
builtin. It does so again for every function that a kernel calls, and finds nothing left to do; that search takes longer
than most of the calls. Only the outermost function puts the builtins back, so what the inner ones find stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
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


def stay_inside_the_arguments() -> None:
    """A kernel that touches memory outside its arguments fails, as it would on a GPU if the next bytes belong to nobody.

    Without this the interpreter reads what lies there, and goes on.
    """
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    extents: list[tuple[int, int]] = []  # the arguments' [first, last) addresses
    take_over = executor._init_args_hst

    def remember(self: Any, args: Any, kwargs: Any) -> Any:
        hosts = take_over(self, args, kwargs)
        extents[:] = merged(map(extent_of, tensors_in([*hosts[0], *hosts[1].values()])))
        return hosts

    def check(ptrs: Any, mask: Any) -> None:
        first = ptrs.data[np.asarray(mask.data, dtype=bool)] if mask is not None else ptrs.data.ravel()
        if not first.size:
            return
        first = first.astype(np.int64)
        starts, ends = np.array(extents, dtype=np.int64).reshape(-1, 2).T
        at = np.maximum(np.searchsorted(starts, first, side="right") - 1, 0)
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        outside = (first < starts[at]) | (first + size > ends[at])
        assert not outside.any(), (
            f"{outside.sum()} of {first.size} addresses lie outside the arguments of the kernel, the first one"
            f" {(first - ends[at])[outside][0]} bytes behind the end of the nearest before it"
        )

    def checked(name: str, mask_at: int | None) -> None:
        work = getattr(builder, name)

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            ptrs = args[1] if name == "create_atomic_rmw" else args[0]
            check(ptrs, None if mask_at is None else args[mask_at])
            return work(self, *args, **kwargs)

        setattr(builder, name, run)

    checked("create_masked_load", 1)
    checked("create_masked_store", 2)
    checked("create_atomic_cas", None)
    checked("create_atomic_rmw", 3)
    executor._init_args_hst = remember


def tensors_in(values: Any) -> list[Any]:
    """The tensors among arguments; those of tuples and descriptors, too."""
    found = []
    for value in values:
        if isinstance(value, tuple):
            found += tensors_in(value)
        elif hasattr(value, "base"):
            found += tensors_in([value.base])
        elif hasattr(value, "data_ptr"):
            found.append(value)
    return found


def extent_of(tensor: Any) -> tuple[int, int]:
    """The addresses between which its numbers lie."""
    start, size = tensor.data_ptr(), tensor.element_size()
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (start, start + (last + 1) * size) if tensor.numel() else (start, start)


def merged(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Extents that overlap or touch, as views of one tensor do, are one."""
    whole: list[tuple[int, int]] = []
    for start, end in sorted(extents):
        if whole and start <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(end, whole[-1][1]))
        else:
            whole.append((start, end))
    return whole
