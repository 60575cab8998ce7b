"""How memory grows while a model is loaded: for `test_loader.py`, in a process of its own that imports little."""

import ctypes
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from folovllm.config import EngineConfig
from folovllm.models import loader
from folovllm.models.files import load_hf_config
from folovllm.models.registry import build_model


def anonymous() -> int:
    """Bytes of memory that is no mapped file, once what was freed has been given back to the system."""
    ctypes.CDLL(None).malloc_trim(0)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def growth_while_loading(path: Path) -> tuple[int, int]:
    """Bytes that memory grows by at most while `path` is loaded, and bytes of the weights.

    Called in a process of its own: elsewhere, what other tests leave behind is freed or used again meanwhile.
    """
    config = load_hf_config(path, EngineConfig(milestone="m1", model_impl="native"))
    copy_weight, before, peaks = loader.copy_weight, anonymous(), []

    def watched(*given: Any) -> None:
        copy_weight(*given)
        peaks.append(anonymous())  # with the tensor still alive

    with mock.patch.object(loader, "copy_weight", watched):
        model = build_model(config, torch.bfloat16, "cpu")
        loader.load_model(model, path, use_tqdm=False)
    return max(peaks) - before, sum(parameter.nbytes for parameter in model.parameters())
