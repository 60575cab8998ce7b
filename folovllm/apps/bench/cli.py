"""`folovllm bench`: the commands. Nothing of the engine is imported before one runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from folovllm.apps.cli.flags import pick, with_flags, writable

if TYPE_CHECKING:
    from folovllm.apps.bench.contenders import Contender
    from folovllm.apps.bench.report import Result

Compare = Annotated[
    str | None,
    typer.Option(help="Presets to run one after the other, say m1,m2:max_num_seqs=8; ratios are to the first."),
]
Geometry = Annotated[
    str | None,
    typer.Option(
        "--random-weights",
        help="A geometry with made-up weights: qwen3-0.6b, -4b, -8b, -30b-a3b or qwen3.5-9b.",
        metavar="NAME",
    ),
]
Limit = Annotated[
    float | None, typer.Option(help="Most seconds for each engine; rates are over what it generated.", min=0)
]
Repeats = Annotated[int, typer.Option(help="Passes; the table shows the median, and their spread.", min=1)]
Requests = Annotated[int | None, typer.Option(help="Only the first so many requests.", min=1)]
Save = Annotated[Path | None, typer.Option("--save", help="Write the result to this JSON file.", callback=writable)]


def add_to(app: typer.Typer) -> None:
    """Add the commands to `app`, as `bench ...`; each has a flag for every field of `EngineConfig`."""
    from folovllm.config import EngineConfig

    bench = typer.Typer(
        no_args_is_help=True, help="Measure the engine; every result is a table and, with --save, a file."
    )
    for command in (throughput, latency, memory, reuse, ladder, serve):
        bench.command()(with_flags(command, EngineConfig))
    bench.command()(compare)
    app.add_typer(bench, name="bench")


def throughput(
    workload: Annotated[
        str, typer.Option(help="default, mixed, nano-vllm, or a file of JSON lines: prompt_len, output_len.")
    ] = "default",
    requests: Requests = None,
    compare: Compare = None,
    limit: Limit = None,
    repeats: Repeats = 1,
    random_weights: Geometry = None,
    save: Save = None,
    **given: Any,
) -> None:
    """Serve a workload: tokens a second, times to first token, memory wasted, share of the roofline."""
    from folovllm.apps.bench.throughput import bench_throughput

    with contenders(given, compare, random_weights) as engines:
        found = bench_throughput(engines, workload, requests, repeats, limit)
    finish(found, save)


def latency(
    compare: Compare = None,
    limit: Limit = None,
    repeats: Repeats = 3,
    random_weights: Geometry = None,
    save: Save = None,
    **given: Any,
) -> None:
    """One request alone, 128 tokens in and 256 out: times to the first token and between tokens."""
    from folovllm.apps.bench.throughput import bench_throughput

    with contenders(given, compare, random_weights) as engines:
        found = bench_throughput(engines, "latency", None, repeats, limit, "latency")
    finish(found, save)


def memory(
    compare: Compare = None,
    slots: Annotated[int, typer.Option(help="The memory, in sequences of max_model_len tokens.", min=1)] = 8,
    requests: Annotated[int, typer.Option(help="How many requests, all there at the start.", min=1)] = 96,
    random_weights: Geometry = None,
    save: Save = None,
    **given: Any,
) -> None:
    """Blocks against slots in the same bytes: sequences in flight, tokens a second, memory that is held and empty."""
    from folovllm.apps.bench.memory import bench_memory

    longest = given.pop("max_model_len", None) or 512
    compare = "m2,m3" if compare is None and given.get("milestone") is None else compare
    with contenders(given, compare, random_weights) as engines:
        found = bench_memory(engines, slots, longest, requests)
    finish(found, save)


def reuse(
    parts: Annotated[list[str] | None, typer.Argument(help="ttft, sharing, gaps; all if left out.")] = None,
    prefix: Annotated[
        int | None, typer.Option(help="Tokens of a shared prefix: 16,000 on a GPU, else 2,000.", min=1)
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of the long prompt that arrives.", min=1)] = 8000,
    requests: Annotated[int | None, typer.Option(help="Requests that share: 256 on a GPU, else 16.", min=1)] = None,
    chunks: Annotated[str, typer.Option(help="Tokens a step while the long prompt arrives.")] = "2048,512,128",
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Count the process's own time: for one thread of a busy machine.")
    ] = False,
    repeats: Repeats = 3,
    random_weights: Geometry = None,
    save: Save = None,
    **given: Any,
) -> None:
    """What a cached prefix saves, and how long a long prompt holds up the others."""
    import time

    from folovllm.apps.bench.reuse import bench_gaps, bench_sharing, bench_ttft
    from folovllm.engine.setup import choose_device

    sizes = tuple(map(int, numbers("--chunks", chunks)))
    clock = time.process_time if cpu_time else time.perf_counter
    with contenders(given, None, random_weights) as [contender]:
        on_gpu = choose_device(contender[1].get("device")).type == "cuda"
        prefix, count = prefix or (16_000 if on_gpu else 2_000), requests or (256 if on_gpu else 16)
        benches = {
            "ttft": lambda: bench_ttft(contender, prefix, repeats, clock),
            "sharing": lambda: bench_sharing(contender, prefix // 4, count, 32, repeats, clock),
            "gaps": lambda: bench_gaps(contender, prompt, sizes, repeats, clock),
        }
        if unknown := set(parts or ()) - set(benches):
            raise ValueError(f"unknown part {min(unknown)!r}: choose of {', '.join(benches)}")
        for part in parts or benches:  # each is shown as soon as it is done
            finish(benches[part](), save and save.with_stem(f"{save.stem}-{part}"))


def ladder(
    upto: Annotated[
        str | None, typer.Option(help="The last milestone: m6, or with --mine the one you started.")
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(help="mixed (what a CPU gets), nano-vllm (a GPU), default, latency, or a file of JSON lines."),
    ] = None,
    requests: Requests = None,
    limit: Limit = 60.0,
    repeats: Repeats = 1,
    random_weights: Geometry = None,
    save: Save = None,
    **given: Any,
) -> None:
    """One workload through every milestone; with --mine, your ladder beside the reference's."""
    from folovllm.apps.bench.ladder import bench_ladder, beside_reference, show_ladder

    if given.pop("milestone", None) is not None:
        raise ValueError("the ladder runs all milestones: say --upto m3, not --milestone m3")
    with contenders(given, None, random_weights) as [(newest, fields)]:
        measure = beside_reference if os.environ.get("FOLOVLLM_MINE") else bench_ladder
        found = measure(newest if upto is None else upto, fields, workload, requests, limit, repeats)
    finish(found, save, show_ladder)


