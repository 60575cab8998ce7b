"""Time formats of weights beside 16 bits, in turns: `python -m tools.measure_formats`. A GPU must hold all engines at once.

A step of some requests, and prompts of one request, both in milliseconds; random weights. Each round has all engines at each
point, and every second round has them in the other order. The last table: medians, and in brackets the median over the rounds
of the time of 16 bits (with `--ranks 1 2`: on one GPU) divided by that of the format: above 1, the format is faster.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from folovllm.apps.bench.serve import running
from folovllm.config import DEFAULT_MODEL, EngineConfig
from folovllm.electives.quantization.config import compressed_config
from tools.beside_vllm import WEIGHTS, write_model
from tools.gpu import in_turns, parser_of
from tools.measure_step import prompts_time, step_time

PLAIN = "16-bit"
GROUPS_OF_32 = {"strategy": "group", "group_size": 32}  # as Q8_0 and Q4_0 of a GGUF file become
FORMATS: dict[str, dict[str, Any] | None] = {
    PLAIN: None, **WEIGHTS,
    "int8": compressed_config("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "q8_0": compressed_config("int-quantized", {"num_bits": 8, **GROUPS_OF_32}),
    "q4_0": compressed_config("pack-quantized", {"num_bits": 4, **GROUPS_OF_32}),
}  # fmt: skip
AT_ONCE, PROMPTS = [1, 2, 4, 8, 16, 32, 64, 128, 256], [512, 2048, 16_000]
COMMON: dict[str, Any] = {
    "tokenizer": DEFAULT_MODEL, "model_impl": "native", "random_weights": True, "use_tqdm": False, "block_size": 16,
    "num_kv_blocks": 4400, "max_model_len": 16_384, "max_num_batched_tokens": 16_384,
}  # fmt: skip


def print_table(rounds: dict[str, list[list[float]]], points: list[str]) -> None:
    """Print of each engine, at each point, the median, and that of the ratios to the first one."""
    first = next(iter(rounds.values()))
    print(f"{'':21}" + "".join(f"{point:>16}" for point in points))
    for name, times in rounds.items():
        cells = []
        for column, plain in zip(zip(*times, strict=True), zip(*first, strict=True), strict=True):
            ratio = statistics.median(a / b for a, b in zip(plain, column, strict=True))
            cells.append(f"{statistics.median(column):9.3f} ({ratio:4.2f})")
        print(f"{name:21}" + "".join(cells), flush=True)


def main() -> None:
    """Start an engine for each format, and print each round and the table."""
    parser = parser_of(__doc__, "qwen3-8b")
    parser.add_argument("--formats", nargs="+", default=[PLAIN, *WEIGHTS], choices=FORMATS)
    parser.add_argument("--at-once", type=int, nargs="*", default=AT_ONCE)
    parser.add_argument("--prompts", type=int, nargs="*", default=PROMPTS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="an engine of each format for each of these")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    formats = [PLAIN, *(name for name in args.formats if name != PLAIN)]
    kinds = {f"{name}, {ranks} GPU": (FORMATS[name], ranks) for name in formats for ranks in args.ranks}
    points = [str(count) for count in args.at_once] + [f"prompt {length}" for length in args.prompts]
    rounds: dict[str, list[list[float]]] = {name: [] for name in kinds}
    with ExitStack() as stack:
        engines = {}
        for name, (weights, ranks) in kinds.items():
            began, folder = time.perf_counter(), Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model = str(write_model(args.geometry, weights, folder))
            config = EngineConfig(model=model, tensor_parallel_size=ranks, **COMMON)
            engines[name] = stack.enter_context(running(config))
            print(f"{name} started in {time.perf_counter() - began:.1f} s", flush=True)
        for number, name in in_turns(list(kinds), args.rounds):
            times = [step_time(engines[name], count) for count in args.at_once]
            times += [prompts_time(engines[name], length) for length in args.prompts]
            rounds[name].append(times)
            print(f"{number} {name:21}" + "".join(f"{value:9.3f}" for value in times), flush=True)
        print_table(rounds, points)


if __name__ == "__main__":
    main()
