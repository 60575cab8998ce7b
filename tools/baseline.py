"""Compares this tree with another one, figure by figure: `python -m tools.baseline cpu --against ../old`.

The two trees take turns, and who is first alternates. For each figure it prints both medians and the ratio old / new (above
1: new is better) with its 95% interval, over the pairs. A figure passes if the medians' ratio is at least 0.99 or the interval
includes 1; tokens pass if they are equal. Without `--against` it prints this tree's figures alone. `--rows` measures some rows
alone, so that a run fits into a time limit. Of the other tree it uses the public face alone: `folovllm.LLM` and its kin, and
`python -m folovllm serve`.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from folovllm.apps.bench.contenders import GEOMETRIES
from folovllm.apps.bench.serving import Point, server_at, serving, sweep
from folovllm.apps.bench.workload import load_workload
from tools.gpu import in_turns, parser_of, print_row, random_weights

HERE = Path(__file__).resolve().parents[1]
CHILD = HERE / "tools" / "baseline_child.py"
END = 60.0  # seconds that a child has to end
T = dict(enumerate([12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26], start=2))  # 97.5% of Student's t, by pairs
Work = tuple[str, list[Any]]  # a method of the child's, and its arguments behind the seed
Figures = dict[str, Any]

TOKENS: Work = ("tokens", [])
CPU_ENGINES: dict[str, tuple[dict[str, Any], list[Work]]] = {
    **{f"m{k}": ({"milestone": f"m{k}"}, [TOKENS, ("nano", [12, 96])]) for k in range(1, 7)},
    "m1, native": ({"milestone": "m1", "model_impl": "native"}, [TOKENS]),
    "X1, forms": ({}, [("forms", [])]),
    **{f"X2, {kind} weights": ({"random_weights": True, "quantization": kind}, [TOKENS]) for kind in ("int4", "int8", "fp8")},
    "X2, FP8 cache": ({"kv_cache_dtype": "fp8"}, [TOKENS]),
    "X3, n-gram": ({"speculative_method": "ngram+suffix", "num_speculative_tokens": 8}, [TOKENS, ("texts", ["repetitive", 1])]),
    "X3, draft model": ({"speculative_config": {"method": "draft_model", "model": "stories-draft"}}, [TOKENS]),
    "X4, experts": ({"model": "stories-moe"}, [TOKENS, ("nano", [12, 96])]),
}  # fmt: skip
LONE, MANY = ("at_once", [1, 128, 256]), ("at_once", [256, 512, 256])
# Two such engines fit on a card; of larger models with fewer blocks.
ROOM = {"block_size": 16, "num_kv_blocks": 20_000, "max_model_len": 16_384, "max_num_batched_tokens": 16_384}
SMALL, LARGE = ({"config": GEOMETRIES[name]} | ROOM for name in ("qwen3-0.6b", "qwen3-4b"))
FEWER = {"block_size": 16, "num_kv_blocks": 8192, "max_model_len": 4096}
EIGHT, HYBRID = ({"config": GEOMETRIES[name]} | FEWER for name in ("qwen3-8b", "qwen3.5-9b"))
EXPERTS = {"config": GEOMETRIES["qwen3-30b-a3b"] | {"num_hidden_layers": 24}} | FEWER
GPU_ENGINES: dict[str, tuple[dict[str, Any], list[Work]]] = {
    "0.6B": (SMALL, [LONE, ("at_once", [16, 512, 256]), MANY, ("nano", []), ("at_once", [32, 8000, 32])]),
    "4B": (LARGE, [LONE]),
    "4B, INT4": (LARGE | {"quantization": "int4"}, [LONE]),
    "4B, FP8": (LARGE | {"quantization": "fp8"}, [LONE]),
    "8B": (EIGHT, [LONE, ("at_once", [64, 128, 256])]),
    "hybrid": (HYBRID, [LONE, ("at_once", [64, 128, 256])]),
    "experts": (EXPERTS, [LONE, ("at_once", [64, 128, 256])]),
    "grammars": ({"num_kv_blocks": 4096}, [("grammars", [16])]),
    "bad words": (SMALL, [("bad_words", [16, 128, 256])]),
    "n-gram": (CPU_ENGINES["X3, n-gram"][0] | {"num_kv_blocks": 4096}, [("texts", ["repetitive", 1])]),
    "draft model": (CPU_ENGINES["X3, draft model"][0] | {"num_kv_blocks": 4096}, [("texts", ["plain", 1])]),
}  # fmt: skip
PAIR_ENGINES = {"4B, two GPUs": (LARGE | {"tensor_parallel_size": 2}, [LONE, MANY])}


def environment(tree: Path) -> dict[str, str]:
    """That of a process which runs a tree."""
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(tree)}


@contextmanager
def child(tree: Path, settings: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A process that holds an engine of a tree. Raises RuntimeError if it does not end well."""
    command = [sys.executable, str(CHILD), json.dumps(settings)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment(tree), cwd=tree, process_group=0, **pipes)
    try:
        yield process
        process.communicate(timeout=END)  # at the end of its input it ends
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # ranks are children of it
        process.wait()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with code {process.returncode} in {tree}")


