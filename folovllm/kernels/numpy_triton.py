"""A stand-in for Triton on numpy, for machines that Triton is not made for: macOS and Windows.

It has what the kernels of this project use of `triton` and `triton.language`, with Triton's names and rules. A kernel runs as plain
Python, one program of its grid after the other. A tile is a `Tensor`, a numpy array with a type of Triton's. A pointer is a tile of
byte addresses which knows the argument that it points into, so a load or a store outside of that argument raises IndexError.

Memory is accessed in `InterpreterBuilder`, which is named after the class of Triton's own interpreter with these methods: tests and
counters that watch a kernel put theirs in their place.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import operator
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial, reduce, update_wrapper
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
    """A type of numbers. numpy has no bfloat16 and no FP8: these are float32 that torch rounds after each operation."""

    name: str
    array: Any  # numpy's type of the values
    memory: Any = None  # numpy's type of the same bits in memory, where that is another one

    @property
    def primitive_bitwidth(self) -> int:
        return 8 * np.dtype(self.memory or self.array).itemsize if self.name != "int1" else 1

    @property
    def is_float(self) -> bool:
        return np.issubdtype(self.array, np.floating)

    def pack(self, values: np.ndarray) -> np.ndarray:
        """The bits of these values in memory; they are rounded."""
        if self.memory is None:
            return values.astype(self.array, copy=False)
        narrow = torch.from_numpy(np.array(values, np.float32)).to(getattr(torch, self.name))
        return narrow.view(getattr(torch, self.memory)).numpy()

    def unpack(self, bits: np.ndarray) -> np.ndarray:
        """The values that these bits are."""
        if self.memory is None:
            return bits
        return torch.from_numpy(np.array(bits)).view(getattr(torch, self.name)).float().numpy()


int1 = DType("bool", np.bool_)
NAMES = "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"
TYPES = {name: DType(name, getattr(np, name)) for name in NAMES}
TYPES |= {"bool": int1, "bfloat16": DType("bfloat16", np.float32, "int16")}
TYPES |= {"float8_e4m3fn": DType("float8_e4m3fn", np.float32, "uint8")}
int32, uint32, int64, float16, float32, float64, bfloat16 = (
    TYPES[name] for name in ("int32", "uint32", "int64", "float16", "float32", "float64", "bfloat16")
)


@dataclass(frozen=True)
class pointer_type:  # noqa: N801 -- Triton's name
    element_ty: DType


class constexpr:  # noqa: N801 -- Triton's name
    """A constant at module level, which computes like its value. Of a parameter it is the annotation alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)

    def __neg__(self) -> Any:
        return -self.value


@dataclass(frozen=True)
class Argument:
    """A tensor that a kernel was given: its name there, its address, and all its bytes."""

    name: str
    start: int
    memory: np.ndarray

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Argument:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        flat = tensor.detach().as_strided((last + 1 if tensor.numel() else 0,), (1,))
        return cls(name, tensor.data_ptr(), flat.view(torch.uint8).numpy())


@dataclass(eq=False)
class Tensor:
    """A tile, or a number (no dimensions). Of a pointer `data` are addresses, and `argument` is what they may lie in."""

    data: np.ndarray
    dtype: Any
    argument: Argument | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def get_element_ty(self) -> DType:
        return getattr(self.dtype, "element_ty", self.dtype)

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        if isinstance(dtype, pointer_type):
            return Tensor(self.data, dtype, self.argument)
        if bitcast:
            return Tensor(dtype.unpack(self.dtype.pack(self.data).view(dtype.memory or dtype.array)), dtype)
        return self if dtype is self.dtype else Tensor(dtype.unpack(dtype.pack(self.data)), dtype)

    def reshape(self, *shape: Any) -> Tensor:
        return Tensor(self.data.reshape(*shape), self.dtype)

    def __getitem__(self, places: Any) -> Tensor:  # slices and None
        return Tensor(self.data[places], self.dtype, self.argument)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __neg__(self) -> Tensor:
        return 0 - self

    def __invert__(self) -> Tensor:
        return Tensor(~self.data, self.dtype)


