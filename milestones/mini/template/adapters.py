"""The harness begins here: it calls `make` and plays what that returns. Everything else in this folder is yours.

Stage by stage, `make` returns a better engine. `contract.py` says what an engine has to have. Your files lie beside this one and
import each other by name: `from model import Model`.
"""

from pathlib import Path
from typing import Any

from contract import Device, Limits


def make(folder: Path, limits: Limits, device: Device) -> Any:
    """Return a new engine for the checkpoint in `folder`: `config.json` and `model.safetensors`, a Qwen3 in float32.

    Stages 0 and 1 use no limits. Only stage 6 uses the device.
    """
    raise NotImplementedError("stage 0: return an engine with add() and step()")


# Stage 1: from sampler import sample
# Stage 4: from attention import attend