def ask(process: subprocess.Popen[str], work: Work, seed: int) -> Figures:
    """The figures of a work. Raises RuntimeError if the process ends instead."""
    assert process.stdin and process.stdout
    print(json.dumps([work[0], seed, work[1]]), file=process.stdin, flush=True)
    for line in process.stdout:
        if line.startswith("{"):
            return dict(json.loads(line))
    raise RuntimeError(f"the process of {work} has ended: what it printed stands above")


def resident(
    trees: list[Path], name: str, settings: dict[str, Any], works: list[Work], pairs: int
) -> Iterator[tuple[int, Figures]]:
    """Figures of works that engines of all trees do in turns; the first turn warms up."""
    with ExitStack() as stack:
        children = [stack.enter_context(child(tree, settings)) for tree in trees]
        for turn, i in in_turns(range(len(trees)), pairs + 1):
            for work in works:
                figures = ask(children[i], work, turn)
                if turn:
                    yield i, {f"{name}: {figure}": value for figure, value in figures.items()}


def commands(trees: list[Path], pairs: int) -> Iterator[tuple[int, Figures]]:
    """Seconds of whole processes on a CPU: one that imports the package, and one up to its first token, with its memory then."""
    for _, i in in_turns(range(len(trees)), pairs):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import folovllm"], env=environment(trees[i]), cwd=trees[i], check=True)
        yield i, {"import folovllm": time.perf_counter() - began}
        began = time.perf_counter()
        with child(trees[i], {"model": "stories-5m"}) as process:
            figures = ask(process, ("first_token", []), 0)
            yield i, {"start to first token": time.perf_counter() - began} | figures


def served(trees: list[Path], pairs: int) -> Iterator[tuple[int, Figures]]:
    """Seconds between tokens of a stream over HTTP, with one client and with many; this tree's clients ask both servers."""
    loads = load_workload("mixed", 128), [Point(clients=1), Point(clients=64)]
    with random_weights("qwen3-0.6b") as fields:
        command = [sys.executable, "-m", "folovllm", "serve", fields["model"], "--random-weights"]
        command += ["--tokenizer", "stories-5m", "--port", "0", "--num-kv-blocks", "8192", "--max-model-len", "4096"]
        for _, i in in_turns(range(len(trees)), pairs):
            with serving(command, env=environment(trees[i]), cwd=trees[i]) as url:
                for run in sweep(server_at(url), *loads)[0].runs:
                    name = f"served: time a token at {run.config['clients']} clients"
                    yield i, {name: run.metrics["TPOT median"].median / 1e3}


def measurements(machine: str, trees: list[Path], pairs: int) -> dict[str, Iterator[tuple[int, Figures]]]:
    """What is measured on a machine, by name."""
    engines = {"cpu": CPU_ENGINES, "gpu": GPU_ENGINES, "gpus": PAIR_ENGINES}[machine]
    whole = {"cpu": {"commands": commands(trees, pairs)}, "gpu": {"served": served(trees, pairs)}}
    return {name: resident(trees, name, *spec, pairs) for name, spec in engines.items()} | whole.get(machine, {})


def row(name: str, new: list[Any], old: list[Any] | None) -> bool:
    """Print a line of the table; returns whether the figure passes."""
    if isinstance(new[0], list):
        passes = all(value == new[0] for value in [*new, *(old or [])])
        print_row(name, "equal" if passes else "NOT EQUAL")
    elif old is None:
        passes = True
        print_row(name, f"{statistics.median(new):.5g}")
    else:
        logs = [math.log(a / b) for a, b in zip(old, new, strict=True)]
        half = T[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
        low, middle, high = (math.exp(statistics.fmean(logs) + part) for part in (-half, 0.0, half))
        medians = statistics.median(old), statistics.median(new)
        passes = medians[0] / medians[1] >= 0.99 or high >= 1
        interval = f"({low:.3f} to {high:.3f})" + "  WORSE" * (not passes)
        print_row(name, *(f"{value:.5g}" for value in medians), middle, interval)
    return passes


def main() -> int:
    """Print the table; returns 1 if a figure is worse."""
    parser = parser_of(__doc__)
    parser.add_argument("machine", choices=["cpu", "gpu", "gpus"])
    parser.add_argument("--against", type=Path, help="the root of the other tree")
    parser.add_argument("--pairs", type=int, default=5, choices=range(1, 11))
    parser.add_argument("--rows", nargs="*", help="only these, by name")
    args = parser.parse_args()
    trees = [HERE] + ([args.against.resolve()] if args.against else [])
    measured = measurements(args.machine, trees, args.pairs)
    if unknown := set(args.rows or ()) - set(measured):
        parser.error(f"--rows knows no {', '.join(map(repr, unknown))}: choose from {', '.join(map(repr, measured))}")
    print_row("", *(["old", "new", "old / new"] if args.against else ["this tree"]))
    passes = True
    for name in args.rows or measured:
        values: dict[str, list[list[Any]]] = defaultdict(lambda: [[] for _ in trees])
        for i, found in measured[name]:
            for figure, value in found.items():
                values[figure][i].append(value)
        for figure, (new, *old) in values.items():
            passes &= row(figure, new, old[0] if old else None)
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main())
