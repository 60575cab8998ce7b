"""Read a GGUF file with the library `gguf`, behind a walk over its header.

The library makes arrays of whatever the file counts, so a file of 49 bytes could keep it busy for ever. The format: ggml's
`docs/gguf.md`.
"""

from __future__ import annotations

import struct
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from folovllm.models.files import reading

if TYPE_CHECKING:
    from gguf.gguf_reader import ReaderTensor

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a number, by its kind
MOST_ITEMS = 2**24  # of an array: the largest vocabularies have a million


class Header:
    """A place in a file's bytes, which moves on; it never passes their end."""

    def __init__(self, data: mmap) -> None:
        self.data, self.at = data, 0

    def skip(self, size: int) -> int:
        """Move on by `size` bytes, and return where they begin. Raises ValueError if the file ends before."""
        if size > len(self.data) - self.at:
            raise ValueError(f"the file ends within {size} bytes that begin at {self.at}")
        self.at += size
        return self.at - size

    def number(self, code: str = "<Q") -> int:
        """Return the next whole number."""
        return int(struct.unpack_from(code, self.data, self.skip(struct.calcsize(code)))[0])

    def skip_value(self, kind: int, in_list: bool = False) -> None:
        """Move past a value. Raises ValueError for one that is too long, or of a kind that is not known."""
        if kind == STRING:
            self.skip(self.number())
        elif kind == ARRAY and not in_list:
            kind, count = self.number("<I"), self.number()
            if count > MOST_ITEMS:
                raise ValueError(f"a list of {count} items is too long: {MOST_ITEMS} are allowed")
            for _ in range(count):  # each takes some bytes, so that a wrong count ends with the file
                self.skip_value(kind, in_list=True)
        elif kind in SIZES:
            self.skip(SIZES[kind])
        else:
            raise ValueError(f"values of kind {kind}{' within a list' if in_list else ''} are not supported")

    def skip_tensor(self) -> None:
        """Move past what is said of a tensor. Raises ValueError if it has more numbers than the file can hold."""
        self.skip(self.number())
        dimensions = self.number("<I")
        if not 1 <= dimensions <= 4:  # as in ggml
            raise ValueError(f"a tensor has {dimensions} dimensions: 1 to 4 are allowed")
        if prod(self.number() for _ in range(dimensions)) > 8 * len(self.data):  # no type has less than a bit a number
            raise ValueError("a tensor has more numbers than the file has bits")
        self.skip(4 + 8)  # type, and where it begins


def check_header(file: Path) -> None:
    """Raise ValueError unless all counts and lengths in the header fit into the file."""
    with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as data:
        header = Header(data)
        magic, version = data[header.skip(4) : 4], header.number("<I")
        if magic != MAGIC or version not in (2, 3):
            raise ValueError(f"it is not a GGUF file, or damaged: it begins with {magic!r} and version {version}")
        num_tensors, num_values = header.number(), header.number()
        for _ in range(num_values):
            header.skip_value(STRING)
            header.skip_value(header.number("<I"))
        for _ in range(num_tensors):
            header.skip_tensor()


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, ReaderTensor]]:
    """Return the values by their keys, and the tensors (in the memory-mapped file) by their names.

    Raises:
        ValueError: it is no GGUF file, or a damaged one.
    """
    from gguf import GGUFReader

    with reading(file):
        check_header(file)
        reader = GGUFReader(file)
        if sum(tensor.n_bytes for tensor in reader.tensors) > len(reader.data):
            raise ValueError("tensors overlap")
        values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        return values, {tensor.name: tensor for tensor in reader.tensors}
