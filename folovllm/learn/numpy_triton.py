"""A stand-in for Triton on numpy, for machines that Triton is not made for: macOS and Windows.

It has what the kernels here use of `triton` and `triton.language`, with Triton's names and rules. A kernel runs as plain Python, one
program of its grid after the other. A tile is a `Tensor`: a numpy array with a type of Triton's. A pointer is a tile of addresses that
knows its argument, so a load or a store outside of that argument raises IndexError.

Memory is accessed by `InterpreterBuilder`, named after the class of Triton's own interpreter that has these methods: tests and counters
that watch a kernel put theirs in their place.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import operator
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial, update_wrapper
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._triton import has_triton_package

logger = logging.getLogger("folovllm")


@dataclass(frozen=True, eq=False)
class DType:
    """A type of numbers. numpy has no bfloat16 and no FP8: they are float32 here, which torch rounds after each operation."""

    name: str  # torch's
    array: Any  # numpy's type of the values
    bits: Any  # numpy's type of these numbers in memory

    @cached_property
    def primitive_bitwidth(self) -> int:
        return 8 * np.dtype(self.bits).itemsize

    @cached_property
    def rank(self) -> tuple[int, int, str]:
        """Operands take the type of the higher rank (tuple): floats before integers, then wide ones before narrow ones."""
        return "biuf".index(np.dtype(self.array).kind.replace("u", "i")), self.primitive_bitwidth, self.name

    def pack(self, values: np.ndarray) -> np.ndarray:
        """Round values to this type, and return them as memory holds them."""
        if self.array is self.bits:
            return values.astype(self.array, copy=False)
        narrow = torch.from_numpy(np.array(values, np.float32)).to(getattr(torch, self.name))
        return narrow.view(getattr(torch, self.bits.__name__)).numpy()

    def unpack(self, bits: np.ndarray) -> np.ndarray:
        """Return the values of numbers as memory holds them."""
        if self.array is self.bits:
            return bits
        return torch.from_numpy(np.array(bits)).view(getattr(torch, self.name)).float().numpy()


def plain(name: str) -> DType:
    return DType(name, getattr(np, name), getattr(np, name))


int1, int32, uint32, int64 = DType("bool", np.bool_, np.bool_), plain("int32"), plain("uint32"), plain("int64")
float16, float32, float64 = plain("float16"), plain("float32"), plain("float64")
bfloat16, float8 = DType("bfloat16", np.float32, np.int16), DType("float8_e4m3fn", np.float32, np.uint8)
TYPES = {t.name: t for t in (int1, int32, uint32, int64, float16, float32, float64, bfloat16, float8)}
TYPES |= {name: plain(name) for name in ("int8", "uint8", "int16", "uint16", "uint64")}


@dataclass(frozen=True)
class pointer_type:
    element_ty: DType


class constexpr:
    """The annotation of a parameter. Around a number it makes the same number, with its `value`."""

    def __new__(cls, value: Any) -> Any:
        kind = type(value)
        return type("Constant", (kind,), {"value": property(kind)})(value) if kind in (int, float) else value


@dataclass(frozen=True)
class Argument:
    """A tensor that a kernel was given: the parameter's name, the tensor's address, and the bytes from its first to its last number."""

    name: str
    start: int
    memory: np.ndarray

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Argument:
        """Return the argument that shares the memory of `tensor`."""
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        flat = tensor.detach().as_strided((last + 1 if tensor.numel() else 0,), (1,))
        return cls(name, tensor.data_ptr(), flat.view(torch.uint8).numpy())


@dataclass(eq=False)
class Tensor:
    """A tile, or without dimensions a number. Of a pointer `data` are addresses in bytes, which are to lie in `argument`."""

    data: np.ndarray
    dtype: Any
    argument: Any = None  # an `Argument`

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def get_element_ty(self) -> DType:
        return getattr(self.dtype, "element_ty", self.dtype)

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        """Return the tile in another type: its values rounded to it, or with `bitcast` its bits read as that type."""
        if isinstance(dtype, pointer_type):
            return Tensor(self.data, dtype, self.argument)
        if bitcast:
            return Tensor(dtype.unpack(self.dtype.pack(self.data).view(dtype.bits)), dtype)
        return self if dtype is self.dtype else Tensor(dtype.unpack(dtype.pack(self.data)), dtype)

    def reshape(self, *shape: Any) -> Tensor:
        return Tensor(self.data.reshape(*shape), self.dtype)

    def __getitem__(self, places: Any) -> Tensor:
        return Tensor(self.data[places], self.dtype, self.argument)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __neg__(self) -> Tensor:
        return Tensor(-self.data, self.dtype)

    def __invert__(self) -> Tensor:
        return Tensor(~self.data, self.dtype)


def type_of(x: Any) -> DType:
    """A tensor's type, or the one that Triton gives to a Python number."""
    if isinstance(x, Tensor):
        return x.dtype
    if isinstance(x, bool | float):
        return int1 if isinstance(x, bool) else float32
    return next(
        t for t in (int32, uint32, int64, TYPES["uint64"]) if np.iinfo(t.array).min <= x <= np.iinfo(t.array).max
    )


