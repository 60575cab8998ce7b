"""Merged projections against separate ones, on a GPU: `python docs/_tools/measure_merged.py docs/data/merged_h200.json`.

The weights are those of all layers of Qwen3-0.6B's geometry, one after the other, so that no cache holds them when their
turn comes again. All products of one pass are recorded as one CUDA graph: what is measured is the GPU, not Python.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.nn.functional import linear

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from folovllm.apps.bench.contenders import GEOMETRIES
from tools.gpu import microseconds

GEOMETRY = GEOMETRIES["qwen3-0.6b"]
HIDDEN, LAYERS, INNER, HEAD = (
    GEOMETRY[k] for k in ("hidden_size", "num_hidden_layers", "intermediate_size", "head_dim")
)
HEADS = [GEOMETRY["num_attention_heads"], GEOMETRY["num_key_value_heads"], GEOMETRY["num_key_value_heads"]]
PARTS = {"query, key, value": [n * HEAD for n in HEADS], "gate, up": [INNER, INNER]}
TOKENS, REPLAYS = (1, 16, 256, 2048), 50


def main(path: Path) -> None:
    device, rows = torch.device("cuda"), []
    for name, sizes in PARTS.items():
        merged = [torch.randn(sum(sizes), HIDDEN, device=device, dtype=torch.bfloat16) for _ in range(LAYERS)]
        parts = [[part.clone() for part in weight.split(sizes)] for weight in merged]
        for tokens in TOKENS:
            x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
            works = {
                "separate": lambda x=x, parts=parts: [linear(x, part) for layer in parts for part in layer],
                "merged": lambda x=x, merged=merged: [linear(x, weight) for weight in merged],
            }
            times = {way: round(microseconds(work, REPLAYS) / LAYERS, 2) for way, work in works.items()}
            rows.append({"what": name, "tokens": tokens, **times})
            print(rows[-1])
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    path.write_text(json.dumps(machine | {"rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
