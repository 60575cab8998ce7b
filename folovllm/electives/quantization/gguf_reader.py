"""Read a GGUF file with the library `gguf`, behind a walk over its header.

The library makes arrays of whatever the file counts, so a file of 49 bytes could keep it busy for ever. The format: ggml's
`docs/gguf.md`.
"""

from __future__ import annotations

import struct
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from folovllm.models.files import reading

if TYPE_CHECKING:
    from gguf.gguf_reader import ReaderTensor

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a number, by its type


class Header:
    """Walks over a file's bytes from the front. Raises ValueError where a step would pass their end."""

    def __init__(self, data: mmap) -> None:
        self.data, self.at = data, 0

    def skip(self, size: int) -> None:
        """Move on by `size` bytes."""
        if size > len(self.data) - self.at:
            raise ValueError(f"the file ends within {size} bytes that begin at {self.at}")
        self.at += size

    def number(self, code: str = "<Q") -> int:
        """Return the next whole number."""
        self.skip(size := struct.calcsize(code))
        return int(struct.unpack_from(code, self.data, self.at - size)[0])

    def skip_value(self, value_type: int) -> None:
        """Move past a value, or all values of a list. Raises ValueError for an unknown type, and for lists of lists."""
        count = 1
        if value_type == ARRAY:
            value_type, count = self.number("<I"), self.number()
        if value_type in SIZES:
            self.skip(count * SIZES[value_type])
        elif value_type == STRING:
            for _ in range(count):  # each takes some bytes, so a wrong count ends with the file
                self.skip(self.number())
        else:
            raise ValueError(f"values of type {value_type} are not supported")


def check_header(data: mmap) -> None:
    """Raise ValueError unless all counts and lengths in the header fit into the file."""
    header = Header(data)
    header.skip(len(MAGIC))
    if data[: len(MAGIC)] != MAGIC or header.number("<I") not in (2, 3):
        raise ValueError("it is not a GGUF file of version 2 or 3, or damaged")
    num_tensors, num_values = header.number(), header.number()
    for _ in range(num_values):
        header.skip_value(STRING)
        header.skip_value(header.number("<I"))
    for _ in range(num_tensors):
        header.skip_value(STRING)
        header.skip(8 * header.number("<I") + 4 + 8)  # sizes, type, and where it begins


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, ReaderTensor]]:
    """Return the values by their keys, and the tensors (in the memory-mapped file) by their names.

    Raises:
        ValueError: it is no GGUF file, or a damaged one.
    """
    from gguf import GGUFReader

    with reading(file):
        with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as data:
            check_header(data)
        reader = GGUFReader(file)
        if sum(tensor.n_bytes for tensor in reader.tensors) > len(reader.data):
            raise ValueError("tensors overlap")
        values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        return values, {tensor.name: tensor for tensor in reader.tensors}
