"""Merged projections against separate ones, on a GPU: `python docs/_tools/measure_merged.py docs/data/merged_h200.json`.

The weights are those of all layers of Qwen3-0.6B's geometry, one after the other, so that no cache holds them when their
turn comes again. All products of one pass are recorded as one CUDA graph: what is measured is the GPU, not Python.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import linear

from folovllm.bench.contenders import GEOMETRIES

GEOMETRY = GEOMETRIES["qwen3-0.6b"]
HIDDEN, LAYERS, INNER, HEAD = (
    GEOMETRY[k] for k in ("hidden_size", "num_hidden_layers", "intermediate_size", "head_dim")
)
HEADS = [GEOMETRY["num_attention_heads"], GEOMETRY["num_key_value_heads"], GEOMETRY["num_key_value_heads"]]
PARTS = {"query, key, value": [n * HEAD for n in HEADS], "gate, up": [INNER, INNER]}
TOKENS, REPEATS = (1, 16, 256, 2048), 50


def microseconds(work: Callable[[], object]) -> float:
    """The median time of one recorded pass, for a layer."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / LAYERS)
    return round(statistics.median(times), 2)


def main(path: Path) -> None:
    device, rows = torch.device("cuda"), []
    for name, sizes in PARTS.items():
        merged = [torch.randn(sum(sizes), HIDDEN, device=device, dtype=torch.bfloat16) for _ in range(LAYERS)]
        parts = [[part.clone() for part in weight.split(sizes)] for weight in merged]
        for tokens in TOKENS:
            x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
            one = microseconds(lambda x=x, merged=merged: [linear(x, weight) for weight in merged])
            several = microseconds(lambda x=x, parts=parts: [linear(x, part) for layer in parts for part in layer])
            rows.append({"what": name, "tokens": tokens, "separate": several, "merged": one})
            print(rows[-1])
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    path.write_text(json.dumps(machine | {"rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
