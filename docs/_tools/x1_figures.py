"""The figures and pictures of the chapter on serving: `python docs/_tools/x1_figures.py [streams | load] ...`.

A live engine in a thread, clients beside it. Its scheduler, cache, loop and streams are the real ones; its device samples
made-up tokens after a time that depends on the step, so that a busy machine does not count. Figures go to
docs/data/x1_serving_cpu.json, pictures to docs/img/; without an argument the pictures are drawn anew.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from folovllm import build  # noqa: E402
from folovllm.apps.bench.http_load import Reply  # noqa: E402
from folovllm.apps.bench.serving import Point, drive  # noqa: E402
from folovllm.apps.bench.workload import BenchRequest  # noqa: E402
from folovllm.config import EngineConfig  # noqa: E402
from folovllm.electives.server.async_engine import AsyncEngine  # noqa: E402
from folovllm.electives.server.transport import ThreadEngineClient  # noqa: E402
from folovllm.engine.llm_engine import LLMEngine, make_engine  # noqa: E402
from folovllm.engine.setup import EngineSetup  # noqa: E402
from folovllm.executor.packed_executor import PackedExecutor  # noqa: E402
from folovllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: E402
from folovllm.step.bitmasks import TokenBitmasks  # noqa: E402
from folovllm.step.packed import Field, PackedStep  # noqa: E402
from folovllm.step.schedule import SchedulerOutput, StepResult  # noqa: E402

DATA = ROOT / "docs" / "data" / "x1_serving_cpu.json"
IMAGES = ROOT / "docs" / "img"
TTFT_BOUND, TPOT_BOUND = 0.5, 0.04  # seconds: what counts as good
STEP, TOKEN = 0.02, 0.00005  # seconds that a step of the device takes, and each token in it
SECONDS = 12  # of arrivals
RATES, LIMITS = (6, 10, 14, 16, 18, 20, 25, 30), (0, 8)


class Sampled:
    """A step that ends at a time of the monotonic clock."""

    def __init__(self, num_samples: list[int], die: random.Random, end: float) -> None:
        self._num_samples, self._die, self._end = num_samples, die, end

    def wait(self) -> StepResult:
        """Return one token for each sequence that samples; no draft token is accepted."""
        time.sleep(max(0.0, self._end - time.monotonic()))
        tokens = iter(self._die.choices(range(300, 4000), k=len(self._num_samples)))
        return StepResult([[token] if n else [] for token, n in zip(tokens, self._num_samples, strict=True)], {})


class Device(PackedExecutor):
    """Packs steps as for a device, and samples from a die. A step takes the longer the more tokens it has."""

    def __init__(self, setup: EngineSetup, extension: object) -> None:
        widths = [1, 2, 4, *range(8, setup.max_num_seqs + 8, 8)]
        super().__init__(setup.max_num_seqs, setup.max_num_seqs * -(-setup.max_model_len // setup.block_size), widths)
        self._die, self._free_at, self._seconds = random.Random(0), 0.0, 0.0

    def shutdown(self) -> None: ...

    def collective_rpc(self, function: Any, *arguments: Any) -> list[Any]:
        return []

    def submit(self, output: SchedulerOutput) -> Sampled:
        self._seconds = STEP + TOKEN * sum(scheduled.num_new_tokens for scheduled in output.scheduled_seqs)
        return super().submit(output)

    def _send(self, step: PackedStep | TokenBitmasks) -> Sampled:
        assert isinstance(step, PackedStep)
        step.flatten()
        self._free_at = max(self._free_at, time.monotonic()) + self._seconds  # steps follow each other on the device
        return Sampled(step.fields[Field.NUM_SAMPLES, : step.num_seqs].tolist(), self._die, self._free_at)


def engine_over_device(config: EngineConfig) -> LLMEngine:
    """An engine as `make_engine` makes it, but for the device."""
    with patch.object(build, "make_executor", Device):
        return make_engine(config)


def engine(**fields: Any) -> AsyncEngine:
    """An engine over it, in a thread."""
    config = EngineConfig(max_num_seqs=16, max_num_batched_tokens=256, use_tqdm=False, **fields)
    return AsyncEngine(config, transport=ThreadEngineClient(engine_over_device))


async def ask(engine: AsyncEngine, replies: list[Reply], limit: int, request: BenchRequest) -> None:
    """One client: refused at once where `limit` requests wait already."""
    clock = asyncio.get_running_loop().time
    replies.append(reply := Reply(clock()))
    if limit and engine.num_queued >= limit:
        reply.error = "refused"
        return
    delta = {"ignore_eos": True, "output_kind": RequestOutputKind.DELTA}
    async for output in engine.generate(
        request.prompt, SamplingParams(temperature=0, max_tokens=request.output_len, **delta)
    ):
        reply.times.append(clock())
        reply.num_tokens += len(output.outputs[0].token_ids)


def prompt_of(length: int, number: int) -> list[int]:
    return random.Random(number).choices(range(3, 4000), k=length)


async def streams() -> dict[str, Any]:
    """Six clients that come when they like, one of them with a long prompt."""
    plan = [(0.00, 8, 60), (0.05, 8, 45), (0.12, 40, 40), (0.20, 900, 25), (0.26, 8, 15), (0.40, 8, 25)]
    replies: list[Reply] = []
    async with engine() as live:
        start, sizes, process = asyncio.get_running_loop().time(), [], live._process_outputs
        clock = asyncio.get_running_loop().time

        def recorded(step: Any) -> None:
            sizes.append((clock() - start, sum(len(delta.token_ids) for delta in step.deltas), step.stats.num_waiting))
            process(step)

        live._process_outputs = recorded  # type: ignore[method-assign]

        async def client(i: int, at: float, length: int, count: int) -> None:
            await asyncio.sleep(at)
            await ask(live, replies, 0, BenchRequest(prompt_of(length, i), count))

        await asyncio.gather(*(client(i, *each) for i, each in enumerate(plan)))
    clients = [{"sent": r.begin - start, "pieces": [(time - start, 1) for time in r.times]} for r in replies]
    return {"plan": plan, "clients": clients, "steps": sizes}


async def load() -> dict[str, Any]:
    """Poisson arrivals at several rates, with a queue that takes everybody, and with one that holds 8."""
    points = []
    async with engine(enable_prefix_caching=False) as live:  # both queues get the same prompts
        for rate in RATES:
            for limit in LIMITS:
                rng, replies = random.Random(rate), list[Reply]()
                requests = [
                    BenchRequest(prompt_of(rng.randint(16, 112), rng.randrange(1 << 30)), rng.randint(16, 64))
                    for _ in range(rate * SECONDS)
                ]
                await drive(requests, Point(rate=rate), partial(ask, live, replies, limit))
                points.append({"rate": rate, "limit": limit, **summary(replies)})
                print(points[-1], flush=True)
    return {"seconds": SECONDS, "ttft_bound": TTFT_BOUND, "itl_bound": TPOT_BOUND, "points": points}


def summary(replies: list[Reply]) -> dict[str, float]:
    """What the clients of one rate saw."""
    served = [reply for reply in replies if reply.error is None]
    found = {
        "sent": len(replies),
        "refused": len(replies) - len(served),
        "goodput": sum(reply.ttft <= TTFT_BOUND and reply.tpot <= TPOT_BOUND for reply in served),
    }
    found = {name: count / SECONDS for name, count in found.items()}
    for name, times in (("ttft", sorted(r.ttft for r in served)), ("itl", sorted(r.tpot for r in served))):
        found |= {f"{name}_50": statistics.median(times), f"{name}_99": times[int(0.99 * len(times))]}
    return found


def draw_streams(data: dict[str, Any]) -> None:
    """Who gets tokens when, and how many took part in each step."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 4.6), sharex=True, height_ratios=[3, 1])
    for i, client in enumerate(data["clients"]):
        times = [at for at, _ in client["pieces"]]
        waits, comes = ("waits for its first token", "a token comes") if not i else (None, None)
        top.plot([client["sent"], times[0]], [-i, -i], color="tab:red", lw=2, label=waits)
        top.plot([times[0], times[-1]], [-i, -i], color="lightgrey", lw=1, zorder=0)
        top.plot(times, [-i] * len(times), "|", color="tab:blue", ms=11, label=comes)
    names = [f"client {i}, prompt of {length}" for i, (_, length, _) in enumerate(data["plan"])]
    top.set(yticks=range(0, -len(names), -1), yticklabels=names)
    top.set(title="six clients of one engine, as each of them sees it")
    top.legend(frameon=False, loc="lower right", fontsize=8)
    top.tick_params(length=0)
    at, sizes = zip(*[(t, n) for t, n, _ in data["steps"]], strict=True)
    bottom.step(at, sizes, where="post", color="tab:blue")
    bottom.set(xlabel="seconds", ylabel="tokens\nof a step", ylim=0)
    save(figure, "x1_outside")


