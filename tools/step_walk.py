"""Counts the files that one decode step enters, and how often it returns to one: `python tools/step_walk.py`.

What a CUDA graph would capture is left out: on a GPU its replay is one call.
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
SUBMIT = "submit"  # the call with which a step leaves for the device


class CallPath:
    """The files that calls lead into, one after the other; a call within a file adds nothing."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.on_device: list[str] = []  # those of the device's side: within `submit`
        self._captured: FrameType | None = None
        self._submit: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "return":
            self._captured = None if frame is self._captured else self._captured
            self._submit = None if frame is self._submit else self._submit
        if event != "call" or self._captured or not code.co_filename.startswith(PACKAGE) or "<" in code.co_name:
            return
        if code.co_name == SUBMIT:
            self._submit = self._submit or frame
        if code.co_qualname == CAPTURED:
            self._captured = frame
        file = code.co_filename.removeprefix(PACKAGE)
        for path in (self.files, self.on_device) if self._submit else (self.files,):
            path += [file] * (path[-1:] != [file])


def walk(num_requests: int = 1) -> CallPath:
    """Follow one step in which each request decodes a token."""
    path, params = CallPath(), SamplingParams(max_tokens=40, ignore_eos=True, seed=0)
    with LLM("stories-5m", milestone="m6", device="cpu", use_tqdm=False, num_kv_blocks=64, max_model_len=64) as llm:
        for i in range(num_requests):
            llm.engine.add_request(str(i), "Once upon a time", params)
        for _ in range(6):
            llm.engine.step()
        sys.setprofile(path)
        llm.engine.step()
        sys.setprofile(None)
    return path


def main() -> None:
    """Print the counts of the whole step, and of its part on the device's side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--route", action="store_true", help="name the files in the order of the calls")
    arguments = parser.parse_args()
    path = walk(arguments.requests)
    for name, files in (("the whole step", path.files), ("on the device's side", path.on_device)):
        print(f"{name}: {len(set(files))} files, {len(files) - len(set(files))} returns")
        if arguments.route:
            print("    " + " > ".join(files))


if __name__ == "__main__":
    main()
