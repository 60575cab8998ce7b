"""What offloading brings and costs on a GPU, over random weights: `python tools/measure_offload.py [--geometries qwen3-0.6b qwen3-8b]`.

Prints, for each geometry: the rate of a pinned copy; that of the copy of a prefix's blocks alone, and whether the bytes that come back are those
that left; the time to the first token of an 8,000-token prefix, computed and from host memory; and the throughput of requests
whose cache evicts nothing, without and with `kv_offload`.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch

from folovllm.apps.bench.serve import exactly, run_workload, running
from folovllm.apps.bench.workload import BenchRequest, Workload
from folovllm.config import EngineConfig
from folovllm.electives.kv_transfer.store import STORE, BlockStore
from folovllm.engine.llm_engine import LLMEngine
from tools.gpu import in_turns, link_rates, parser_of, print_row, random_weights, seconds_of

PREFIX, VOCAB, ROUNDS = 8_000, 100_000, 5


def prompt(seed: int, length: int = PREFIX + 17) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, VOCAB) for _ in range(length)]


def store_of(engine: LLMEngine) -> BlockStore:
    """The store of an engine's one worker."""
    (store,) = engine.executor.collective_rpc(lambda worker: worker.state[STORE])
    return store  # type: ignore[no-any-return]


def copies_alone(engine: LLMEngine, count: int) -> tuple[float, float]:
    """Bytes a second at which `count` blocks come and leave, with nothing else on the card. Their slots are then as they were."""
    store = store_of(engine)
    copies = store.copies
    numbers = list(range(min(count, len(store.host))))

    def leave() -> None:
        for i in range(0, len(numbers), copies.room):
            copies.gather(numbers[i : i + copies.room])
            copies.send(numbers[i : i + copies.room], [])
        copies.wait_for(numbers)

    num_bytes, ways = len(numbers) * store.host[0].nbytes, (lambda: copies.load(numbers, numbers), leave)
    into, out = (num_bytes / min(seconds_of(way) for _ in range(5)) for way in ways)
    return into, out


def cached_blocks(engine: LLMEngine) -> dict[int, torch.Tensor]:
    """Copies of the blocks that have a hash, by it."""
    kv: Any = engine.scheduler.kv
    store = store_of(engine)
    return {block.hash: store.cache[:, block.block_id].clone() for block in kv.blocks if block.hash is not None}


def first_token(engine: LLMEngine, tokens: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens of the prompt were cached."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.add_request("0", tokens, exactly(1), stream=False)
    while not (outputs := engine.step()):
        pass
    return time.perf_counter() - start, outputs[0].num_cached_tokens


def rounds_of_prefixes(engine: LLMEngine) -> tuple[float, float, bool]:
    """Seconds to the first token, computed and with the prefix from host memory: medians; and whether the same bytes came back."""
    for seed in range(50, 53):  # kernels are compiled
        first_token(engine, prompt(seed))
    times, equal = [], True
    for seed in range(ROUNDS):
        computed, cached = first_token(engine, prompt(seed))
        assert cached == 0, cached
        before = cached_blocks(engine)
        for other in range(3):  # they evict it
            first_token(engine, prompt(100 + 10 * seed + other))
        time.sleep(0.1)
        loaded, cached = first_token(engine, prompt(seed))
        assert cached >= PREFIX - engine.setup.block_size, cached
        after = cached_blocks(engine)
        equal &= all(torch.equal(before[hash_], after[hash_]) for hash_ in before.keys() & after.keys())
        times.append((computed, loaded))
        print_row(f"  round {seed}, ms computed, loaded", 1e3 * computed, 1e3 * loaded)
    computed, loaded = (median(each) for each in zip(*times, strict=True))
    return computed, loaded, equal


def measure_prefix(model: dict[str, Any], gib: int) -> None:
    """Print the rates and the times to the first token."""
    config = EngineConfig(**model, max_model_len=8_192, num_kv_blocks=1_100, kv_offload=f"{gib}GiB")
    with running(config) as engine:
        connector: Any = engine.scheduler.connector  # type: ignore[attr-defined]
        num_blocks = PREFIX // engine.setup.block_size
        num_bytes, links, copies = num_blocks * connector._block_bytes, link_rates(), copies_alone(engine, num_blocks)
        print_row("  GB/s", "to the card", "from it")
        for name, rates in (("  link, pinned copy", links), ("  the blocks' copy", copies)):
            print_row(name, *(rate / 1e9 for rate in rates))
        print_row("  of the link", *(f"{own / link:.0%}" for own, link in zip(copies, links, strict=True)))
        computed, loaded, equal = rounds_of_prefixes(engine)
        print_row(
            f"  first token of {PREFIX:,} tokens", "ms computed", "from the host", "ratio", "its MB", "ms on the link"
        )
        print_row("", 1e3 * computed, 1e3 * loaded, computed / loaded, num_bytes / 1e6, 1e3 * num_bytes / links[0])
        host = connector.rates["host"] / 1e9
        print(f"  the engine thinks: {connector.compute_rate:,.0f} tokens/s computed, {host:.1f} GB/s from the host")
        print(f"  bytes are {'equal' if equal else 'NOT EQUAL'}")


def measure_loss(model: dict[str, Any], gib: int, count: int) -> None:
    """Print the throughput without and with offloading, where nothing is evicted. Rounds alternate between two engines."""
    fields = model | {"max_model_len": 1_024, "max_num_seqs": 256, "num_kv_blocks": 25 * count}
    rates: list[list[float]] = [[], []]
    with ExitStack() as stack:
        configs = [EngineConfig(**fields, **more) for more in ({}, {"kv_offload": f"{gib}GiB"})]
        engines = [stack.enter_context(running(config)) for config in configs]
        for number, which in in_turns([0, 1], ROUNDS + 1):
            load = Workload("w", [BenchRequest(prompt(1000 * number + i, 256), 128) for i in range(count)])
            rates[which].append(run_workload(engines[which], load).tokens_per_second)
            engines[which].reset_prefix_cache()  # so nothing is ever evicted
    for of in (max, median):
        plain, offloading = (of(own[1:]) for own in rates)
        change = f"{offloading / plain - 1:+.2%}"
        print_row(f"  nothing is evicted, {of.__name__}, tokens/s", plain, offloading, change)


def main() -> None:
    """Print all of it."""
    parser = parser_of(__doc__)
    parser.add_argument("--geometries", nargs="+", default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--gib", type=int, default=8, help="host memory")
    parser.add_argument("--count", type=int, default=256, help="requests of the throughput")
    asked = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {asked.gib} GiB of host memory")
    for name in asked.geometries:
        print(name)
        with random_weights(name, dtype="bfloat16") as model:
            measure_prefix(model, asked.gib)
            measure_loss(model, asked.gib, asked.count)


if __name__ == "__main__":
    main()