def draw_load(data: dict[str, Any]) -> None:
    """Times and goodput against the rate of requests, without and with a bound on the queue."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.1))
    for limit, colour, name in ((0, "tab:red", "takes everybody"), (8, "tab:blue", "queue holds 8")):
        points = [p for p in data["points"] if p["limit"] == limit]
        rates = [p["rate"] for p in points]
        axes[0].plot(rates, [p["ttft_99"] for p in points], "o-", color=colour, label=name)
        axes[1].plot(rates, [1e3 * p["itl_99"] for p in points], "o-", color=colour)
        axes[2].plot(rates, [p["goodput"] for p in points], "o-", color=colour)
    axes[0].axhline(data["ttft_bound"], color="grey", ls=":")
    axes[0].set(yscale="log", ylabel="s", title="time to first token, 99%")
    axes[0].legend(frameon=False, fontsize=8)
    axes[1].axhline(1e3 * data["itl_bound"], color="grey", ls=":")
    axes[1].set(ylabel="ms", title="time between tokens, 99%", ylim=0)
    axes[2].plot(rates, rates, color="lightgrey", zorder=0)
    axes[2].set(ylabel="good requests/s", title="goodput", ylim=0)
    for each in axes:
        each.set(xlabel="requests/s")
    save(figure, "x1_load")


def save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(IMAGES / f"{name}.png", dpi=100)
    plt.close(figure)


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
    data = json.loads(DATA.read_text()) if DATA.is_file() else {}
    for name in arguments:
        data[name] = asyncio.run({"streams": streams, "load": load}[name]())
        DATA.write_text(json.dumps(data) + "\n")
    draw_streams(data["streams"])
    draw_load(data["load"])


if __name__ == "__main__":
    main(sys.argv[1:])
