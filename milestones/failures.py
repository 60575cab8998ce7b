"""What a failed test says where code in `mine/` raised: the first cause, the learner's own lines above it, the test's line."""

import os
import traceback
from collections.abc import Iterator
from pathlib import Path

from milestones.language import t

# What Triton's interpreter says of something that has a plainer name.
PLAINLY = {
    "no attribute 'get_bf16'": "the interpreter has no arithmetic in bfloat16, and it would be too coarse: widen with `.to(tl.float32)` first",
    "truth value of": "a kernel decides by `tl.where` or a mask where the condition is a tensor, not by `if` or `and`",
}


def first_cause(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, down to the first; Triton wraps one for each kernel function."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def told(error: BaseException, mine: Path, tests: Path) -> str:
    """A few lines in place of a traceback; empty where no line of the learner's took part."""
    chain = list(first_cause(error))
    frames = [frame for each in chain for frame in traceback.extract_tb(each.__traceback__)]
    own = list(dict.fromkeys(map(_place, (frame for frame in frames if Path(frame.filename).is_relative_to(mine)))))
    if not own:
        return ""
    asked = [_place(frame) for frame in frames if Path(frame.filename).is_relative_to(tests)]
    first = chain[-1]
    said = str(first).strip() or t("it says nothing more; it came up at {place}", place=_place(frames[-1]))
    plainer = [text for key, text in PLAINLY.items() if key in str(first)]
    notes = [note for each in chain for note in getattr(each, "__notes__", ())]  # Hypothesis: the falsifying example
    lines = [f"{type(first).__name__}: {said}", *map(t, plainer), *own[::-1], *asked[-1:], *notes]
    return "\n".join(lines)


def _place(frame: traceback.FrameSummary) -> str:
    """File, line, function, and the line itself."""
    return f"  {os.path.relpath(frame.filename)}:{frame.lineno}, {frame.name}\n      {frame.line}"