def kind_of(dtype: DType) -> int:
    return 0 if dtype is int1 else 1 + dtype.is_float


def promoted(a: Any, b: Any, divides: bool = False) -> tuple[np.ndarray, np.ndarray, DType]:
    """The values of two operands in the type in which Triton computes, and that type.

    A Python number takes the tensor's type, unless it is of a higher kind (bool, int, float). Half precision is divided in float32.
    """
    a, b = (getattr(x, "value", x) for x in (a, b))
    types = [x.dtype if isinstance(x, Tensor) else type_of_number(x) for x in (a, b)]
    if isinstance(a, Tensor) != isinstance(b, Tensor):
        tensor = types[isinstance(b, Tensor)]
        types = [tensor] if max(map(kind_of, types)) == kind_of(tensor) else types
    common = reduce(wider, types)
    if divides and (common in (float16, bfloat16)):
        common = float32
    x, y = (x.to(common).data if isinstance(x, Tensor) else np.asarray(x, common.array) for x in (a, b))
    return x, y, common


def type_of_number(number: Any) -> DType:
    if isinstance(number, bool):
        return int1
    if isinstance(number, float):
        return float32
    return next(t for t in (int32, uint32, int64) if np.iinfo(t.array).min <= number <= np.iinfo(t.array).max)


def wider(a: DType, b: DType) -> DType:
    """Of different floats float32, unless a float64 or else a float16 with a number that is not bfloat16 takes part."""
    if a is b:
        return a
    if a.is_float or b.is_float:
        if float64 in (a, b) or float32 in (a, b):
            return float64 if float64 in (a, b) else float32
        return float16 if float16 in (a, b) else float32
    return max(a, b, key=lambda t: (t.primitive_bitwidth, t.name[0] == "u"))


def binary(name: str, work: Callable[..., Any], divides: bool = False) -> Callable[..., Tensor]:
    """The operation on two tensors, or a tensor and a number. An integer with a sign that overflows raises OverflowError."""
    compares = name in ("lt", "le", "gt", "ge", "eq", "ne")

    def run(a: Any, b: Any) -> Tensor:
        if isinstance(getattr(a, "dtype", None), pointer_type):
            size = a.dtype.element_ty.primitive_bitwidth // 8
            return Tensor(work(a.data, as_tensor(b).data.astype(np.int64) * max(1, size)), a.dtype, a.argument)
        if isinstance(getattr(b, "dtype", None), pointer_type):
            return run(b, a)
        x, y, common = promoted(a, b, divides)
        if name == "truediv" and not common.is_float:
            x, y, common = x.astype(np.float32), y.astype(np.float32), float32
        if name in ("add", "sub", "mul") and common.array in (np.int8, np.int16, np.int32):
            wide, limits = np.asarray(work(x.astype(np.int64), y)), np.iinfo(common.array)
            if ((wide < limits.min) | (wide > limits.max)).any():
                raise OverflowError(f"{common.name} overflow detected for operation {name} in {builder.kernel}")
        data = np.asarray(work(x, y))
        return Tensor(data, int1) if compares else Tensor(common.unpack(common.pack(data)), common)

    return run


def quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of integers, towards zero as in C."""
    return (x - np.fmod(x, y)) // y


OPERATORS: dict[str, tuple[Callable[..., Any], bool]] = {
    "add": (np.add, False), "sub": (np.subtract, False), "mul": (np.multiply, False), "truediv": (np.divide, True),
    "floordiv": (quotient, True), "mod": (np.fmod, True), "and": (np.bitwise_and, False), "or": (np.bitwise_or, False),
    "xor": (np.bitwise_xor, False), "lshift": (np.left_shift, False), "rshift": (np.right_shift, False),
    "lt": (np.less, False), "le": (np.less_equal, False), "gt": (np.greater, False), "ge": (np.greater_equal, False),
    "eq": (np.equal, False), "ne": (np.not_equal, False),
}  # fmt: skip
for _name, (_work, _divides) in OPERATORS.items():
    _run = binary(_name, _work, _divides)
    setattr(Tensor, f"__{_name}__", _run)
    setattr(Tensor, f"__r{_name}__", lambda a, b, run=_run: run(b, a))
    _plain = getattr(operator, f"__{_name}__")
    setattr(constexpr, f"__{_name}__", lambda a, b, plain=_plain: plain(a.value, getattr(b, "value", b)))
    setattr(constexpr, f"__r{_name}__", lambda a, b, plain=_plain: plain(b, a.value))


def as_tensor(x: Any, dtype: DType | None = None) -> Tensor:
    x = getattr(x, "value", x)
    if not isinstance(x, Tensor):
        x = Tensor(np.asarray(x, type_of_number(x).array), type_of_number(x))
    return x if dtype is None else x.to(dtype)


@dataclass
class InterpreterBuilder:
    """What a program sees: where in the grid it is, and memory. `ir`'s members that a caller passes on are plain strings here."""

    kernel: str = ""
    grid_idx: tuple[int, ...] = ()
    grid_dim: tuple[int, ...] = ()
    options: Any = field(default_factory=SimpleNamespace)  # of Triton's interpreter; nothing reads them

    def create_load(self, ptrs: Tensor, *how: Any) -> Tensor:
        return self.create_masked_load(ptrs, Tensor(np.ones(ptrs.shape, bool), int1), None, *how)

    def create_masked_load(self, ptrs: Tensor, mask: Tensor, other: Tensor | None, *how: Any) -> Tensor:
        """The numbers at these addresses; where the mask is false, those of `other`, or 0."""
        memory, places = self._places(ptrs, mask, "loads from")
        element = ptrs.get_element_ty()
        bits = np.zeros(ptrs.shape, memory.dtype)
        if other is not None:
            bits[...] = element.pack(other.data)
        bits[mask.data] = memory[places]
        return Tensor(element.unpack(bits), element)

    def create_masked_store(self, ptrs: Tensor, value: Tensor, mask: Tensor, *how: Any) -> None:
        memory, places = self._places(ptrs, mask, "stores to")
        memory[places] = ptrs.get_element_ty().pack(value.data)[mask.data]

    def _places(self, ptrs: Tensor, mask: Tensor, what: str) -> tuple[np.ndarray, np.ndarray]:
        """The argument's numbers, and the places of those that the mask leaves in.

        Raises:
            IndexError: an address lies outside of the argument.
        """
        argument, element = ptrs.argument, ptrs.get_element_ty()
        size = np.dtype(element.memory or element.array).itemsize
        at, end = ptrs.data[mask.data] - argument.start, len(argument.memory) // size * size
        outside = (at < 0) | (at + size > end)
        if outside.any():
            first = int(at[outside][0])
            raise IndexError(
                f"{outside.sum()} of {at.size} addresses lie outside the arguments of the kernel, the first one"
                f" {first - end} bytes behind the end of the nearest before it: {self.kernel} {what} {argument.name} at"
                f" offset {first // size} of {end // size}"
            )
        return argument.memory[:end].view(element.memory or element.array), at // size

    def create_dot(self, a: Tensor, b: Tensor, acc: Tensor, *how: Any) -> Tensor:
        return Tensor(np.matmul(a.data, b.data, dtype=acc.data.dtype) + acc.data, acc.dtype)


builder = InterpreterBuilder()


def load(pointer: Tensor, mask: Any = None, other: Any = None, cache_modifier: str = "", **_: Any) -> Tensor:
    if mask is None:
        return builder.create_load(pointer, cache_modifier, "", False)
    pointer, mask = together(pointer, as_tensor(mask))
    return builder.create_masked_load(
        pointer, mask, None if other is None else as_tensor(other, pointer.get_element_ty()), cache_modifier, "", False
    )


def store(pointer: Tensor, value: Any, mask: Any = True, **_: Any) -> None:
    pointer, mask, value = together(pointer, as_tensor(mask), as_tensor(value, pointer.get_element_ty()))
    builder.create_masked_store(pointer, value, mask, None, None)


