"""Whole components that a learner writes. `mine/folovllm/builders/` holds them, a file each; this folder has none.

`EngineConfig(builders="block_manager")` takes `BlockManager` from `mine/folovllm/builders/block_manager.py` in the place of
the engine's own. `folovllm.build` asks here, in the driver and in each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from folovllm.config import EngineConfig


@dataclass(slots=True, frozen=True)
class Place:
    """Where a component of a learner's own can stand."""

    symbol: str  # its name in the learner's file
    fits: Callable[[EngineConfig], bool]  # whether an engine of this configuration has the place
    needs: str  # what to say if it has not


PLACES = {
    "decode_loop": Place(
        "DecodeLoop",
        lambda c: c.kv_cache == "growing" and c.model_impl == "native",
        'drives our own layers, one request at a time: take milestone="m1" and model_impl="native"',
    ),
    "scheduler": Place(
        "Scheduler",
        lambda c: c.kv_cache == "slots" and c.scheduling == "fcfs",
        'hands out slots by a rule of its own: take milestone="m2", or kv_cache="slots", and leave scheduling="fcfs"',
    ),
    "block_manager": Place(
        "BlockManager",
        lambda c: c.kv_cache == "paged" and not c.enable_prefix_caching,
        'hands out blocks and finds no prefixes: take milestone="m3" or "m4", or enable_prefix_caching=False',
    ),
    "prefill": Place(
        "prefill",
        lambda c: (c.kv_cache, c.attention_backend, c.kv_cache_dtype) == ("paged", "triton", "auto"),
        'is a kernel of the Triton backend and reads no 8 bits: take milestone="m4" or later, attention_backend="triton", '
        'and kv_cache_dtype="auto"',
    ),
    "prefix_cache": Place(
        "PrefixCache",
        lambda c: bool(c.enable_prefix_caching),
        'finds prefixes: take milestone="m5" or later, or enable_prefix_caching=True',
    ),
    "graph_cache": Place(
        "GraphCache",
        lambda c: c.enforce_eager is False,
        'keeps recorded steps: take milestone="m6", or enforce_eager=False',
    ),
}


def chosen(config: EngineConfig) -> tuple[str, ...]:
    """The names in `config.builders`, which are separated by commas."""
    return tuple(name.strip() for name in (config.builders or "").split(",") if name.strip())


def check(config: EngineConfig) -> None:
    """Raise ValueError for a name that nobody knows, and where the engine has no such place."""
    for name in chosen(config):
        if name not in PLACES:
            raise ValueError(f"unknown builder {name!r}: choose one of {', '.join(PLACES)}")
        if not PLACES[name].fits(config):
            raise ValueError(f"the builder {name!r} {PLACES[name].needs}")


def own(config: EngineConfig, name: str) -> Any:
    """The learner's component for a place, or None where the engine's own is to stand there. ValueError as in `load`."""
    return load(name) if name in chosen(config) else None


def load(name: str) -> Any:
    """The class, or function, in the learner's file.

    Raises:
        ValueError: there is no such file, or it lacks the component, or this lacks a method.
    """
    module, symbol = f"{__name__}.{name}", PLACES[name].symbol
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
