"""What offloading brings and costs on a GPU, over random weights: `python tools/measure_offload.py [--geometries qwen3-0.6b qwen3-8b]`.

Prints, for each geometry: the rate of a pinned copy; that of the copy of a prefix's blocks alone, and whether the bytes that come back are those
that left; the time to the first token of an 8,000-token prefix, computed and from host memory; and the throughput of requests
whose cache evicts nothing, without and with `kv_offload`.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from folovllm.apps.bench.contenders import random_model
from folovllm.config import EngineConfig
from folovllm.electives.kv_transfer.store import STORE, BlockStore
from folovllm.engine.events import BlocksMoved, Event
from folovllm.engine.llm_engine import LLMEngine, make_engine
from folovllm.sampling_params import SamplingParams

PREFIX, VOCAB = 8_000, 100_000
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, VOCAB) for _ in range(length)]


def store_of(worker: Any) -> BlockStore:
    """A worker's store."""
    store: BlockStore = worker.state[STORE]
    return store


def link_rates(num_bytes: int = 1 << 29) -> tuple[float, float]:
    """Bytes a second of one pinned copy to the card, and from it."""
    host, card = (
        torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True),
        torch.empty(num_bytes, dtype=torch.uint8, device="cuda"),
    )
    rates = []
    for target, source in ((card, host), (host, card)):
        times = [seconds_on_card(lambda t=target, s=source: t.copy_(s, non_blocking=True)) for _ in range(6)]
        rates.append(num_bytes / min(times))
    return rates[0], rates[1]


