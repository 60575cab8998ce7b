"""The options of K/V that moves (X7), which are keywords of `EngineConfig`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from folovllm.models.model_config import num_linear_of, window_of

if TYPE_CHECKING:
    from folovllm.config import EngineConfig

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(slots=True, kw_only=True)
class TransferOptions:
    """Where K/V go that the device has no room for.

    Attributes:
        kv_offload: host memory for blocks that the prefix cache evicts, "16GiB" for example; all ranks share it. They are brought
            back where that is faster than computing them.
        kv_offload_dir: a folder on disk, to which blocks go from there. A server that starts anew finds its prefixes in it.
        kv_offload_dir_size: the most bytes in that folder; the oldest go.
    """

    kv_offload: str | None = None
    kv_offload_dir: str | None = None
    kv_offload_dir_size: str = "64GiB"

    def __post_init__(self) -> None:
        for name in ("kv_offload", "kv_offload_dir_size"):
            if getattr(self, name) is not None:
                num_bytes(name, getattr(self, name))
        if self.kv_offload_dir is not None and self.kv_offload is None:
            raise ValueError('kv_offload_dir needs memory on the way to the disk: set kv_offload="4GiB", for example')

    def check(self, config: EngineConfig) -> None:
        """Raise ValueError where these do not fit the rest of the configuration."""
        if self.kv_offload is None:
            return
        if not config.enable_prefix_caching:
            raise ValueError("kv_offload takes what the prefix cache evicts: set enable_prefix_caching=True")
        if config.builder_names:
            raise ValueError("kv_offload does not go with components of your own: leave builders out")
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise ValueError("kv_offload decides by time, which differs between engines under torchrun: leave that out")

    @staticmethod
    def check_model(extras: Mapping[str, Any], hf_config: Any) -> None:
        """Raise ValueError for a model whose prefixes are more than blocks of K/V."""
        if "kv_offload" in extras and num_linear_of(hf_config):
            raise ValueError("kv_offload: layers of this model keep states, which do not move: leave it out")
        if "kv_offload" in extras and window_of(hf_config) is not None:
            raise ValueError("kv_offload: this model forgets what is behind its window: leave it out")


def num_bytes(name: str, text: str) -> int:
    """The bytes that "16GiB", "500 MB" or "1048576" mean; all units are powers of 1,024. Raises ValueError for anything else, and for less than 1."""
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?\s*", str(text), re.IGNORECASE)
    size = int(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise ValueError(f'{name} must be a number of bytes, such as "16GiB", not {text!r}')
    return size
