"""Triton's interpreter at several times its speed, and strict about addresses.

Before it runs a function, the interpreter looks through all of `triton.language` and puts its own in the place of each
builtin. It does so again for every function that a kernel calls, and finds nothing left to do; that search takes longer
than most of the calls. Only the outermost function puts the builtins back, so what the inner ones find stays as it is.

Much of the remaining time went into types: the shape of every block was wrapped, checked and printed anew. It is looked up.
"""

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def patch_the_language_once() -> None:
    patch: Callable[[Any], Any] = interpreter._patch_lang

    @cache
    def languages(function: Any) -> list[Any]:
        return [module for module in function.__globals__.values() if module is tl or module is tl.core]

    def patch_if_it_is_not(function: Any) -> Any:
        if any(tl.core.is_builtin(language.load) for language in languages(function)):
            return patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_if_it_is_not


def remember_types() -> None:
    """Keep what the interpreter derives from a type or a shape. It derives it for each operation, and there are few kinds."""
    core = tl.core
    whole_init = core.block_type.__init__
    semantic = interpreter.interpreter_semantic
    broadcast: Callable[..., Any] = semantic.broadcast_impl_value
    blocks: dict[Any, tuple[Any, int, str]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}
    np_types: dict[str, np.dtype[Any]] = {}
    np_type: Callable[[Any], np.dtype[Any]] = interpreter._get_np_dtype

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in blocks:
            whole_init(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            shapes[key] = core.constexpr(math.prod(key)), core.tuple([core.constexpr(size) for size in key])
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[key]

    def np_type_of(tt_dtype: Any) -> np.dtype[Any]:
        name = tt_dtype.scalar.name
        if name not in np_types:
            np_types[name] = np_type(tt_dtype)
        return np_types[name]

    def broadcast_if_they_differ(lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(lhs, rhs)

    core.block_type.__init__ = init_block_type
    core.tensor.__init__ = init_tensor
    interpreter._get_np_dtype = np_type_of
    semantic.broadcast_impl_value = broadcast_if_they_differ


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