def seconds_on_card(work: Any) -> float:
    """The time from the start of `work` to the end of all that it queues, on any stream."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def copies_alone(engine: LLMEngine, count: int) -> tuple[float, float]:
    """Bytes a second at which `count` blocks come and leave, with nothing else on the card. Their slots are then as they were."""
    (store,) = engine.executor.collective_rpc(store_of)
    copies = store._copies
    assert copies is not None
    numbers = list(range(min(count, len(store.host))))
    num_bytes = len(numbers) * store.block_bytes

    def leave() -> None:
        for i in range(0, len(numbers), copies.room):
            copies.gather(numbers[i : i + copies.room])
            copies.send(numbers[i : i + copies.room])

    out = min(seconds_on_card(leave) for _ in range(5))
    into = min(seconds_on_card(lambda: copies.load(numbers, numbers)) for _ in range(5))
    return num_bytes / into, num_bytes / out


def blocks_by_hash(engine: LLMEngine, hashes: list[int]) -> dict[int, torch.Tensor]:
    """Copies of cached blocks."""
    kv: Any = engine.scheduler.kv
    (store,) = engine.executor.collective_rpc(store_of)
    found = {block.hash: block.block_id for block in kv.blocks if block.hash is not None}
    return {hash_: store.cache[:, found[hash_]].clone() for hash_ in hashes if hash_ in found}


def blocks_moved(events: Sequence[Event]) -> dict[str, int]:
    """How many blocks of each kind moved."""
    counts = Counter[str]()
    for event in events:
        if isinstance(event, BlocksMoved):
            counts[f"{event.what}_{event.place}"] += event.num_blocks
    return counts


def first_token(engine: LLMEngine, tokens: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens of the prompt were cached."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.add_request("0", tokens, ONE, stream=False)
    while not (outputs := engine.step()):
        pass
    return time.perf_counter() - start, outputs[0].num_cached_tokens


def throughput(engine: LLMEngine, count: int, round_: int) -> float:
    """Tokens a second of `count` requests of 256 and 128 tokens; what they leave in the cache is forgotten, so nothing is ever evicted."""
    params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    prompts = [prompt(1000 * round_ + i, 256) for i in range(count)]
    start = time.perf_counter()
    for i, tokens in enumerate(prompts):
        engine.add_request(str(i), tokens, params, stream=False)
    while engine.has_unfinished_requests():
        engine.step()
    taken = time.perf_counter() - start
    engine.reset_prefix_cache()
    return count * 128 / taken


def measure_prefix(model: dict[str, Any], gib: int) -> None:
    """Print the rates and the times to the first token."""
    fields = model | {"max_model_len": 8_192}
    engine = make_engine(EngineConfig(**fields, num_kv_blocks=1_100, kv_offload=f"{gib}GiB"))
    connector: Any = engine.scheduler.connector  # type: ignore[attr-defined]
    size, per_block = engine.setup.block_size, connector._block_bytes
    num_blocks = PREFIX // size
    to_card, from_card = link_rates()
    into, out = copies_alone(engine, num_blocks)
    print(f"  link, pinned copy:   to the card {to_card / 1e9:6.1f} GB/s, from it {from_card / 1e9:6.1f} GB/s")
    print(
        f"  the blocks' copy:    to the card {into / 1e9:6.1f} GB/s ({into / to_card:.0%}), from it {out / 1e9:6.1f} GB/s ({out / from_card:.0%})"
    )
    for seed in range(50, 53):  # kernels are compiled
        first_token(engine, prompt(seed, PREFIX + 17))
    kv: Any = engine.scheduler.kv
    moved: Counter[str] = Counter()
    engine.subscribe(lambda events: moved.update(blocks_moved(events)))
    computed, loaded, equal = [], [], True
    for seed in range(5):
        tokens = prompt(seed, PREFIX + 17)
        seconds, cached = first_token(engine, tokens)
        assert cached == 0, cached
        computed.append(seconds)
        names = [block.hash for block in kv.blocks if block.hash is not None]
        before = blocks_by_hash(engine, names)
        for other in range(3):
            first_token(engine, prompt(100 + 10 * seed + other, PREFIX + 17))
        time.sleep(0.1)
        seconds, cached = first_token(engine, tokens)
        print(
            f"    round {seed}: computed {computed[-1] * 1e3:.1f} ms; {cached} tokens came back in {seconds * 1e3:.1f} ms"
        )
        loaded.append(seconds)
        after = blocks_by_hash(engine, list(before))
        assert cached >= PREFIX - size, cached
        equal &= all(torch.equal(before[hash_], tensor) for hash_, tensor in after.items())
    bound = num_blocks * per_block / to_card
    ratio = median(computed) / median(loaded)
    print(
        f"  first token of {PREFIX:,} tokens: computed {median(computed) * 1e3:.1f} ms, from host memory {median(loaded) * 1e3:.1f} ms ({ratio:.2f} times);"
    )
    print(
        f"    its {num_blocks * per_block / 1e6:,.0f} MB over the link take {bound * 1e3:.1f} ms; bytes are {'equal' if equal else 'NOT EQUAL'}"
    )
    print(
        f"    the engine thinks: {connector.compute_rate:,.0f} tokens/s computed, {connector.rates['host'] / 1e9:.1f} GB/s from the host; {dict(moved)}"
    )
    engine.close()


def measure_loss(model: dict[str, Any], gib: int, count: int, rounds: int = 5) -> None:
    """Print the throughput without and with offloading, where nothing is evicted. Rounds alternate between two engines."""
    fields = model | {"max_model_len": 1_024, "max_num_seqs": 256, "num_kv_blocks": 25 * count}
    engines = [make_engine(EngineConfig(**fields, **more)) for more in ({}, {"kv_offload": f"{gib}GiB"})]
    rates: list[list[float]] = [[], []]
    for round_ in range(rounds + 1):
        for own, engine in zip(rates, engines, strict=True):
            own.append(throughput(engine, count, round_))
    plain, with_it = (max(own[1:]) for own in rates)
    print(
        f"  nothing is evicted:  {plain:,.0f} tokens/s without, {with_it:,.0f} with kv_offload ({with_it / plain - 1:+.2%}; medians {median(rates[1][1:]) / median(rates[0][1:]) - 1:+.2%})"
    )
    for engine in engines:
        engine.close()


def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--geometries", nargs="+", default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--gib", type=int, default=8, help="host memory")
    parser.add_argument("--count", type=int, default=256, help="requests of the throughput")
    asked = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {asked.gib} GiB of host memory")
    for name in asked.geometries:
        with tempfile.TemporaryDirectory() as folder:
            print(name)
            model = random_model(name, Path(folder), {"dtype": "bfloat16", "use_tqdm": False})
            measure_prefix(model, asked.gib)
            measure_loss(model, asked.gib, asked.count)


if __name__ == "__main__":
    main()
