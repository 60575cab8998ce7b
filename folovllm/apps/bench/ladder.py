"""`folovllm bench ladder`: one workload through every milestone, so that each step up can be seen.

On a GPU the last milestone also runs with every other attention backend that the machine has. On CPU in float32 greedy
answers must be the same at every milestone; a result in which they differ is refused, not drawn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from folovllm.apps.bench import throughput as figures
from folovllm.apps.bench.contenders import Contender
from folovllm.apps.bench.report import Result, digits, load, machine_line, ratio, workload_line
from folovllm.apps.bench.workload import load_workload
from folovllm.attention.backends.abstract import BackendUnavailable
from folovllm.attention.backends.registry import BACKENDS
from folovllm.config import PRESETS, EngineConfig
from folovllm.distributed.children import import_path, python_command
from folovllm.engine.setup import choose_device, set_up
from folovllm.models.model_config import num_positions

FIRST_WITH_BACKENDS = "m4"
SLOTS = 4  # of a CPU: few enough that M3 has something to gain
CHUNK = 128  # tokens a step of a CPU where prompts come in chunks: some 15 ms
RATE = "output tokens"
COLUMNS = {  # a metric and its heading
    RATE: "output",
    figures.PER_CPU_SECOND: "a CPU\nsecond",
    "sequences a step": "at\nonce",
    "TTFT median": "first\ntoken",
    "TPOT median": "each\ntoken",
    figures.LONGEST_GAP: "longest\nwait",
    figures.WASTE: "cache\nempty",
    figures.REUSED: "prompt\nfound",
    figures.ROOFLINE: "of the\nroofline",
    figures.AGREEMENT: "same\ntokens",
}
LEGEND = (
    "At once: requests in a step, mean. First and each token: medians, with all waiting. Longest wait: of a running "
    "request for its next token. Cache empty: reserved, and nothing in it. Prompt found: in the cache, not computed. "
    "On a CPU M4 runs what M3 runs, and M6 has no device to overlap with: both are for GPUs."
)


def bench_ladder(
    upto: str, fields: dict[str, Any], workload: str | None, requests: int | None, limit: float | None, repeats: int
) -> Result:
    """Measure the milestones up to one of them over `fields` of an EngineConfig, and check that the answers agree where they must.

    Raises:
        ValueError: no such milestone; or greedy float32 answers on CPU differ.
    """
    on_gpu = choose_device(fields.get("device")).type == "cuda"
    workload = workload or ("nano-vllm" if on_gpu else "mixed")
    contenders = milestones_up_to(upto, fields)
    if not on_gpu:
        contenders = for_cpu(contenders, workload, requests)
    elif upto >= FIRST_WITH_BACKENDS:
        contenders += other_backends(contenders[-1])
    result = figures.bench_throughput(contenders, workload, requests, repeats, limit, "ladder")
    for run in result.runs:  # a GPU's work is not the CPU's; a small model stays in a CPU's cache, which no copy shows
        run.metrics.pop(figures.PER_CPU_SECOND if on_gpu else figures.ROOFLINE, None)
    if not on_gpu and fields.get("dtype", "auto") in ("auto", "float32"):
        check_answers(result)  # rounding cannot explain a difference
    return result


def milestones_up_to(upto: str, fields: dict[str, Any]) -> list[Contender]:
    """List the presets up to `upto`. Raises ValueError where there is no such milestone."""
    if upto not in PRESETS:
        raise ValueError(f"unknown milestone {upto!r}: choose one of {', '.join(PRESETS)}")
    return [(name, {**fields, "milestone": name}) for name in PRESETS if name <= upto]


def for_cpu(contenders: list[Contender], workload: str, count: int | None) -> list[Contender]:
    """Give the milestones little memory and small chunks, so that a CPU shows what each of them is for.

    The KV cache has room for `SLOTS` requests as long as the workload's longest, in slots or in the same bytes of
    blocks, and where prompts come in chunks a step has `CHUNK` tokens. What a contender's fields say already stays.
    """
    setup = set_up(EngineConfig(**contenders[0][1]))
    longest = load_workload(workload, count).longest
    context = setup.config.max_model_len or min(longest, num_positions(setup.hf_config))
    little = {"max_model_len": context, "kv_cache_memory": SLOTS * context * setup.kv_bytes_per_token}
    chunk = {"max_num_batched_tokens": CHUNK}
    return [
        (name, little | (chunk if EngineConfig(**fields).enable_chunked_prefill else {}) | fields)
        for name, fields in contenders
    ]


def other_backends(contender: Contender) -> list[Contender]:
    """List the same engine with each paged backend that runs here and that "auto" did not choose."""
    name, fields = contender
    chosen, names, found = set_up(EngineConfig(**fields)).backend, list(BACKENDS), []
    for backend in names[names.index("torch_paged") :]:
        own = {**fields, "attention_backend": backend}
        with suppress(BackendUnavailable):  # what a machine does not have is left out
            set_up(EngineConfig(**own))
            found += [(f"{name} {backend}", own)] * (backend != chosen)
    return found


def check_answers(result: Result) -> None:
    """Raise ValueError where a milestone's greedy tokens are not the first's."""
    for run in result.runs:
        same = run.metrics.get(figures.AGREEMENT)
        if same is not None and same.median < 100:
            raise ValueError(
                f"{run.name} gave only {same.median:.1f}% of {result.runs[0].name}'s tokens: greedy answers in float32 "
                "must be the same at every milestone; its tests will say more"
            )


def beside_reference(*asked: Any) -> Result:
    """Measure a ladder as `bench_ladder` does, and the same of the package's own code, in a process without `FOLOVLLM_MINE`.

    Two runs a milestone: the reference's, then the learner's.

    Raises:
        RuntimeError: that process failed; its last line says why.
    """
    mine, environment = bench_ladder(*asked), os.environ | {"PYTHONPATH": import_path()}
    environment.pop("FOLOVLLM_MINE", None)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reference.json"
        command = python_command("folovllm.apps.bench.ladder", json.dumps(asked), str(file))
        child = subprocess.run(command, env=environment, stderr=subprocess.PIPE)
        if child.returncode:
            raise RuntimeError(f"the reference's ladder failed: {child.stderr.decode(errors='replace')[-500:].strip()}")
        pairs = zip(load(file).runs, mine.runs, strict=True)
    words = ("reference", "mine")
    mine.runs = [
        replace(run, name=f"{run.name} {word}") for pair in pairs for run, word in zip(pair, words, strict=True)
    ]
    return mine


def show_ladder(result: Result, console: Console | None = None) -> None:
    """Print a row for each milestone. The ratio compares its tokens a second with the first one's."""
    console = console or Console(highlight=False)
    title = f"bench ladder: {workload_line(result.workload)}"
    table = Table("", title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    units = {name: metric.unit for run in result.runs for name, metric in run.metrics.items()}
    agreement = {run.metrics[figures.AGREEMENT].median for run in result.runs if figures.AGREEMENT in run.metrics}
    columns = [name for name in COLUMNS if name in units and not (name == figures.AGREEMENT and agreement == {100})]
    for name in columns:
        table.add_column(f"{COLUMNS[name]}\n{units[name]}", justify="right", no_wrap=True, vertical="bottom")
        if name == RATE:
            table.add_column("", justify="right", style="bold", no_wrap=True)
    for run in result.runs:
        rate, *others = (digits(run.metrics[name].median) if name in run.metrics else "-" for name in columns)
        table.add_row(run.title, rate, ratio(result.runs[0].metrics[RATE], run.metrics[RATE]), *others)
    console.print(table)
    console.print(LEGEND + " All milestones gave the same tokens." * (agreement == {100}), style="dim", markup=False)
    console.print(machine_line(result), style="dim", soft_wrap=True)


if __name__ == "__main__":  # the child process of `beside_reference`
    bench_ladder(*json.loads(sys.argv[1])).save(Path(sys.argv[2]))
