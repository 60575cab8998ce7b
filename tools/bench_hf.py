"""Hugging Face's `generate` on the ladder's workload: the rung below all others.

python tools/bench_hf.py --random-weights qwen3-0.6b --seconds 8 --batches 1,32 --save hf.json

Requests go in as they come, `batch` at a time, padded on the left to the longest prompt. Each batch runs until its longest
answer is over; a request's tokens count up to the length that it asked for. After `seconds` the rest is cut off.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from folovllm.bench.contenders import write_geometry
from folovllm.bench.workload import BenchRequest, load_workload


class Until(StoppingCriteria):
    """Ends a batch when the time is over, and counts its steps."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.steps = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self.steps += 1
        return torch.full((len(input_ids),), time.monotonic() > self.deadline, device=input_ids.device)


def tokens_a_second(model: Any, requests: list[BenchRequest], batch: int, seconds: float) -> float:
    """Useful output tokens a second of `generate`, `batch` requests at a time, for about `seconds`."""
    start, useful = time.monotonic(), 0
    for group in (requests[i : i + batch] for i in range(0, len(requests), batch)):
        until = Until(start + seconds)
        ids, mask = padded([request.prompt for request in group], model.device)
        longest = max(request.output_len for request in group)
        model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=0.6, top_k=0, min_new_tokens=longest,
            max_new_tokens=longest, pad_token_id=0, stopping_criteria=StoppingCriteriaList([until]),
        )  # fmt: skip
        useful += sum(min(request.output_len, until.steps) for request in group)
        if time.monotonic() > until.deadline:
            break
    return useful / (time.monotonic() - start)


def padded(prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, `[batch, longest]`, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--random-weights", default="qwen3-0.6b", metavar="NAME", help="a geometry, as of folovllm bench"
    )
    parser.add_argument("--seconds", type=float, default=8, help="for each batch size")
    parser.add_argument("--batches", default="1,32", help="how many requests at a time")
    parser.add_argument("--save", type=Path, help="a JSON file to write")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans each new length of the keys anew, 35 ms each
    with tempfile.TemporaryDirectory() as folder, torch.device(device):
        config = AutoConfig.from_pretrained(write_geometry(given.random_weights, Path(folder)))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    requests = load_workload("nano-vllm", config.vocab_size).requests
    tokens_a_second(model, requests, 1, 1.0)  # warm
    speeds = {
        batch: tokens_a_second(model, requests, batch, given.seconds) for batch in map(int, given.batches.split(","))
    }
    for batch, speed in speeds.items():
        print(f"{batch:4} at a time: {speed:,.1f} tokens/s")
    if given.save:
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        given.save.write_text(
            json.dumps({"device": name, "model": given.random_weights, "tokens a second": speeds}, indent=1)
        )


if __name__ == "__main__":
    main()
