"""Read a GGUF file with the library `gguf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.gguf_reader import ReaderTensor

from folovllm.models.files import reading


class BoundedReader(GGUFReader):  # type: ignore[misc]  # the library has no types
    """Refuses what lies behind the end of the file. The library reads nothing there, and goes on: a file of 49 bytes
    that counts 2^40 numbers could keep it busy for ever.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> np.ndarray:
        found: np.ndarray = super()._get(offset, dtype, count, override_order)
        if len(found) < count:
            raise ValueError(f"the file ends within {count} numbers that begin at byte {offset}")
        return found


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, ReaderTensor]]:
    """Return the values by their keys, and the tensors (in the memory-mapped file) by their names.

    Raises:
        ValueError: it is no GGUF file, or a damaged one.
    """
    with reading(file):
        reader = BoundedReader(file)
        if reader.byte_order == "S":
            raise ValueError("its numbers are big-endian, which is not supported")
        if sum(tensor.n_bytes for tensor in reader.tensors) > len(reader.data):
            raise ValueError("tensors overlap")
        values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        return values, {tensor.name: tensor for tensor in reader.tensors}