def together(*tensors: Tensor) -> list[Tensor]:
    """Broadcast to one shape."""
    arrays = np.broadcast_arrays(*[tensor.data for tensor in tensors])
    return [Tensor(array, t.dtype, t.argument) for array, t in zip(arrays, tensors, strict=True)]


def atomic(work: Callable[..., Any]) -> Callable[..., Tensor]:
    def run(pointer: Tensor, value: Any, mask: Any = True, **_: Any) -> Tensor:
        """The numbers before. Programs follow one another; of one program no two addresses may be equal."""
        old = load(pointer, mask)
        store(pointer, work(old, value), mask)
        return old

    return run


def arange(start: int, end: int) -> Tensor:
    checked_shape(end - start)
    return Tensor(np.arange(start, end, dtype=np.int32), int32)


def full(shape: Any, value: Any, dtype: DType) -> Tensor:
    return Tensor(np.full(checked_shape(*shape), as_tensor(value, dtype).data), dtype)


def checked_shape(*sizes: Any) -> list[int]:
    if any(size <= 0 or size & (size - 1) for size in map(operator.index, sizes)):
        raise ValueError(f"the sizes of a tile are powers of two, not {list(sizes)}")
    return list(map(operator.index, sizes))


def dot(a: Tensor, b: Tensor, acc: Tensor | None = None, input_precision: str = "tf32") -> Tensor:
    """[M, K] x [K, N] + `acc` [M, N], all sums in float32."""
    if a.dtype is not b.dtype:
        raise TypeError(f"both operands of tl.dot have the same dtype, not {a.dtype.name} and {b.dtype.name}")
    acc = Tensor(np.zeros((), np.float32), float32) if acc is None else acc
    if acc.dtype is not float32:
        raise TypeError(f"tl.dot adds to float32, not to {acc.dtype.name}")
    return builder.create_dot(a, b, acc, input_precision, 0)


def where(condition: Any, x: Any, y: Any) -> Tensor:
    x, y, common = promoted(x, y)
    return Tensor(np.where(as_tensor(condition, int1).data, x, y), common)


def cdiv(x: Any, y: Any) -> Any:
    return (x + y - 1) // y


def static_assert(condition: Any, message: str = "") -> None:
    assert condition, message


def reduction(work: np.ufunc) -> Callable[..., Tensor]:
    """Over an axis, or over all. The result has at least 32 bits, except that float16 is summed as it is."""

    def run(x: Tensor, axis: int | None = None, keep_dims: bool = False) -> Tensor:
        dtype = x.dtype
        if dtype is bfloat16 or (dtype is float16 and work is not np.add):
            dtype = float32
        elif not dtype.is_float and dtype.primitive_bitwidth < 32:
            dtype = uint32 if dtype.name[0] in "ub" and work is np.add else int32
        return Tensor(np.asarray(work.reduce(x.to(dtype).data, axis, dtype.array, keepdims=keep_dims)), dtype)

    return run


