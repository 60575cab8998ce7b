"""The figures and pictures of the chapter on serving: `python tools/chapter_x1.py [streams | load] ...`.

A live engine in a thread, clients beside it. Its scheduler, cache, loop and streams are the real ones; its device draws
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from measure_server import MadeUpTokens, PendingTokens

import folovllm.build
from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine
from folovllm.sampling_params import RequestOutputKind, SamplingParams
from folovllm.server.async_engine import AsyncEngine
from folovllm.server.transport import ThreadTransport
from folovllm.step.schedule import SchedulerOutput

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data" / "x1_serving_cpu.json"
IMAGES = ROOT / "docs" / "img"
TTFT_BOUND, ITL_BOUND = 0.5, 0.04  # seconds: what counts as good
STEP, TOKEN = 0.02, 0.00005  # seconds that a step of the device takes, and each token in it


class Device(MadeUpTokens):
    """One that is slower the more tokens a step has."""

    def submit(self, output: SchedulerOutput) -> PendingTokens:
        """As inherited."""
        self.seconds = STEP + TOKEN * sum(scheduled.num_new_tokens for scheduled in output.scheduled_seqs)
        return super().submit(output)


def make_engine_on_device(config: EngineConfig) -> LLMEngine:
    """An engine on it."""
    folovllm.build.make_executor = Device  # type: ignore[assignment]
    return folovllm.build.make_engine(config)


@dataclass
class Seen:
    """One request, as its client saw it; seconds since the beginning of all."""

    sent: float
    pieces: list[tuple[float, int]] = field(default_factory=list)  # when, tokens
    is_refused: bool = False

    @property
    def ttft(self) -> float:
        return self.pieces[0][0] - self.sent

    @property
    def itl(self) -> float:
        """The mean time between two tokens."""
        tokens = sum(count for _, count in self.pieces)
        return (self.pieces[-1][0] - self.pieces[0][0]) / max(1, tokens - self.pieces[0][1])

    @property
    def is_good(self) -> bool:
        return not self.is_refused and self.ttft <= TTFT_BOUND and self.itl <= ITL_BOUND


async def ask(engine: AsyncEngine, prompt: list[int], count: int, clock: Callable[[], float], limit: int = 0) -> Seen:
    """One client: refused at once where `limit` requests wait already."""
    seen = Seen(clock())
    if limit and engine.num_queued >= limit:
        seen.is_refused = True
        return seen
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    async for output in engine.generate(prompt, params):
        seen.pieces.append((clock(), len(output.outputs[0].token_ids)))
    return seen


def prompt_of(length: int, number: int) -> list[int]:
    return random.Random(number).choices(range(3, 4000), k=length)


def clock_from_now() -> Callable[[], float]:
    start = time.perf_counter()
    return lambda: time.perf_counter() - start


async def streams() -> dict[str, Any]:
    """Six clients that come when they like, one of them with a long prompt."""
    plan = [(0.00, 8, 60), (0.05, 8, 45), (0.12, 40, 40), (0.20, 900, 25), (0.26, 8, 15), (0.40, 8, 25)]
    config = EngineConfig(max_num_seqs=16, max_num_batched_tokens=256, use_tqdm=False)
    async with AsyncEngine(config, transport=ThreadTransport(make_engine_on_device)) as engine:
        clock, sizes = clock_from_now(), []
        take_in = engine._process_outputs

        def note(step: Any) -> None:
            sizes.append((clock(), sum(len(delta.token_ids) for delta in step.deltas), step.stats.num_waiting))
            take_in(step)

        engine._process_outputs = note  # type: ignore[method-assign]

        async def client(i: int, at: float, length: int, count: int) -> Seen:
            await asyncio.sleep(at)
            return await ask(engine, prompt_of(length, i), count, clock)

        seen = await asyncio.gather(*(client(i, *each) for i, each in enumerate(plan)))
    return {"plan": plan, "clients": [{"sent": s.sent, "pieces": s.pieces} for s in seen], "steps": sizes}


async def load(seconds: float = 12.0) -> dict[str, Any]:
    """Poisson arrivals at several rates, with a queue that takes everybody, and with one that holds 8."""
    points = []
    # Without a prefix cache: both queues get the same prompts.
    config = EngineConfig(max_num_seqs=16, max_num_batched_tokens=256, enable_prefix_caching=False, use_tqdm=False)
    async with AsyncEngine(config, transport=ThreadTransport(make_engine_on_device)) as engine:
        for rate in (6, 10, 14, 16, 18, 20, 25, 30):
            for limit in (0, 8):
                clock, rng, clients, at = clock_from_now(), random.Random(rate), [], 0.0
                while (at := at + rng.expovariate(rate)) < seconds:
                    await asyncio.sleep(max(0.0, at - clock()))
                    prompt = prompt_of(rng.randint(16, 112), rng.randrange(1 << 30))
                    clients.append(asyncio.create_task(ask(engine, prompt, rng.randint(16, 64), clock, limit)))
                seen = await asyncio.gather(*clients)
                points.append({"rate": rate, "limit": limit, **summary(seen, seconds)})
                print(points[-1], flush=True)
    return {"seconds": seconds, "ttft_bound": TTFT_BOUND, "itl_bound": ITL_BOUND, "points": points}


def summary(seen: list[Seen], seconds: float) -> dict[str, float]:
    """What the clients of one rate saw."""
    served = [s for s in seen if not s.is_refused]
    ttfts, itls = sorted(s.ttft for s in served), sorted(s.itl for s in served)
    return {
        "sent": len(seen) / seconds, "refused": sum(s.is_refused for s in seen) / seconds,
        "goodput": sum(s.is_good for s in seen) / seconds,
        "ttft_50": statistics.median(ttfts), "ttft_99": ttfts[int(0.99 * len(ttfts))],
        "itl_50": statistics.median(itls), "itl_99": itls[int(0.99 * len(itls))],
    }  # fmt: skip


def draw_streams(data: dict[str, Any]) -> None:
    """Who gets tokens when, and how many took part in each step."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 4.6), sharex=True, height_ratios=[3, 1])
    for i, client in enumerate(data["clients"]):
        times = [at for at, _ in client["pieces"]]
        top.plot(
            [client["sent"], times[0]],
            [-i, -i],
            color="tab:red",
            lw=2,
            label="waits for its first token" if not i else None,
        )
        top.plot([times[0], times[-1]], [-i, -i], color="lightgrey", lw=1, zorder=0)
        top.plot(times, [-i] * len(times), "|", color="tab:blue", ms=11, label="a token comes" if not i else None)
    names = [f"client {i}, prompt of {length}" for i, (_, length, _) in enumerate(data["plan"])]
    top.set(
        yticks=range(0, -len(names), -1), yticklabels=names, title="six clients of one engine, as each of them sees it"
    )
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
