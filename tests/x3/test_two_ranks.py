"""Steps are values, so ranks and other processes need to know nothing of drafts, nor of who makes them."""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from folovllm.electives.server.async_engine import AsyncEngine
from folovllm.electives.spec_decode.proposer import Proposer, RowState
from folovllm.sampling_params import SamplingParams
from tests.helpers import prompts, tiny_checkpoint
from tests.workloads import Request, serve, workload
from tests.x3.engines import Anything, Pair, make_engine, make_proposer, speculation_of, speculative
from tests.x3.mtp_folders import with_head
from tests.x3.test_eagle3 import eagle, letters_head
from tests.x3.test_hybrid_models import check_twice, pair_of
from tests.x3.test_lossless import BLOCKS, LETTERS, demanding_pair
from tests.x3.test_mtp import GREEDY, mtp
from tests.x5.checkpoints import hybrid_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm")]


class Rooted(Proposer):
    """Cannot be sent anywhere, as one that holds a lock or a file."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner

    def propose(self, state: RowState, k: int) -> Sequence[int]:
        return self.inner.propose(state, k)

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle me")


class Unknown(Anything):
    """Can be sent, and is known nowhere else, as a class of somebody's main program."""


Unknown.__module__ = "__main__"


def with_a_rooted_proposer() -> tuple[Pair, dict[str, Any]]:
    pair = demanding_pair("m6")
    answers = [output.outputs[0].token_ids for output in pair.plain]
    return pair, speculative(Rooted(make_proposer("often", [request.prompt for request in pair.requests], answers)))


def with_a_head_among_experts() -> tuple[Pair, dict[str, Any]]:
    load = [Request(one, GREEDY) for one in prompts([9, 5, 14], seed=8)]
    model = hybrid_checkpoint("qwen3_5_moe_text", "LF", tied=False)
    folder = with_head(Path(tempfile.mkdtemp()) / "model", model, LETTERS[:3], stacked=True)
    return Pair.of(load, model=str(folder), milestone="m6", block_size=4), mtp()


def with_a_draft_model() -> tuple[Pair, dict[str, Any]]:
    config = {"method": "draft_model", "model": str(tiny_checkpoint()), "num_speculative_tokens": 3, "adaptive": False}
    pair = Pair.of(workload("seeded", count=4).requests, max_num_seqs=4, **BLOCKS["m6"])
    return pair, {"speculative_config": config}


def with_an_eagle() -> tuple[Pair, dict[str, Any]]:
    return demanding_pair("m6"), eagle(letters_head())


@pytest.mark.parametrize(("make", "accepted"), [
    (with_a_rooted_proposer, 20), (with_an_eagle, 2), (with_a_head_among_experts, 2), (with_a_draft_model, 20),
])  # fmt: skip
def test_ranks_need_not_know_who_drafts(make: Callable[[], tuple[Pair, dict[str, Any]]], accepted: int) -> None:
    """A proposer stays where it is, each rank has the whole head beside its part of the model, and a draft model's tokens are sent."""
    pair, drafts = make()
    engine = make_engine(**pair.fields, tensor_parallel_size=2, **drafts)
    try:
        pair.check(serve(engine, pair.requests))
        assert speculation_of(engine).num_accepted > accepted
    finally:
        engine.close()


def test_a_model_with_states() -> None:
    model = str(hybrid_checkpoint("qwen3_5_moe_text"))
    check_twice(pair_of("m6", 7, "seeded", model=model), "often", tensor_parallel_size=2)


async def answer(proposer: Proposer, transport: str) -> list[int]:
    fields = {**demanding_pair("m6").fields, **speculative(proposer)}
    async with AsyncEngine(model="stories-5m", transport=transport, **fields) as engine:
        params = SamplingParams(temperature=0, max_tokens=9)
        return [list(output.outputs[0].token_ids) async for output in engine.generate("Once", params)][-1]


def test_a_proposer_stays_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = asyncio.run(answer(make_proposer("random", [], []), "thread"))
    assert asyncio.run(answer(Rooted(Anything()), "thread")) == plain
    monkeypatch.setattr("__main__.Unknown", Unknown, raising=False)
    for proposer in (Rooted(Anything()), Unknown()):
        with pytest.raises(ValueError, match='does not exist in the engine\'s process: take transport="thread"'):
            asyncio.run(answer(proposer, "process"))
