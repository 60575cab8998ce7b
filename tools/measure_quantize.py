"""What bits cost: the embedded model in each format. `python tools/measure_quantize.py` prints the table of docs/performance_log.md.

Perplexity and agreement are the quantiser's own, over the last fifth of the model's text; stories are what the engine
answers to 50 requests, greedily, beside the answers of the model as it is.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig

from folovllm import LLM, SamplingParams
from folovllm.config import DEFAULT_MODEL
from folovllm.models.files import resolve_model
from folovllm.models.loader import load_model
from folovllm.models.registry import build_model
from folovllm.quantization.quantizer.one_layer import Checkpoint
from folovllm.quantization.quantizer.options import QuantizeOptions
from folovllm.quantization.quantizer.perplexity import compare
from folovllm.quantization.quantizer.run import quantize, rows_of
from folovllm.quantization.quantizer.whole import logits_of

KINDS = {
    "FP8, blocks": {"format": "fp8"},
    "FP8, outputs": {"format": "fp8", "per_channel": True},
    "INT8": {"format": "int8"},
    "GPTQ": {"format": "gptq"},
    "GPTQ, act-order": {"format": "gptq", "act_order": True},
    "GPTQ, zeros": {"format": "gptq", "asymmetric": True},
    "AWQ": {"format": "awq"},
    "nearest": {"format": "gptq", "nearest": True},
    "nearest, zeros": {"format": "gptq", "nearest": True, "asymmetric": True},
}
NAMES = ("Lily", "Tom", "Mia", "Ben", "Zoe")
THINGS = ("red kite", "blue boat", "green drum", "old lamp", "tiny key", "gold ring", "wooden horse", "soft hat", "toy train", "big balloon")  # fmt: skip
REQUESTS = [f"Tell me a story about {name} and a {thing}." for name in NAMES for thing in THINGS]


def stories(model: str) -> list[str]:
    llm = LLM(model, use_tqdm=False)
    asked = [llm.render_chat([{"role": "user", "content": text}]) for text in REQUESTS]
    return [
        o.outputs[0].text for o in llm.generate(asked, SamplingParams(temperature=0, max_tokens=160), use_tqdm=False)
    ]


def in_16_bits(options: QuantizeOptions) -> tuple[float, float, float]:
    """Perplexity of the model as it is, computed in float32 and in bfloat16, and how often these agree."""
    path = resolve_model(DEFAULT_MODEL)
    config = AutoConfig.from_pretrained(path)
    rows = rows_of(path, config, options, None)
    models = [build_model(config, dtype, "cpu", options.length) for dtype in (torch.float32, torch.bfloat16)]
    for model in models:
        load_model(model, path, use_tqdm=False)
    quality = compare((*(logits_of(model, ids) for model in models), ids) for ids in rows[1].split(1))
    return quality.before, quality.after, quality.agreement


def main() -> None:
    full, half, agreement = in_16_bits(QuantizeOptions(format="int8"))
    plain = stories(DEFAULT_MODEL)
    print("| | MB | perplexity | same likeliest token | same story, of 50 | seconds |\n|---|---|---|---|---|---|")
    size = Checkpoint(resolve_model(DEFAULT_MODEL)).num_bytes / 1e6
    print(f"| as it is, computed in float32 | {size:.1f} | {full:.4f} | | | |")
    print(f"| computed in bfloat16 | {size:.1f} | {half:.4f} | {agreement:.2%} | | |", flush=True)
    for name in sys.argv[1:] or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            begun = time.process_time()
            report = quantize(DEFAULT_MODEL, QuantizeOptions(**KINDS[name]), Path(folder, "out"), use_tqdm=False)
            seconds = time.process_time() - begun
            same = sum(a == b for a, b in zip(plain, stories(str(report.folder)), strict=True))
        quality = report.quality
        assert quality is not None
        print(
            f"| {name} | {report.bytes_after / 1e6:.1f} | {quality.after:.4f} | {quality.agreement:.2%} | {same} | "
            f"{seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
