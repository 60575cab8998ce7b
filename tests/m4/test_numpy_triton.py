"""numpy in Triton's place: the same results as Triton's interpreter, the same types, and errors that say where a kernel went wrong."""

import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from folovllm.learn import numpy_triton
from folovllm.learn.numpy_triton import TYPES, jit
from tests.conftest import CUDA
from tests.m4.kernel_results import CASES, result

pytestmark = pytest.mark.skipif(CUDA, reason="numpy stands in where there is no GPU")
ROOT = Path(__file__).parents[2]
tl: Any = SimpleNamespace(**numpy_triton.LANGUAGE)


@pytest.fixture(scope="module")
def on_numpy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[torch.Tensor]]:
    """What a process without Triton computes."""
    pytest.importorskip("triton.compiler", reason="needs Triton, to compare with")
    file = tmp_path_factory.mktemp("results") / "results.pt"
    command = [sys.executable, "-m", "tests.m4.kernel_results", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("run on numpy") == 1, "it says once that numpy stands in"
    return torch.load(file)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_interpreter(name: str, on_numpy: dict[str, list[torch.Tensor]]) -> None:
    """To the last bit."""
    for ours, theirs in zip(on_numpy[name], result(name), strict=True):
        assert not theirs.isnan().any()
        assert torch.equal(ours, theirs), (ours.double() - theirs.double()).abs().max()


@pytest.mark.parametrize("divides", [False, True])
def test_types_of_results(divides: bool) -> None:
    """Of all pairs of types, and of a type and a Python number, as Triton promotes them."""
    pytest.importorskip("triton.compiler", reason="needs Triton, to compare with")
    import triton.language
    from triton.runtime.interpreter import interpreter_semantic as semantic

    names = {name: name.replace("bool", "int1") for name in TYPES if "float8" not in name}
    theirs = {ours: getattr(triton.language, name) for ours, name in names.items()}
    for a, b in itertools.product(names, names):
        if divides and theirs[a].is_int():
            continue  # Triton refuses integers of which one has a sign
        common = numpy_triton.promoted(*(numpy_triton.full([1], 1, TYPES[name]) for name in (a, b)), divides)[2]
        kind = semantic.computation_type_impl(theirs[a], False, theirs[b], False, divides)
        assert theirs[common.name] == kind, (a, b)
    for a, number in itertools.product(names, (1.0,) if divides else (True, 1, 1.0)):
        kind = semantic.to_tensor_type(number)
        common = numpy_triton.promoted(numpy_triton.full([1], 1, TYPES[a]), number, divides)[2]
        assert theirs[common.name] == semantic.computation_type_impl(theirs[a], False, kind, True, divides), (a, number)


@jit
def scale(out_ptr: Any, x_ptr: Any, count: Any, factor: Any, SIZE: tl.constexpr) -> None:
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < count) * factor, mask=i < count)


def test_bfloat16_is_rounded_to_the_nearest() -> None:
    x = torch.randn(16, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    scale[(1,)](out, x, 16, 1 / 3, SIZE=16, num_warps=1)
    assert torch.equal(out, x * torch.tensor(1 / 3).bfloat16())


@pytest.mark.parametrize(("x", "out", "says"), [
    (9, 16, "2 of 11 addresses lie outside .* scale loads from x_ptr at offset 9, and there are 9 numbers"),
    (16, 9, "2 of 11 addresses lie outside .* scale stores to out_ptr at offset 9, and there are 9 numbers"),
])  # fmt: skip
def test_an_address_outside_its_argument(x: int, out: int, says: str) -> None:
    """Both are slices of one tensor, so what lies behind belongs to it, and not to the argument."""
    whole = torch.zeros(2, 16)
    with pytest.raises(IndexError, match=says):
        scale[(1,)](whole[0, :out], whole[1, :x], 11, 2.0, SIZE=16)


def test_an_integer_that_overflows() -> None:
    whole = torch.full((16,), 2**30, dtype=torch.int32)
    with pytest.raises(OverflowError, match="int32 overflow detected for operation mul in scale"):
        scale[(1,)](whole, whole, 16, 2, SIZE=16)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(AttributeError, match=r"has no tl\.histogram"):
        numpy_triton.missing("histogram")


def test_torch_finds_no_triton() -> None:
    """`torch.compile` looks for it by `import triton; triton.__version__`."""
    with pytest.raises(ImportError, match="numpy stands in"):
        numpy_triton.no_version("__version__")
