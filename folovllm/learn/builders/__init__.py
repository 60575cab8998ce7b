"""Whole components that a learner writes. `mine/folovllm/learn/builders/` holds them, a file each; this folder has none.

`EngineConfig(builders="block_manager")` takes `BlockManager` from `mine/folovllm/learn/builders/block_manager.py` in the place of
the engine's own. `folovllm.build` asks here, in the driver and in each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any


@dataclass(slots=True, frozen=True)
class BuilderPlace:
    """Where a component that a learner wrote can stand (`folovllm.learn.builders`)."""

    symbol: str  # its name in the learner's file
    fits: Callable[[Any], bool]  # whether an engine of this configuration (`EngineConfig`) has the place
    needs: str  # what to say if it has not


BUILDERS = {
    "decode_loop": BuilderPlace(
        "DecodeLoop",
        lambda c: c.kv_cache == "growing" and c.model_impl == "native",
        'drives our own layers, one request at a time: take milestone="m1" and model_impl="native"',
    ),
    "scheduler": BuilderPlace(
        "Scheduler",
        lambda c: c.kv_cache == "slots" and c.scheduling == "fcfs",
        'hands out slots by a rule of its own: take milestone="m2", or kv_cache="slots", and leave scheduling="fcfs"',
    ),
    "block_manager": BuilderPlace(
        "BlockManager",
        lambda c: c.kv_cache == "paged" and not c.enable_prefix_caching,
        'hands out blocks and finds no prefixes: take milestone="m3" or "m4", or enable_prefix_caching=False',
    ),
    "prefill": BuilderPlace(
        "prefill",
        lambda c: (c.kv_cache, c.attention_backend) == ("paged", "triton") and "kv_cache_dtype" not in c.extras,
        'is a kernel of the Triton backend and reads no 8 bits: take milestone="m4" or later, attention_backend="triton", '
        'and kv_cache_dtype="auto"',
    ),
    "prefix_cache": BuilderPlace(
        "PrefixCache",
        lambda c: bool(c.enable_prefix_caching),
        'finds prefixes: take milestone="m5" or later, or enable_prefix_caching=True',
    ),
    "graph_cache": BuilderPlace(
        "GraphCache",
        lambda c: c.enforce_eager is False,
        'keeps captured steps: take milestone="m6", or enforce_eager=False',
    ),
}


def require_place(name: str, config: Any) -> None:
    """Raise ValueError if there is no such component, or an engine of this `EngineConfig` has no place for it."""
    if name not in BUILDERS:
        raise ValueError(f"unknown builder {name!r}: choose one of {', '.join(BUILDERS)}")
    if not BUILDERS[name].fits(config):
        raise ValueError(f"the builder {name!r} {BUILDERS[name].needs}")


def require_no_states(names: Iterable[str], num_state_layers: int) -> None:
    """Raise ValueError for a component that keeps no states, where the model has layers with some (linear attention)."""
    own = {"decode_loop", "prefix_cache"} & {*names}
    if own and num_state_layers:
        raise ValueError(
            f"this model has layers of linear attention, whose states {' and '.join(sorted(own))} of your own does not keep: "
            "leave it out of builders, or take another model"
        )


def load(name: str) -> Any:
    """The class, or function, in the learner's file.

    Raises:
        ValueError: there is no such file, or it lacks the component, or this lacks a method.
    """
    module, symbol = f"{__name__}.{name}", BUILDERS[name].symbol
    import_module("folovllm.kernels")  # which puts numpy in Triton's place if there is none, for a learner's kernel
    try:
        return component(import_module(module), symbol)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ValueError(
            f"there is no folovllm/learn/builders/{name}.py in your folder: `python -m milestones build` lists what can be "
            "built; FOLOVLLM_MINE=mine lets the engine look there"
        ) from error


def component(module: ModuleType, symbol: str) -> Any:
    """What a module defines under this name. Raises ValueError where it does not, or not all of it."""
    if not hasattr(module, symbol):
        raise ValueError(f"{module.__file__} has no {symbol}: that is the name under which the engine looks for it")
    found = getattr(module, symbol)
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ValueError(f"{symbol} in {module.__file__} is not complete, it lacks: {', '.join(missing)}")
    return found
