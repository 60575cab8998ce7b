"""Whole components that a learner writes. `mine/folovllm/builders/` holds them, a file each; this folder has none.

`EngineConfig(builders="block_manager")` takes `BlockManager` from `mine/folovllm/builders/block_manager.py` in the place of
the engine's own. `folovllm.build` asks here, in the driver and in each rank.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from folovllm.config import BUILDERS


def load(name: str) -> Any:
    """The class, or function, in the learner's file.

    Raises:
        ValueError: there is no such file, or it lacks the component, or this lacks a method.
    """
    module, symbol = f"{__name__}.{name}", BUILDERS[name].symbol
    try:
        found = getattr(import_module(module), symbol, None)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ValueError(
            f"there is no folovllm/builders/{name}.py in your folder: `python -m milestones build` lists what can be "
            "built; FOLOVLLM_MINE=mine lets the engine look there"
        ) from error
    if found is None:
        raise ValueError(f"{module} has no {symbol}: that is the name under which the engine looks for it")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ValueError(f"{symbol} in {module} is not complete, it lacks: {', '.join(missing)}")
    return found
