"""Steps are values, so ranks and other processes need to know nothing of drafts, nor of who makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from folovllm.electives.server.async_engine import AsyncEngine
from folovllm.electives.spec_decode.proposer import Proposer, RowState
from folovllm.sampling_params import SamplingParams
from tests.workloads import serve
from tests.x3.engines import Anything, make_engine, make_proposer, speculation_of, speculative
from tests.x3.test_lossless import demanding_pair

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


def test_ranks_do_not_see_the_proposer() -> None:
    pair = demanding_pair("m6")
    answers = [output.outputs[0].token_ids for output in pair.plain]
    proposer = Rooted(make_proposer("often", [request.prompt for request in pair.requests], answers))
    engine = make_engine(**pair.fields, tensor_parallel_size=2, **speculative(proposer))
    try:
        pair.check(serve(engine, pair.requests))
        assert speculation_of(engine).num_accepted > 20
    finally:
        engine.close()


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
