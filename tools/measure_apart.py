"""Prefill apart from decode, one card each, beside one engine: `python tools/measure_apart.py` (two GPUs; `--device cpu` tries it out).

Some clients read long answers while a long prompt arrives every second. Printed for each way to serve: the median, 99th percentile and
worst gap between the tokens of the long answers, and the median time to the first token of the prompts. The ways: one engine on one
card; one engine with two ranks (only with GPUs); prompts on one card and answers on the other. Then how fast K/V travel: a prompt that
the first server has cached and the second has not, against one that the second has, beside what a copy from pinned memory reaches.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

from folovllm.apps.bench.http_load import Reply, Server
from folovllm.apps.bench.serving import VOCABULARY, flags_of, serving
from folovllm.apps.bench.workload import BenchRequest
from folovllm.config import EngineConfig
from folovllm.distributed.children import import_path, python_command
from folovllm.engine.setup import set_up
from tools.gpu import link_rates, parser_of, print_row, random_weights

SECRET = secrets.token_hex()
TOKENS_WITH_TEXT = 4096  # of the embedded model's tokenizer
QUIET = 2.0  # seconds until the first prompt comes


def prompt_of(rng: random.Random, length: int) -> list[int]:
    """A prompt that nobody has asked before."""
    return [rng.randrange(VOCABULARY // 2, VOCABULARY) for _ in range(length)]


@contextmanager
def server(fields: dict[str, Any], card: str, *flags: str) -> Iterator[Server]:
    """A server of ours that sees these cards alone."""
    rest = dict(fields)
    command = [*python_command("folovllm", "serve", rest.pop("model")), "--port", "0", "--served-model-name", "model"]
    environment = {"PYTHONPATH": import_path(), "CUDA_VISIBLE_DEVICES": card, "FOLOVLLM_PEER_SECRET": SECRET}
    with serving([*command, *flags_of(rest), *flags], env=os.environ | environment) as url:
        yield Server(url, "model")


def free_address() -> str:
    """An address where a peer may listen."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


async def load(target: Server, args: argparse.Namespace) -> None:
    """Long answers beside prompts; prints what their clients saw."""
    rng, prompts, answers = random.Random(1), list[Reply](), list[Reply]()

    async def ask(num_tokens: int, answer: int, replies: list[Reply]) -> None:
        await target.ask(BenchRequest(prompt_of(rng, num_tokens), answer), 0.0, replies)

    await ask(args.prompt_tokens, 2, [])  # warms up
    reading = [asyncio.create_task(ask(32, args.max_model_len - 64, answers)) for _ in range(args.clients)]
    await asyncio.sleep(QUIET)
    now = asyncio.get_running_loop().time
    begin, asking = now(), []
    for i in range(args.seconds):
        await asyncio.sleep(max(0.0, begin + i - now()))
        asking.append(asyncio.create_task(ask(args.prompt_tokens, 1, prompts)))
    await asyncio.sleep(1)
    end = now()
    for task in reading:
        task.cancel()
    await asyncio.wait([*reading, *asking])
    if errors := [reply.error for reply in (*prompts, *answers) if reply.error]:
        print(f"   {len(errors)} failed: {errors[0]}")
    pairs = (pair for reply in answers for pair in pairwise(reply.times))
    gaps = sorted(1e3 * (after - before) for before, after in pairs if begin <= before <= end)
    first = [1e3 * reply.ttft for reply in prompts if reply.times]
    if not gaps or not first:
        print("   nothing was answered: give longer contexts, or fewer prompts")
        return
    print_row("", "median gap, ms", "99%", "worst", "gaps", "first token")
    print_row("", median(gaps), gaps[len(gaps) * 99 // 100], gaps[-1], len(gaps), median(first))


async def transfer(prefill: Server, decode: Server, args: argparse.Namespace, num_bytes: int) -> None:
    """Print how fast K/V travel: what a prompt takes longer if its K/V must come."""
    rng, coming, here = random.Random(2), list[Reply](), list[Reply]()
    for _ in range(5):
        request = BenchRequest(prompt_of(rng, args.prompt_tokens), 1)
        for target, replies in ((prefill, []), (decode, coming), (decode, here)):
            await target.ask(request, 0.0, replies)
    seconds = median(reply.ttft for reply in coming) - median(reply.ttft for reply in here)
    print_row("", "MB of a prompt", "ms", "GB/s", "a copy, GB/s")
    copy = link_rates(256 << 20)[0]
    print_row("", num_bytes / 1e6, 1e3 * seconds, num_bytes / max(1e-6, seconds) / 1e9, copy / 1e9)


def main() -> None:
    """Load each way to serve, then time transfers."""
    parser = parser_of(__doc__, "qwen3-0.6b")  # on a CPU the embedded model
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--clients", type=int, default=16, help="that read long answers")
    parser.add_argument("--seconds", type=int, default=20, help="and as many prompts")
    parser.add_argument("--ways", default="one,ranks,apart")
    args = parser.parse_args()
    on_gpu, ways = args.device == "cuda", args.ways.split(",")
    common = {"max_model_len": args.max_model_len, "block_size": 16, "device": args.device}
    # A client sees text alone, so each token must have some.
    with random_weights(args.geometry, {"vocab_size": TOKENS_WITH_TEXT}, **common) as random_model:
        fields = random_model if on_gpu else common | {"model": "stories-5m"}
        setup = set_up(EngineConfig(**fields))
        num_bytes = (args.prompt_tokens - 1) // setup.block_size * setup.block_size * setup.kv_bytes_per_token
        alone = {"one": (fields, "0"), "ranks": (fields | {"tensor_parallel_size": 2}, "0,1")}
        for way, (its, cards) in alone.items():
            if way in ways and (on_gpu or way == "one"):
                print(f"one engine on card {cards}")
                with server(its, cards) as target:
                    asyncio.run(load(target, args))
        if "apart" in ways:
            print("prompts on one card, answers on the other")
            peer = free_address()
            with (
                server(fields, "0", "--role", "prefill", "--peer", peer) as prefill,
                server(fields, "1", "--role", "decode", "--peer", peer) as decode,
            ):
                asyncio.run(load(decode, args))
                asyncio.run(transfer(prefill, decode, args, num_bytes))


if __name__ == "__main__":
    main()
