"""The text that `folovllm quantize` calibrates the embedded model with. `python -m tools.train_tiny.calibration FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

from .stories import request_and_story

SEED = 7  # not the training's
STORIES = 200


def main(file: str) -> None:
    """Write JSON lines, a story each: what the model has learned to write, without the questions, which it has not."""
    stories = (request_and_story(Random(SEED * 2**40 + number))[1] for number in range(STORIES))
    Path(file).write_text("".join(json.dumps({"text": story}) + "\n" for story in stories))


if __name__ == "__main__":
    main(*sys.argv[1:])