def serve(
    url: Annotated[
        str | None, typer.Option(help="A server that runs; without it, one of our own is started for each preset.")
    ] = None,
    compare: Compare = None,
    workload: Annotated[str, typer.Option(help="mixed, default, nano-vllm, or a file of JSON lines.")] = "mixed",
    requests: Requests = None,
    rates: Annotated[
        str | None, typer.Option(help="Requests a second, one load after the other; by default 1,2,4,8.")
    ] = None,
    clients: Annotated[
        str | None,
        typer.Option(help="In place of rates: so many clients, each of which waits for its answer, say 1,8."),
    ] = None,
    slo: Annotated[str | None, typer.Option(hidden=True)] = None,
    engine_process: Annotated[
        bool | None, typer.Option(help="Our engine in a process of its own; by default where it has a GPU.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="A key that the server knows.")] = None,
    random_weights: Geometry = None,
    save: Save = None,
    **given: Any,
) -> None:
    """Load a server, ours or any with OpenAI's API: TTFT, TPOT, gaps, rate by rate. Ctrl-C keeps the loads before it."""
    from folovllm.apps.bench.serving import Point, own_servers, server_at, sweep
    from folovllm.apps.bench.workload import load_workload

    if slo is not None:
        raise ValueError("--slo is gone, as goodput is no longer counted: leave it out, and read TTFT and TPOT")
    if rates is not None and clients is not None:
        raise ValueError("give --rates or --clients, not both")
    points = [Point(clients=int(count)) for count in numbers("--clients", clients)] if clients else []
    points = points or [Point(rate=rate) for rate in numbers("--rates", rates or "1,2,4,8")]
    load, model = (load_workload(workload, requests), points), given.get("model")
    if url is None:
        with contenders(given, compare, random_weights) as engines:
            found, is_whole = sweep(own_servers(engines, engine_process), *load)
    elif compare or random_weights or any(value not in (None, [], model) for value in given.values()):
        raise ValueError("--url names a server that has its settings: say --model and the load, nothing of the engine")
    else:
        found, is_whole = sweep(server_at(url, model, api_key), *load)
    finish(found, save)
    if not is_whole:
        raise typer.Exit(130)


def numbers(flag: str, text: str) -> list[float]:
    """ "1,2.5" -> [1.0, 2.5]. Raises ValueError for what is no number above 0."""
    with suppress(ValueError):
        found = [float(item) for item in text.split(",")]
        if min(found) > 0:
            return found
    raise ValueError(f"{flag} takes numbers above 0 with commas between them, say 1,2,4, not {text!r}")


def compare(files: Annotated[list[Path], typer.Argument(help="Results that --save wrote.")]) -> None:
    """Show results side by side, as ratios to the first."""
    from folovllm.apps.bench.report import load, show

    results = [load(file) for file in files]
    if any((other.benchmark, other.workload) != (results[0].benchmark, results[0].workload) for other in results):
        raise ValueError("these files are of different benchmarks or workloads: their numbers do not compare")
    for file, result in zip(files, results, strict=True):
        for run in result.runs:
            run.name = f"{file.stem}: {run.name}"
    results[0].runs = [run for result in results for run in result.runs]
    show(results[0])


@contextmanager
def contenders(given: dict[str, Any], compare: str | None, geometry: str | None) -> Iterator[list[Contender]]:
    """Yield name and configuration of each engine to measure: `given` are flags, `compare` milestones, `geometry` a model of random weights.

    Without `compare` it is one: `--milestone`, else the started one, else the latest; both together are a ValueError, as bad
    flags are, before torch is loaded where that is possible. A geometry's files are there until the end of the block.
    """
    from folovllm.apps.bench.contenders import parse_contenders, random_model
    from folovllm.config import LATEST, EngineConfig
    from folovllm.learn.overlay import started_milestone

    fields = {"use_tqdm": False, **pick(given, EngineConfig)}
    milestone = fields.pop("milestone", None)
    if compare is not None and milestone is not None:
        raise ValueError("give --milestone or --compare, not both")
    with tempfile.TemporaryDirectory() as folder:
        if geometry is not None:
            fields = random_model(geometry, Path(folder), fields)
        yield parse_contenders(milestone or started_milestone() or LATEST if compare is None else compare, fields)


def finish(result: Result, save: Path | None, printer: Callable[[Result], None] | None = None) -> None:
    """Print, and write the file; where one of them fails, the other is still done."""
    from folovllm.apps.bench.report import show

    result.describe_here()
    try:
        (printer or show)(result)
    finally:
        if save is not None:
            result.save(save)
