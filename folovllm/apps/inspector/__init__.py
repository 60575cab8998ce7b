"""Seeing the engine think: recordings of its events, and the page that shows them, live or later.

    from folovllm.apps.inspector import film, recording, show

`recording(engine, path)` writes a file, `film(llm)` keeps it in memory, `show(...)` is a notebook's cell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from folovllm.apps.inspector.notebook import film, show
    from folovllm.apps.inspector.recorder import recording

__all__ = ["film", "recording", "show"]
_PLACES = {"film": "notebook", "show": "notebook", "recording": "recorder"}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for: a reader of recordings needs no engine."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
