"""Offline data parallelism: one engine a GPU, each with its share of the prompts, by Ray Data.

    pip install "folovllm[ray]"
    python examples/ray_data.py prompts.txt answers --engines 8                # a prompt a line; answers as JSON lines
    python examples/ray_data.py prompts.txt answers --engines 2 --device cpu

Ray Data reads ahead, hands batches to whichever engine is free, and writes what comes back. The order is not kept, so
each answer comes with its prompt.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import ray


class Answerer:
    """An engine in an actor of its own; Ray has given it a GPU, or none."""

    def __init__(self, model: str | None, device: str) -> None:
        from folovllm import LLM

        self.llm = LLM(model, device=device, use_tqdm=False)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """{"text": prompts} -> the same with "answer"."""
        from folovllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=64)
        outputs = self.llm.generate(list(batch["text"]), params, use_tqdm=False)
        return {"text": batch["text"], "answer": np.array([output.outputs[0].text for output in outputs])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", help="a text file, or a folder of them")
    parser.add_argument("answers", help="a folder that gets JSON lines")
    parser.add_argument("--model", help="the embedded one if left out")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--engines", type=int, default=1, help="how many, a GPU each")
    parser.add_argument("--batch-size", type=int, default=512, help="prompts that an engine gets at a time")
    given = parser.parse_args()
    prompts = ray.data.read_text(given.prompts, override_num_blocks=4 * given.engines)
    prompts.map_batches(
        Answerer,
        fn_constructor_args=(given.model, given.device),
        compute=ray.data.ActorPoolStrategy(size=given.engines),
        batch_size=given.batch_size,
        num_gpus=1 if given.device == "cuda" else 0,
        num_cpus=0,  # or engines could keep the tasks that read and write from running
    ).write_json(given.answers)


if __name__ == "__main__":
    main()