def unary(work: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        if x.dtype not in (float32, float64):
            raise TypeError(f"this function takes float32 or float64, not {x.dtype.name}")
        return Tensor(np.asarray(work(x.data)), x.dtype)

    return run


def place_in_grid(where: str) -> Callable[[int], Tensor]:
    return lambda axis: Tensor(np.asarray(getattr(builder, where)[axis], np.int32), int32)


class JITFunction:
    """A kernel, which `kernel[grid](...)` runs, or a function that kernels call."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        update_wrapper(self, fn)
        self.fn, self.signature = fn, inspect.signature(fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, (*grid, 1, 1)[:3])

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Run all programs. Of `options` those that are no parameters are the compiler's."""
        say_once()
        parameters = self.signature.parameters
        given = self.signature.bind(*args, **{name: value for name, value in options.items() if name in parameters})
        given.apply_defaults()
        values = {
            name: value if "constexpr" in str(parameters[name].annotation) else in_kernel(name, value)
            for name, value in given.arguments.items()
        }
        builder.kernel, builder.grid_dim = self.fn.__name__, grid
        with np.errstate(all="ignore"):
            for builder.grid_idx in itertools.product(*map(range, grid)):
                self.fn(**values)


def in_kernel(name: str, value: Any) -> Any:
    """What a program gets: of a tensor a pointer, of an integer a tensor."""
    if isinstance(value, torch.Tensor):
        argument = Argument.of(name, value)
        pointer = pointer_type(TYPES[str(value.dtype).removeprefix("torch.")])
        return Tensor(np.asarray(argument.start, np.int64), pointer, argument)
    return as_tensor(value) if isinstance(value, int) else value


def jit(fn: Callable[..., Any] | None = None, **_: Any) -> Any:
    return JITFunction if fn is None else JITFunction(fn)


@cache
def say_once() -> None:
    logger.warning("Triton is not installed: its kernels run on numpy (folovllm/kernels/numpy_triton.py), slowly")


def missing(name: str) -> Any:
    raise AttributeError(f"numpy stands in for Triton here, and has no tl.{name}: Triton itself exists on Linux only")


LANGUAGE = {
    **{function.__name__: function for function in (load, store, arange, full, dot, where, cdiv, static_assert)},
    **{cls.__name__: cls for cls in (constexpr, pointer_type)},
    **{name: dtype for name, dtype in TYPES.items() if name != "bool"}, "int1": int1, "float8e4nv": TYPES["float8_e4m3fn"],
    **{name: unary(getattr(np, name)) for name in ("exp", "exp2", "log", "sqrt")}, "rsqrt": unary(lambda x: 1 / np.sqrt(x)),
    "sum": reduction(np.add), "max": reduction(np.fmax), "min": reduction(np.fmin),
    "maximum": binary("maximum", np.maximum), "minimum": binary("minimum", np.minimum),
    "program_id": place_in_grid("grid_idx"), "num_programs": place_in_grid("grid_dim"),
    "zeros": lambda shape, dtype: full(shape, 0, dtype), "clamp": lambda x, low, high: LANGUAGE["minimum"](LANGUAGE["maximum"](x, low), high),
    "trans": lambda x: Tensor(x.data.T, x.dtype), "reshape": Tensor.reshape,
    "join": lambda a, b: Tensor(np.stack([a.data, b.data], -1), a.dtype), "split": lambda x: (x[..., 0], x[..., 1]),
    "atomic_add": atomic(operator.add), "debug_barrier": lambda: None, "static_range": range, "__getattr__": missing,
}  # fmt: skip
MODULES: dict[str, dict[str, Any]] = {
    "triton": {
        "jit": jit, "cdiv": cdiv, "next_power_of_2": lambda n: 1 << (n - 1).bit_length(),
        "knobs": SimpleNamespace(runtime=SimpleNamespace(interpret=True)),
    },
    "triton.language": LANGUAGE,
    "triton.language.extra": {"libdevice": SimpleNamespace()},  # for compiled kernels alone, as is what follows
    "triton.language.extra.cuda": {"gdc_launch_dependents": None, "gdc_wait": None},
    "triton.runtime": {},
    "triton.runtime.interpreter": {
        "InterpreterBuilder": InterpreterBuilder, "InterpreterOptions": SimpleNamespace, "TensorHandle": Tensor,
        "interpreter_builder": builder,
    },
    "triton._C": {},
    "triton._C.libtriton": {
        "ir": SimpleNamespace(INPUT_PRECISION=SimpleNamespace(TF32="tf32"), CACHE_MODIFIER=SimpleNamespace(CG=".cg"))
    },
}  # fmt: skip


def install() -> None:
    """Be `triton` for whoever imports it from now on, unless there is a GPU, for which only Triton itself compiles."""
    if torch.cuda.is_available():
        return
    with suppress(ImportError):  # torch looks for Triton once, and must not find this
        import_module("torch._inductor.runtime.triton_compat")
    has_triton_package()
    for name, content in MODULES.items():
        module = sys.modules[name] = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        vars(module).update(content)
        package, _, last = name.rpartition(".")
        if package:
            setattr(sys.modules[package], last, module)