def as_tensor(x: Any, dtype: DType | None = None) -> Tensor:
    x = x if isinstance(x, Tensor) else Tensor(np.asarray(x, type_of(x).array), type_of(x))
    return x if dtype is None else x.to(dtype)


def promoted(a: Any, b: Any, divides: bool = False) -> tuple[np.ndarray, np.ndarray, DType]:
    """Return two operands' values in the type that Triton computes in, and this type.

    A Python number takes the tensor's type, unless it is of a higher kind (bool, integer, float). Numbers in half precision are
    divided in float32.
    """
    types = [type_of(a), type_of(b)]
    if isinstance(a, Tensor) != isinstance(b, Tensor):
        tensor, number = types if isinstance(a, Tensor) else types[::-1]
        types = [tensor] if number.rank[0] <= tensor.rank[0] else types
    common = max(types, key=lambda t: t.rank)
    if (types[0] is not types[-1] and common is bfloat16) or (divides and common in (float16, bfloat16)):
        common = float32
    return as_tensor(a, common).data, as_tensor(b, common).data, common


def binary(name: str, work: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return the operation on two tensors, or on one and a number. A signed integer that overflows raises OverflowError."""
    divides, compares = name in ("truediv", "floordiv", "mod"), name in ("lt", "le", "gt", "ge", "eq", "ne")

    def run(a: Any, b: Any, propagate_nan: Any = None) -> Tensor:
        if isinstance(type_of(b), pointer_type):
            a, b = b, a
        if isinstance(type_of(a), pointer_type):
            offset = as_tensor(b).data.astype(np.int64) * (a.dtype.element_ty.primitive_bitwidth // 8)
            return Tensor(work(a.data, offset), a.dtype, a.argument)
        x, y, common = promoted(a, b, divides)
        if name == "truediv" and common.rank < float16.rank:
            x, y, common = x.astype(np.float32), y.astype(np.float32), float32
        if name in ("add", "sub", "mul") and common.array in (np.int8, np.int16, np.int32):
            wide, limits = np.asarray(work(x.astype(np.int64), y)), np.iinfo(common.array)
            if ((wide < limits.min) | (wide > limits.max)).any():
                raise OverflowError(f"{common.name} overflow detected for operation {name} in {builder.kernel}")
        result = np.asarray(work(x, y))
        return Tensor(result, int1) if compares else Tensor(common.unpack(common.pack(result)), common)

    return run


def quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of integers, rounded towards zero as in C."""
    return (x - np.fmod(x, y)) // y


OPERATORS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide, "floordiv": quotient, "mod": np.fmod,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "lshift": np.left_shift, "rshift": np.right_shift,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
for _name, _work in OPERATORS.items():
    _run = binary(_name, _work)
    setattr(Tensor, f"__{_name}__", _run)
    setattr(Tensor, f"__r{_name}__", lambda a, b, run=_run: run(b, a))


class InterpreterBuilder:
    """The running program's place in the grid, and its access to memory. It ignores `how`, hints to a compiler."""

    kernel: str
    grid_idx: tuple[int, ...]
    grid_dim: tuple[int, ...]
    options: Any = None  # of Triton's interpreter; here integers that overflow are always an error

    def create_load(self, ptrs: Tensor, *how: Any) -> Tensor:
        return self.create_masked_load(ptrs, Tensor(np.ones(ptrs.shape, bool), int1), None, *how)

    def create_masked_load(self, ptrs: Tensor, mask: Tensor, other: Tensor | None, *how: Any) -> Tensor:
        """Return the numbers at these addresses. Where the mask is false nothing is read: the result has `other` there, or zero."""
        memory, places = self._places(ptrs, mask, "loads from")
        element = ptrs.get_element_ty()
        bits = np.zeros(ptrs.shape, element.bits)
        if other is not None:
            bits[...] = element.pack(other.data)
        bits[mask.data] = memory[places]
        return Tensor(element.unpack(bits), element)

    def create_masked_store(self, ptrs: Tensor, value: Tensor, mask: Tensor, *how: Any) -> None:
        memory, places = self._places(ptrs, mask, "stores to")
        memory[places] = ptrs.get_element_ty().pack(value.data)[mask.data]

    def create_dot(self, a: Tensor, b: Tensor, acc: Tensor, *how: Any) -> Tensor:
        return Tensor(np.matmul(a.data, b.data, dtype=acc.data.dtype) + acc.data, acc.dtype)

    def _places(self, ptrs: Tensor, mask: Tensor, does: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the argument's numbers, and the indices of those where `mask` is true. Raises IndexError outside of the argument."""
        argument, bits = ptrs.argument, ptrs.get_element_ty().bits
        size = np.dtype(bits).itemsize
        memory = argument.memory[: len(argument.memory) // size * size].view(bits)
        places = (ptrs.data[mask.data] - argument.start) // size
        outside = (places < 0) | (places >= len(memory))
        if outside.any():
            first = places[outside][0]
            raise IndexError(
                f"{outside.sum()} of {places.size} addresses lie outside the arguments of the kernel, the first one"
                f" {(first - len(memory)) * size} bytes behind the end: {self.kernel} {does} {argument.name} at offset"
                f" {first}, and there are {len(memory)} numbers"
            )
        return memory, places


builder = InterpreterBuilder()


def broadcast(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in one shape."""
    arrays = np.broadcast_arrays(*[tensor.data for tensor in tensors])
    return [Tensor(array, t.dtype, t.argument) for array, t in zip(arrays, tensors, strict=True)]


def load(pointer: Tensor, mask: Any = None, other: Any = None, cache_modifier: str = "", **_: Any) -> Tensor:
    """Return the numbers at the addresses of a tile. Where `mask` is False nothing is read, and `other` stands."""
    if mask is None:
        return builder.create_load(pointer, cache_modifier, "", False)
    pointer, mask = broadcast(pointer, as_tensor(mask))
    other = None if other is None else as_tensor(other, pointer.get_element_ty())
    return builder.create_masked_load(pointer, mask, other, cache_modifier, "", False)


def store(pointer: Tensor, value: Any, mask: Any = True, **_: Any) -> None:
    pointer, mask, value = broadcast(pointer, as_tensor(mask), as_tensor(value, pointer.get_element_ty()))
    builder.create_masked_store(pointer, value, mask, "", "")


def atomic(name: str) -> Callable[..., Tensor]:
    def run(pointer: Tensor, value: Any, mask: Any = True, **_: Any) -> Tensor:
        """Return the numbers before. Programs follow one another; a program's own addresses must differ."""
        old = load(pointer, mask)
        store(pointer, binary(name, OPERATORS[name])(old, value), mask)
        return old

    return run


def full(shape: Any, value: Any, dtype: DType) -> Tensor:
    """Return a tile full of `value`. Raises ValueError for a size that is no power of two."""
    sizes = [operator.index(size) for size in shape]
    if any(size < 1 or size & (size - 1) for size in sizes):
        raise ValueError(f"the sizes of a tile are powers of two, not {sizes}")
    return Tensor(np.full(sizes, as_tensor(value, dtype).data), dtype)


def arange(start: int, end: int) -> Tensor:
    return Tensor(full([end - start], start, int32).data + np.arange(end - start, dtype=np.int32), int32)


def dot(
    a: Tensor, b: Tensor, acc: Tensor | None = None, input_precision: str = "tf32", out_dtype: Any = None
) -> Tensor:
    """[M, K] x [K, N] + `acc` [M, N]: in float32, and of int8 in int32."""
    wide = int32 if a.dtype is TYPES["int8"] else float32
    acc = full([*a.shape[:-1], b.shape[-1]], 0, wide) if acc is None else acc
    if a.dtype is not b.dtype or acc.dtype is not wide:
        raise TypeError(
            f"tl.dot takes two tiles of one type, not {a.dtype.name} and {b.dtype.name}, and adds to {wide.name}"
        )
    return builder.create_dot(a, b, acc, input_precision, 0)


def where(condition: Any, x: Any, y: Any) -> Tensor:
    x, y, common = promoted(x, y)
    return Tensor(np.where(as_tensor(condition, int1).data, x, y), common)


def cdiv(x: Any, y: Any) -> Any:
    return (x + y - 1) // y


def static_assert(condition: Any, message: str = "") -> None:
    assert condition, message


def reduction(work: np.ufunc) -> Callable[..., Tensor]:
    """Over one axis or over all. The result has at least 32 bits, except for a sum of float16."""

    def run(x: Tensor, axis: int | None = None, keep_dims: bool = False, return_indices: bool = False) -> Any:
        dtype = x.dtype
        if dtype.primitive_bitwidth < 32 and not (dtype is float16 and work is np.add):
            is_float, is_unsigned = dtype.rank[0] == float32.rank[0], dtype.name[0] in "bu"
            dtype = float32 if is_float else uint32 if is_unsigned and work is np.add else int32
        result = Tensor(np.asarray(work.reduce(x.to(dtype).data, axis, keepdims=keep_dims, dtype=dtype.array)), dtype)
        return (result, Tensor(np.asarray(x.data.argmax(axis), np.int32), int32)) if return_indices else result

    return run


def unary(name: str, work: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        if x.dtype not in (float32, float64):
            raise TypeError(f"tl.{name} takes float32, not {x.dtype.name}")
        return Tensor(np.asarray(work(x.data)), x.dtype)

    return run


class JITFunction:
    """A kernel, whose programs `kernel[grid](...)` runs, or a function that kernels call."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        update_wrapper(self, fn)
        self.fn, self.signature = fn, inspect.signature(fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, (*grid, 1, 1)[:3])

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Run the programs one after the other. Options that are no parameters are for a compiler."""
        warn_once()
        parameters = self.signature.parameters
        given = self.signature.bind(*args, **{name: value for name, value in options.items() if name in parameters})
        given.apply_defaults()
        for name, value in given.arguments.items():
            if "constexpr" not in str(parameters[name].annotation):
                given.arguments[name] = in_kernel(name, value)
        builder.kernel, builder.grid_dim = self.fn.__name__, grid
        with np.errstate(all="ignore"):
            for builder.grid_idx in itertools.product(*map(range, grid)):
                self.fn(*given.args, **given.kwargs)


def in_kernel(name: str, value: Any) -> Any:
    """Return an argument as the program gets it: a pointer for a torch tensor, a `Tensor` for an integer."""
    if isinstance(value, torch.Tensor):
        pointer = pointer_type(TYPES[str(value.dtype).removeprefix("torch.")])
        return Tensor(np.asarray(value.data_ptr()), pointer, Argument.of(name, value))
    return as_tensor(value) if isinstance(value, int) else value


def jit(fn: Callable[..., Any] | None = None, **_: Any) -> Any:
    return JITFunction if fn is None else JITFunction(fn)


@cache
def warn_once() -> None:
    logger.warning("Triton is not installed: its kernels run on numpy (folovllm/learn/numpy_triton.py), slowly")


def missing(name: str) -> Any:
    raise AttributeError(f"numpy stands in for Triton here, and has no tl.{name}: Triton itself exists on Linux only")


def no_version(name: str) -> Any:
    """Raise ImportError if torch.compile asks for the version: then it works without Triton."""
    raise (ImportError if name == "__version__" else AttributeError)(f"numpy stands in for Triton, and has no {name}")


LANGUAGE: dict[str, Any] = {
    **{f.__name__: f for f in (load, store, full, arange, dot, where, cdiv, static_assert, constexpr, pointer_type)},
    **TYPES, "int1": int1, "float8e4nv": float8, "static_range": range, "debug_barrier": lambda: None,
    **{name: unary(name, getattr(np, name)) for name in ("exp", "exp2", "log", "sqrt")},
    "rsqrt": unary("rsqrt", lambda x: 1 / np.sqrt(x)),
    "maximum": binary("maximum", np.maximum), "minimum": binary("minimum", np.minimum),
    "PropagateNan": SimpleNamespace(ALL=None), "clamp": lambda x, low, high: LANGUAGE["minimum"](LANGUAGE["maximum"](x, low), high),
    "div_rn": binary("truediv", np.divide), "abs": lambda x: Tensor(np.abs(x.data), x.dtype), "cast": lambda x, dtype: as_tensor(x, dtype),
    **{f"atomic_{name}": atomic(name) for name in ("add", "and", "or")},
    "cumsum": lambda x, axis: Tensor(np.cumsum(x.data, axis, x.dtype.array), x.dtype),
    "gather": lambda x, places, axis: Tensor(np.take_along_axis(x.data, places.data, axis), x.dtype),
    "sum": reduction(np.add), "max": reduction(np.fmax), "min": reduction(np.fmin),
    "zeros": lambda shape, dtype: full(shape, 0, dtype), "zeros_like": lambda x: full(x.shape, 0, x.dtype),
    "reshape": Tensor.reshape, "trans": lambda x: Tensor(x.data.T, x.dtype), "permute": lambda x, *axes: Tensor(x.data.transpose(axes), x.dtype),
    "join": lambda a, b: Tensor(np.stack([a.data, b.data], -1), a.dtype), "split": lambda x: (x[..., 0], x[..., 1]),
    "program_id": lambda axis: as_tensor(builder.grid_idx[axis]), "num_programs": lambda axis: as_tensor(builder.grid_dim[axis]),
    "__getattr__": missing,
}  # fmt: skip
MODULES: dict[str, dict[str, Any]] = {
    "triton": {"jit": jit, "cdiv": cdiv, "next_power_of_2": lambda n: 1 << (n - 1).bit_length(),
               "knobs": SimpleNamespace(runtime=SimpleNamespace(interpret=True)), "__getattr__": no_version},
    "triton.language": LANGUAGE,
    "triton.language.extra": {"libdevice": None},  # what compiled kernels alone call
    "triton.language.extra.cuda": {"gdc_launch_dependents": None, "gdc_wait": None},
    "triton.runtime": {},
    "triton.runtime.interpreter": {"InterpreterBuilder": InterpreterBuilder, "interpreter_builder": builder, "TensorHandle": Tensor,
                                   "InterpreterOptions": SimpleNamespace},
    "triton._C": {},
    "triton._C.libtriton": {"ir": SimpleNamespace(INPUT_PRECISION=SimpleNamespace(TF32="tf32"), CACHE_MODIFIER=SimpleNamespace(CG=".cg"))},
}  # fmt: skip


def install() -> None:
    """Take the place of `triton` in all later imports, unless there is a GPU: that needs Triton itself."""
    if torch.cuda.is_available():
        return
    has_triton_package()  # torch looks for Triton here and in the next line, once, and must not find this one
    with suppress(ImportError):
        import_module("torch._inductor.runtime.triton_compat")
    for name, content in MODULES.items():
        sys.modules[name] = module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        vars(module).update(content)
        package, _, last = name.rpartition(".")
        if package:
            setattr(sys.modules[package], last, module)
