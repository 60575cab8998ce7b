"""Whatever is guessed, the text is the one that plain decoding gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import xxhash

from folovllm.engine.llm_engine import LLMEngine
from folovllm.spec.oracle import Oracle
from folovllm.spec.proposer import Proposer, RowState
from tests.helpers import VOCAB_SIZE
from tests.workloads import Workload, make_engine, serve, workload

PRESETS = ("m2", "m5", "m6")


class Noise(Proposer):
    """Guesses at random."""

    def propose(self, state: RowState, k: int) -> Sequence[int]:
        n = len(state.token_ids)
        return [xxhash.xxh32_intdigest(f"{state.seq_id} {n + i}".encode()) % VOCAB_SIZE for i in range(k)]


def proposer(load: Workload, kind: str) -> Proposer:
    """One that guesses `load`'s answers right, wrong, or each token with a chance of 0.7; or one that guesses anything."""
    texts = {tuple(r.prompt): answer for r, answer in zip(load.requests, load.answers, strict=True)}
    chances = {"right": 1.0, "wrong": 0.0, "often": 0.7}
    return Noise() if kind == "random" else Oracle(texts, chances[kind], VOCAB_SIZE)


def speculative(load: Workload, kind: str, k: int = 3, **overrides: Any) -> LLMEngine:
    config = {"method": proposer(load, kind), "num_speculative_tokens": k}
    return make_engine(load.model, **({"speculative_config": config} | overrides))


@pytest.mark.parametrize("guesses", ["right", "wrong", "often", "random"])
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_text_is_that_of_plain_decoding(preset: str, kind: str, guesses: str) -> None:
    load = workload(kind, count=8)
    engine = speculative(load, guesses, milestone=preset, max_num_seqs=4, block_size=4 if preset != "m2" else None)
    load.check(serve(engine, load.requests))
    made = engine.scheduler.speculation
    assert made.num_guessed > 0
    if guesses == "right":
        assert made.num_accepted == made.num_guessed
    elif guesses == "wrong":
        assert made.num_accepted == 0
