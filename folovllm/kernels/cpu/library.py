"""Compiles the C++ kernels for this CPU at their first use, and caches the library."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger("folovllm")

SOURCE = Path(__file__).with_name("kernels.cpp")
NUMBERS = {torch.float32: "float", torch.bfloat16: "BFloat16", torch.float16: "Float16"}
FLAGS = ("-x", "c++", "-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-exceptions", "-fPIC")
SECONDS = 120  # it takes one or two

POINTER, INDEX, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
ARGUMENTS = {
    "multiply": [POINTER, POINTER, POINTER, INDEX, INT],
    "attention": [POINTER] * 6 + [INT],
    "decoder_layer": [POINTER] * 5 + [INT],
}


@cache
def load(dtype: torch.dtype, find_folder: Callable[[], Path]) -> ctypes.CDLL | None:
    """Return the kernels for numbers of `dtype`. They are compiled into the folder of `find_folder` unless they are there.

    Returns None on another system than Linux, without a compiler that compiles them (`CXX`, else g++), or without a folder
    (RuntimeError: there is no home). torch computes everything without them, so the reason is only logged.
    """
    if sys.platform != "linux" or dtype not in NUMBERS:
        return None
    try:
        compiler = shlex.split(os.environ.get("CXX") or "g++")  # it may be "ccache g++"
        library = ctypes.CDLL(str(compiled(dtype, find_folder(), compiler)))
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        message = getattr(error, "stderr", None) or error
        logger.info("no kernels of our own for this CPU, torch computes: %s", str(message).strip().splitlines()[0])
        return None
    for name, arguments in ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def compiled(dtype: torch.dtype, folder: Path, compiler: list[str]) -> Path:
    """Return the file of the compiled kernels. Raises OSError or `SubprocessError` if they cannot be compiled or stored.

    Its name is a hash of the source, the flags, and the compiler's macros, which name its version and this CPU's instructions:
    several machines may share a home. The file is renamed into place, so it is always complete, and no lock is needed.
    """
    flags = (*FLAGS, f"-DNUMBER={NUMBERS[dtype]}")
    about = run(*compiler, *flags, "-dM", "-E", os.devnull)
    name = hashlib.sha256(SOURCE.read_bytes() + repr((flags, about)).encode()).hexdigest()[:16]
    target = folder / f"cpu_kernels_{name}.so"
    if not target.exists():
        logger.info("compiling kernels for this CPU")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            object_file, library = f"{scratch}/kernels.o", f"{scratch}/kernels.so"
            run(*compiler, *flags, "-c", str(SOURCE), "-o", object_file)
            # Without the default libraries: torch has loaded them.
            run(*compiler, "-shared", "-nodefaultlibs", object_file, "-lgcc", "-o", library)
            os.replace(library, target)
    return target


def run(*command: str) -> str:
    """Run a command, and return its output."""
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS).stdout
