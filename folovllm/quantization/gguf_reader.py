"""Read a GGUF file: its values and its tensors.

Every count in the file is checked against the bytes that are left before anything is made of it, so that a damaged file costs
no more time and memory than a whole one. The format: ggml's `docs/gguf.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from folovllm.models.files import reading
from folovllm.models.json_files import SIZE

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), "general.alignment"
STRING, ARRAY = 8, 9
SCALARS = dict(enumerate(["<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"])) | {10: "<u8", 11: "<i8", 12: "<f8"}
MOST_ITEMS = 2**24  # of an array: the largest vocabularies have a million
MOST_DIMENSIONS = 4  # as in ggml


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor in the memory-mapped file: `data` is uint8, `shape` with the bytes of a row in place of its last size."""

    tensor_type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray[Any, Any]


class Cursor:
    """A place in a file's bytes, which moves on as they are read."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> np.ndarray[Any, Any]:
        """Return the next bytes. Raises ValueError if the file ends before."""
        if size > len(self.data) - self.at:
            raise ValueError(f"the file ends within {size} bytes that begin at {self.at}")
        self.at += size
        return self.data[self.at - size : self.at]

    def numbers(self, dtype: str, count: int) -> list[Any]:
        """Return `count` numbers."""
        return self.take(count * np.dtype(dtype).itemsize).view(dtype).tolist()

    def number(self, dtype: str) -> Any:
        """Return one number."""
        return self.numbers(dtype, 1)[0]

    def text(self) -> str:
        """Return a text, which comes behind its length."""
        return str(self.take(self.number("<u8")).tobytes(), "utf-8")

    def value(self, kind: int) -> Any:
        """Return a number, a text, or a list of one of these. Raises ValueError for another kind."""
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.numbers(scalar(kind), 1)[0]
        kind, count = self.number("<u4"), self.number("<u8")
        if count > MOST_ITEMS:
            raise ValueError(f"a list of {count} items is too long: {MOST_ITEMS} are allowed")
        return [self.text() for _ in range(count)] if kind == STRING else self.numbers(scalar(kind), count)


def scalar(kind: int) -> str:
    """Return numpy's name for a kind of numbers. Raises ValueError for what is none; llama.cpp knows no lists of lists, either."""
    if kind not in SCALARS:
        raise ValueError(f"values of kind {kind}{' within a list' if kind == ARRAY else ''} are not supported")
    return SCALARS[kind]


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Return the values by their keys, and the tensors by their names.

    Raises:
        ValueError: it is no GGUF file, or a damaged one; the sentence names the key or tensor.
    """
    with reading(file):
        cursor = Cursor(np.asarray(np.memmap(file, np.uint8, "r")))
        magic, version = cursor.take(4).tobytes(), cursor.number("<u4")
        if magic != MAGIC or version not in VERSIONS:
            raise ValueError(f"it is not a GGUF file, or damaged: it begins with {magic!r} and version {version}")
        num_tensors, num_values = cursor.numbers("<u8", 2)
        values: dict[str, Any] = {}
        for _ in range(num_values):  # each takes some bytes, so that a wrong count ends with the file
            key = cursor.text()
            with reading(file, key):
                require_new(key, values)
                values[key] = cursor.value(cursor.number("<u4"))
        places = [place_of(cursor) for _ in range(num_tensors)]
        start, alignment = cursor.at, values.get(ALIGNMENT, 32)
        with reading(file, ALIGNMENT):
            if not SIZE.fits(alignment):
                raise ValueError(f"it is {alignment!r}, and must be {SIZE.says}")
            start += -start % alignment
        return values, tensors_at(file, cursor.data[start:], places)


def place_of(cursor: Cursor) -> tuple[str, list[int], int, int]:
    """Read what the file says of a tensor: its name, its sizes with the fastest first, its type, where it begins."""
    name, dimensions = cursor.text(), cursor.number("<u4")
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise ValueError(f"{name} has {dimensions} dimensions: 1 to {MOST_DIMENSIONS} are allowed")
    return name, cursor.numbers("<u8", dimensions), cursor.number("<u4"), cursor.number("<u8")


def tensors_at(
    file: Path, data: np.ndarray[Any, Any], places: list[tuple[str, list[int], int, int]]
) -> dict[str, GGUFTensor]:
    """Return the tensors that lie in `data`. Raises ValueError for one that does not, or if they would overlap."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    tensors: dict[str, GGUFTensor] = {}
    for name, sizes, kind, begin in places:
        with reading(file, name):
            require_new(name, tensors)
            block, size = GGML_QUANT_SIZES[tensor_type := GGMLQuantizationType(kind)]
            if sizes[0] % block:
                raise ValueError(f"rows of {sizes[0]} do not consist of blocks of {block} numbers")
            stored = [*reversed(sizes[1:]), sizes[0] // block * size]
            if begin + prod(stored) > len(data):
                raise ValueError(f"{prod(stored)} bytes of {tensor_type.name} lie behind the end of the file")
            rows = data[begin : begin + prod(stored)].reshape(stored)
            tensors[name] = GGUFTensor(tensor_type, tuple(reversed(sizes)), rows)
    if sum(tensor.data.nbytes for tensor in tensors.values()) > len(data):
        raise ValueError("tensors overlap")
    return tensors


def require_new(name: str, known: dict[str, Any]) -> None:
    """Raise ValueError if a name is known already."""
    if name in known:
        raise ValueError(f"{name} is there twice")
