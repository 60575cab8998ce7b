"""What the tools that measure share: a command line, models of random weights, turns, times of a device and its own rates, rows of a table."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from folovllm.apps.bench.contenders import GEOMETRIES, random_model
from folovllm.apps.bench.roofline import Rates, measure_rates


def parser_of(description: str | None, geometry: str | None = None) -> argparse.ArgumentParser:
    """A parser whose help is a tool's docstring; with `--geometry`, where a default is given."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if geometry is not None:
        parser.add_argument("--geometry", default=geometry, choices=GEOMETRIES, help="of random weights")
    return parser


def print_row(name: str, *cells: object) -> None:
    """Print a line of a table, at once."""
    texts = (f"{cell:,.{1 if cell >= 100 else 3}f}" if isinstance(cell, float) else str(cell) for cell in cells)
    print(f"{name:36}" + "".join(f" {text:>14}" for text in texts), flush=True)


@contextmanager
def random_weights(geometry: str, changes: dict[str, Any] | None = None, **common: Any) -> Iterator[dict[str, Any]]:
    """The fields of an engine with random weights, whose files are there until the end of the block; `changes` to its model's configuration."""
    with tempfile.TemporaryDirectory() as folder:
        fields = random_model(geometry, Path(folder), {"use_tqdm": False} | common)
        config = Path(fields["model"], "config.json")
        config.write_text(json.dumps(json.loads(config.read_text()) | (changes or {})), encoding="utf-8")
        yield fields


def in_turns(names: Sequence[Any], rounds: int) -> Iterator[tuple[int, Any]]:
    """Who is measured after whom: (round, name), the other way round in each second round."""
    for number in range(rounds):
        yield from ((number, name) for name in (names if number % 2 == 0 else reversed(names)))


def microseconds(work: Callable[[], object], replays: int = 20, as_graph: bool = True) -> float:
    """Median time of `work`, captured as a graph. Replays follow each other, so the host's part is hidden."""
    work()  # compiles
    torch.cuda.synchronize()
    if as_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
    run = graph.replay if as_graph else work
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 3)]
    for event in events:
        event.record()
        run()
    torch.cuda.synchronize()
    return 1e3 * median(begin.elapsed_time(end) for begin, end in pairwise(events[2:]))  # the first two only warm up


def microseconds_a_call(work: Callable[[int], object], numbers: Sequence[int], replays: int = 20) -> float:
    """Median time of `work(number)`, of all numbers in one graph."""
    return microseconds(lambda: [work(number) for number in numbers], replays) / len(numbers)


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of `work`, until all that it queued on the device is done, too."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def link_rates(num_bytes: int = 1 << 29) -> tuple[float, float]:
    """Bytes a second of one copy from pinned memory to the card, and of one back; without a card, of copies in memory."""
    has_card = torch.cuda.is_available()
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=has_card)
    card = torch.empty(num_bytes, dtype=torch.uint8, device="cuda" if has_card else "cpu")

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        return num_bytes / min(seconds_of(lambda: target.copy_(source, non_blocking=True)) for _ in range(6))

    return rate(card, host), rate(host, card)


def card_rates() -> Rates:
    """Bytes a second of a copy and FLOP/s of a bfloat16 product, measured and printed. Ends the program where there is no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    rates = measure_rates(torch.device("cuda"), torch.bfloat16)
    name, copy, matmul = torch.cuda.get_device_name(), rates.copy / 1e12, rates.matmul / 1e12
    print(f"{name}: copy {copy:.2f} TB/s, bfloat16 {matmul:.0f} TFLOP/s", flush=True)
    return rates
