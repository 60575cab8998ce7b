"""The reference, stage by stage."""

from pathlib import Path

from attention import TiledEngine, attend
from blocks import PagedEngine
from contract import Device, Limits
from engine import Engine
from model import own_model
from overlap import OverlapEngine
from prefix import ChunkedEngine
from sampler import sample
from serial import SerialEngine, transformers_model

__all__ = ["attend", "make", "sample"]
ENGINES: dict[int, type[Engine]] = {2: Engine, 3: PagedEngine, 4: TiledEngine, 5: ChunkedEngine}


def make(folder: Path, limits: Limits, device: Device, stage: int = 6) -> SerialEngine | Engine:
    if stage < 2:
        return SerialEngine((own_model if stage else transformers_model)(folder))
    return OverlapEngine(folder, limits, device) if stage == 6 else ENGINES[stage](folder, limits)
