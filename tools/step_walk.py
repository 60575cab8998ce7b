"""Follows one decode step through the files: `python tools/step_walk.py`. A file is a room; a return is a room entered again.

What a CUDA graph would capture is left out: on a GPU its replay is one call. With `--draw` the requests have top-k and a
penalty, so that their rows are drawn again behind the graph.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import folovllm
from folovllm import LLM, SamplingParams

PACKAGE = f"{Path(folovllm.__file__).parent}{os.sep}"
CAPTURED = "CpuGraph.replay"
BORDER = "submit"  # the call with which a step leaves for the device


class Walk:
    """The rooms that calls lead into, one after the other; a call within a room is no move."""

    def __init__(self) -> None:
        self.stays: list[str] = []
        self.below: list[str] = []  # from the border on, until it is left again
        self._captured: FrameType | None = None
        self._border: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "return":
            self._captured = None if frame is self._captured else self._captured
            self._border = None if frame is self._border else self._border
        if event != "call" or self._captured or not code.co_filename.startswith(PACKAGE) or "<" in code.co_name:
            return
        room = code.co_filename.removeprefix(PACKAGE)
        if code.co_name == BORDER and self._border is None:
            self._border = frame
        if code.co_qualname == CAPTURED:
            self._captured = frame
        for stays in (self.stays, self.below) if self._border else (self.stays,):
            if stays[-1:] != [room]:
                stays.append(room)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--draw", action="store_true", help="requests whose draw takes more than temperature")
    parser.add_argument("--route", action="store_true", help="name the rooms in the order of the walk")
    arguments = parser.parse_args()
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=0)
    if arguments.draw:
        params = SamplingParams(max_tokens=40, ignore_eos=True, seed=0, top_k=20, presence_penalty=0.5)
    with LLM("stories-5m", milestone="m6", device="cpu", use_tqdm=False, num_kv_blocks=64, max_model_len=64) as llm:
        for i in range(arguments.requests):
            llm.engine.add_request(str(i), "Once upon a time", params)
        for _ in range(6):
            llm.engine.step()
        walk = Walk()
        sys.setprofile(walk)
        llm.engine.step()
        sys.setprofile(None)
    for name, stays in (("the whole step", walk.stays), ("below the border", walk.below)):
        rooms = list(dict.fromkeys(stays))
        print(f"{name}: {len(rooms)} rooms, {len(stays) - len(rooms)} returns")
        if arguments.route:
            print("    " + " > ".join(stays))


if __name__ == "__main__":
    main()
