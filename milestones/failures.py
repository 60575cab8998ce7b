"""What a failed test says of code in `mine/`: the first cause or the assertion's sentence, the learner's own lines, the test's line."""

import os
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from milestones.language import t

# What Triton's interpreter says of something that has a plainer name.
PLAINLY = {
    "no attribute 'get_bf16'": "the interpreter has no arithmetic in bfloat16, and it would be too coarse: widen with `.to(tl.float32)` first",
    "truth value of": "a kernel decides by `tl.where` or a mask where the condition is a tensor, not by `if` or `and`",
}
MOST_LINES, WIDTH = 12, 200  # of the values that pytest shows beside a sentence


def first_cause(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, down to the first; Triton wraps one for each kernel function."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def told(error: BaseException, mine: Path, tests: Path) -> str:
    """A few lines in place of a traceback; empty where neither an assertion failed nor a line of the learner's took part."""
    if isinstance(error, pytest.fail.Exception) and not error.pytrace:
        return str(error)  # and not what was being handled when the test said it
    chain = list(first_cause(error))
    frames = [frame for each in chain for frame in traceback.extract_tb(each.__traceback__)]
    own = list(dict.fromkeys(map(_place, (frame for frame in frames if Path(frame.filename).is_relative_to(mine)))))
    first = chain[-1]
    if not own and not isinstance(first, AssertionError):
        return ""
    in_tests = [frame for frame in frames if Path(frame.filename).is_relative_to(tests)]
    asked = [frame for frame in in_tests if Path(frame.filename).name.startswith("test_")] or in_tests
    said = _shortened(str(first).strip()) or t("it says nothing more; it came up at {place}", place=_place(frames[-1]))
    plainer = [text for key, text in PLAINLY.items() if key in str(first)]
    notes = [note for each in chain for note in getattr(each, "__notes__", ())]  # Hypothesis: the falsifying example
    lines = [*map(t, plainer), f"{type(first).__name__}: {said}", *own[::-1], *map(_place, asked[-1:]), *notes]
    return "\n".join(lines)


def _shortened(said: str) -> str:
    """The sentence as it is; of what pytest adds to it the values that were compared, but not where they come from."""
    sentence, found, values = said.partition("\nassert ")
    lines = [line for line in (found + values).splitlines()[1:MOST_LINES] if not line.startswith(" +")]
    return "\n".join([sentence, *(line if len(line) <= WIDTH else f"{line[:WIDTH]} ..." for line in lines)])


def _place(frame: traceback.FrameSummary) -> str:
    """File, line, function, and the line itself."""
    return f"  {os.path.relpath(frame.filename)}:{frame.lineno}, {frame.name}\n      {frame.line}"
