"""Offloading on a GPU: copies on streams of their own, beside captured steps."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from folovllm.electives.kv_transfer import store as stores
from tests.helpers import prompts
from tests.workloads import Request, assert_nothing_left
from tests.x7.engines import (
    COUNTS,
    PLAIN,
    answers,
    check_aborts,
    make_engine,
    poison,
    poison_early_reads,
    rounds,
)

pytestmark = pytest.mark.gpu
FIELDS: dict[str, Any] = {
    "milestone": "m6",
    "device": "cuda",
    "block_size": 16,
    "max_model_len": 256,
    "max_num_batched_tokens": 96,
}


def store_of(worker: Any) -> stores.BlockStore:
    store: stores.BlockStore = worker.state[stores.STORE]
    return store


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_bytes_leave_and_come_back_as_they_were(dtype: str) -> None:
    more = {"kv_cache_dtype": "fp8"} if dtype == "fp8" else {}
    engine = make_engine(**FIELDS, dtype="bfloat16", num_kv_blocks=300, kv_offload="64MiB", **more)
    (store,) = engine.executor.collective_rpc(store_of)
    copies, cache = store.copies, store.cache
    slots, blocks, targets = (random.sample(range(n), 250) for n in (len(store.host), 300, 300))
    cache.random_(-(2**31), 2**31 - 1)
    before = cache.clone()
    copies.gather(blocks)
    copies.send(slots, [])
    poison(blocks, cache)
    expected = cache.clone()
    expected[:, targets] = before[:, blocks]
    done = copies.load(slots, targets)
    torch.cuda.current_stream().wait_event(done)
    assert torch.equal(cache, expected)
    engine.close()


@pytest.mark.parametrize("has_disk", [False, True])
def test_answers_are_those_of_a_cache_with_room(
    has_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed shapes would make it bitwise; here a near tie may fall otherwise, so K/V are compared where they come back."""
    poison_early_reads(monkeypatch, saved=False)
    more = {"kv_offload_dir": str(tmp_path)} if has_disk else {}
    fields = FIELDS | {"batch_invariant": True, "attention_backend": "triton"}
    engine = make_engine(**fields, num_kv_blocks=24, kv_offload="1MiB" if has_disk else "64MiB", **more)
    expected = make_engine(**fields, num_kv_blocks=2_000)
    longer = [[Request(r.prompt * 5, replace(PLAIN, seed=i)) for i, r in enumerate(each)] for each in rounds()]
    for requests in longer:
        assert answers(engine, requests) == answers(expected, requests)
        assert_nothing_left(engine)
    assert COUNTS[engine]["loaded_host"] + COUNTS[engine]["loaded_disk"] > 8
    engine.close()
    expected.close()


def test_aborts_at_any_moment() -> None:
    fields = FIELDS | {"batch_invariant": True, "attention_backend": "triton"}
    roomy, engine = (
        make_engine(**fields, num_kv_blocks=2_000),
        make_engine(**fields, num_kv_blocks=24, kv_offload="64MiB"),
    )
    check_aborts(engine, roomy, prompts([120, 96, 112, 88, 104], seed=2), 9, random.Random(0))
