"""Engines whose cache holds little, and requests that push each other out of it."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from folovllm.config import EngineConfig
from folovllm.electives.kv_transfer.store import BlockStore, ConnectorMetadata
from folovllm.engine.events import BlocksMoved, Event
from folovllm.engine.llm_engine import LLMEngine
from folovllm.engine.llm_engine import make_engine as make_any_engine
from folovllm.sampling_params import SamplingParams
from tests.helpers import prompts, tiny_checkpoint
from tests.workloads import Request, assert_nothing_left, serve

PLAIN = SamplingParams(temperature=0.8, seed=1, max_tokens=8, ignore_eos=True)
FIELDS: dict[str, Any] = {"device": "cpu", "use_tqdm": False, "max_model_len": 64, "block_size": 4, "max_num_seqs": 4}
SMALL: dict[str, Any] = {"num_kv_blocks": 24, "max_num_batched_tokens": 24}
ROOMY: dict[str, Any] = {"num_kv_blocks": 400, "max_num_batched_tokens": 24}


COUNTS: WeakKeyDictionary[LLMEngine, Counter[str]] = WeakKeyDictionary()


def make_engine(**overrides: Any) -> LLMEngine:
    """An engine whose moved blocks are counted."""
    engine = make_any_engine(EngineConfig(**{"model": str(tiny_checkpoint()), **FIELDS, **overrides}))
    if "kv_offload" in overrides:
        counts: Counter[str] = Counter()
        COUNTS[engine] = counts

        def count(events: Sequence[Event]) -> None:
            for event in events:
                if isinstance(event, BlocksMoved):
                    counts[f"{event.what}_{event.place}"] += event.num_blocks

        engine.subscribe(count)
    return engine


def rounds() -> list[list[Request]]:
    """Prompts with heads in common, others that push them out, then the heads again with other tails, and the first once more."""
    heads, tails = prompts([24, 20, 28], seed=3), prompts([3, 5, 2, 6, 4, 1], seed=5)
    first = [Request(a + b, replace(PLAIN, seed=i)) for i, (a, b) in enumerate(zip(heads, tails, strict=False))]
    again = [Request(a + b, replace(PLAIN, seed=i)) for i, (a, b) in enumerate(zip(heads, tails[3:], strict=True))]
    others = [Request(prompt, replace(PLAIN, seed=9)) for prompt in prompts([33, 29, 31, 27, 30], seed=8)]
    return [first, others, again, others, first]


def answers(engine: LLMEngine, requests: Sequence[Request]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in serve(engine, requests)]


def check_aborts(engine: LLMEngine, roomy: LLMEngine, heads: list[list[int]], tail: int, rng: random.Random) -> None:
    """Requests with few heads come at random, and some are aborted at random. The others' answers are those of a cache with room."""
    tails = prompts([rng.randint(1, tail) for _ in range(40)], seed=4)
    requests = [
        Request(rng.choice(heads) + own, replace(PLAIN, seed=i, max_tokens=rng.randint(1, 14)))
        for i, own in enumerate(tails)
    ]
    expected, aborted, left = answers(roomy, requests), set[int](), list(range(40))
    done = dict[int, list[int]]()
    while left or engine.has_unfinished_requests():
        while left and rng.random() < 0.5:
            i = left.pop(0)
            engine.add_request(str(i), requests[i].prompt, requests[i].params, stream=False)
        for output in engine.step():
            done[int(output.request_id)] = list(output.outputs[0].token_ids)
        if engine.request_ids and rng.random() < 0.1:
            aborted.add(int(engine.abort_request(rng.choice(engine.request_ids)).request_id))
    assert aborted and len(done) > 15
    for i in done.keys() - aborted:
        assert done[i] == expected[i], i
    assert_nothing_left(engine)
    settle(engine)
    assert COUNTS[engine]["loaded_host"] > 0
    engine.close()


def connector_of(engine: LLMEngine) -> Any:
    return engine.scheduler.connector  # type: ignore[attr-defined]


def settle(engine: LLMEngine) -> None:
    """Let all transfers end, and check that nothing is held."""
    connector = connector_of(engine)
    connector._settle(time.monotonic() + 10)
    slots = list(connector._host.values())
    assert not connector._loads and not any(slot.is_loading for slot in slots)
    assert sorted(slot.number for slot in slots) == list(range(len(slots)))


def poison_early_reads(monkeypatch: pytest.MonkeyPatch, saved: bool = True) -> None:
    """Blocks that a load is to fill, and those that were `saved`, hold no numbers: who reads them too early is found out."""
    start = BlockStore.start_load_kv

    def start_load_kv(self: BlockStore, meta: ConnectorMetadata) -> None:
        loads, meta.loads = meta.loads, {}
        start(self, meta)
        poison(meta.evicted if saved else [], self.cache)
        poison([block for _, block_ids in loads.values() for block in block_ids], self.cache)
        start(self, ConnectorMetadata(loads=loads))

    monkeypatch.setattr(BlockStore, "start_load_kv", start_load_kv)


def poison(block_ids: Sequence[int], cache: torch.Tensor) -> None:
    """Fill blocks of a cache [2L, N, words] with bits that are no number in any float dtype."""
    cache[:, list(block_ids)] = -1
