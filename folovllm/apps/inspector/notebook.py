"""The inspector in a notebook's cell."""

from __future__ import annotations

import html
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from folovllm.apps.inspector.lines import read
from folovllm.apps.inspector.page import inline_source, whole_page
from folovllm.apps.inspector.recorder import Recorder

if TYPE_CHECKING:
    from folovllm.engine.llm_engine import LLMEngine
    from folovllm.llm import LLM

HEIGHT = 640  # pixels


class RecordedRun:
    """What an engine did while a block of code ran; a notebook shows it as the inspector's page.

    with film(llm) as run:
        llm.generate(prompts)
    run

    """

    def __init__(self, title: str = "") -> None:
        self.title = title
        self._data = bytearray()

    @property
    def text(self) -> str:
        """The recording."""
        return self._data.decode()

    def _repr_html_(self) -> str:
        return show(self).data


@contextmanager
def film(engine: LLM | LLMEngine, title: str = "") -> Iterator[RecordedRun]:
    """Record what an engine does in the block."""
    taken = RecordedRun(title)
    inner: Any = getattr(engine, "engine", engine)
    with Recorder(inner, taken._data.extend, title=title):
        yield taken


def show(*recordings: RecordedRun | LLM | LLMEngine | str | Path, height: int = HEIGHT) -> Any:
    """A recording, or two in a race, as a cell's output: IPython's `HTML` with the whole page in a frame.

    Args:
        recordings: what `film` took, or files; of an engine how it stands now.
        height: of the frame, in pixels.

    Raises:
        ValueError: there are none or too many, or one is no recording that this version reads.
    """
    from IPython.display import HTML

    if not 1 <= len(recordings) <= 2:
        raise ValueError(f"show one recording, or two in a race, not {len(recordings)}")
    texts = [_text(each) for each in recordings]
    # Between single quotes: JSON is full of double ones, and each would become six characters.
    page = html.escape(whole_page(inline_source(texts), in_english=True), quote=False).replace("'", "&#x27;")
    frame = f"<div><iframe srcdoc='{page}'" + f' title="what the engine did" width="100%" height="{int(height)}"'
    return HTML(f'{frame} style="border: 1px solid #8888" sandbox="allow-scripts"></iframe></div>')


def _text(recording: RecordedRun | LLM | LLMEngine | str | Path) -> tuple[str, str]:
    """Its name and its lines."""
    if isinstance(recording, str | Path):
        path = Path(recording)
        return read(path).name, path.read_text(encoding="utf-8-sig")
    if not isinstance(recording, RecordedRun):
        with film(recording, "now") as recording:
            pass
    return recording.title or "this run", recording.text
