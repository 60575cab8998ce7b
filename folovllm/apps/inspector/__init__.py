"""Seeing the engine think: recordings of its events, and the page that shows them, live or later.

    from folovllm.apps.inspector import film, recording, show

`recording(engine, path)` writes a file, `film(llm)` keeps it in memory, `show(...)` is a notebook's cell.
"""

from folovllm.apps.inspector.notebook import film, show
from folovllm.apps.inspector.recorder import recording

__all__ = ["film", "recording", "show"]
