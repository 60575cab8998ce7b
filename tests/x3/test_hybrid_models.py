"""Drafts in models with states: a rejected draft token leaves no trace, so every text is the one without drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.workloads import mixed_requests, serve
from tests.x3.engines import Pair, speculation_of
from tests.x5.checkpoints import random_geometry

SMALL = {"block_size": 4, "num_kv_blocks": 40, "max_num_batched_tokens": 20, "max_num_seqs": 4}
ENGINES: dict[str, dict[str, Any]] = {
    "m2": {"milestone": "m2", "max_num_seqs": 4},
    "m4": {"milestone": "m4", **SMALL, "max_num_batched_tokens": 128},
    "m5": {"milestone": "m5", **SMALL, "snapshot_interval": 8, "num_snapshots": 6},
    "m6": {"milestone": "m6", **SMALL, "snapshot_interval": 4, "num_snapshots": 3},
}


def pair_of(engine: str, seed: int, kind: str = "seeded", **more: Any) -> Pair:
    """A random small model, and requests with which sequences give way, and prefixes are found."""
    requests = mixed_requests(kind, 6, seed)
    shared = requests[2].prompt
    requests += [
        replace(request, prompt=[*shared[:n], n, *shared[n : n + 3]])
        for n, request in zip((17, 24, 40), requests, strict=False)
    ]
    return Pair.of(requests, model=str(random_geometry(seed, may_tie=False)), **{**ENGINES[engine], **more})


def check_twice(pair: Pair, drafts: str, k: int = 3, **more: Any) -> None:
    """The second time slots have states and kept inputs of others, and prefixes are found."""
    engine = pair.engine(drafts, k, **more)
    for arrival in ("random_steps", "at_once"):
        pair.check(serve(engine, pair.requests, arrival))
    made = speculation_of(engine)
    assert made.num_draft_tokens > 5
    assert drafts != "right" or made.num_accepted == made.num_draft_tokens
    assert drafts != "wrong" or made.num_accepted == 0


@pytest.mark.parametrize(
    ("engine", "drafts", "kind"),
    [("m2", "often", "greedy"), ("m4", "often", "seeded"), ("m5", "right", "seeded"), ("m6", "wrong", "greedy")],
)
def test_the_text_is_that_without_drafts(engine: str, drafts: str, kind: str) -> None:
    check_twice(pair_of(engine, len(drafts), kind), drafts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_geometries(seed: int) -> None:
    for engine in ENGINES:
        pair = pair_of(engine, seed, ("greedy", "seeded")[seed % 2])
        for drafts in ("right", "wrong", "often"):
            check_twice(pair, drafts, k=1 + seed % 7)
