"""Engines with drafts beside engines without, over the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import pytest
import xxhash

from folovllm.config import EngineConfig
from folovllm.electives.spec_decode.oracle import Oracle
from folovllm.electives.spec_decode.proposer import Proposer, RowState
from folovllm.electives.spec_decode.speculation import Speculation
from folovllm.engine.llm_engine import LLMEngine
from folovllm.engine.llm_engine import make_engine as make_any_engine
from folovllm.outputs import RequestOutput
from tests.helpers import VOCAB_SIZE, tiny_checkpoint
from tests.workloads import MAX_MODEL_LEN, Request, serve

seen = attrgetter("text", "finish_reason", "stop_reason")
CHANCES = {"right": 1.0, "wrong": 0.0, "often": 0.7}


class Anything(Proposer):
    """Drafts at random, and sometimes nothing."""

    def propose(self, state: RowState, k: int) -> Sequence[int]:
        n = len(state.token_ids)
        numbers = [xxhash.xxh32_intdigest(b"%d %d" % (int(state.token_ids[-1]), n + i)) for i in range(k)]
        return [number % VOCAB_SIZE for number in numbers[: numbers[0] % (k + 2)]]


class EachKind(Proposer):
    """Right for six tokens of a text, wrong for six, and for six sometimes right: each follows each, beside the others in a batch."""

    def __init__(self, texts: dict[tuple[int, ...], Sequence[int]]) -> None:
        self._oracles = [Oracle(texts, chance, VOCAB_SIZE) for chance in CHANCES.values()]

    def propose(self, state: RowState, k: int) -> Sequence[int]:
        return self._oracles[len(state.token_ids) // 6 % 3].propose(state, k)


def make_proposer(kind: str, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Proposer:
    """One that drafts the answers right, wrong, or each token with a chance of 0.7; or "each" in turns, or "random": anything."""
    texts = {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}
    if kind == "each":
        return EachKind(texts)
    return Anything() if kind == "random" else Oracle(texts, CHANCES[kind], VOCAB_SIZE)


def make_engine(**overrides: Any) -> LLMEngine:
    """An engine over a tiny model, with the loop that its configuration asks for."""
    fields: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "device": "cpu", "use_tqdm": False, "num_kv_blocks": 400}
    return make_any_engine(EngineConfig(**{"model": str(tiny_checkpoint()), **fields, **overrides}))


def speculative(proposer: Proposer, k: int = 3) -> dict[str, Any]:
    """The part of a configuration that turns drafts on."""
    return {"speculative_config": {"method": proposer, "num_speculative_tokens": k}}


def speculation_of(engine: LLMEngine) -> Speculation:
    """What the engine knows of its drafts."""
    found: Speculation = engine.scheduler.speculation
    return found


@dataclass(frozen=True)
class Pair:
    """Requests, an engine's outputs without drafts, and what makes the engine."""

    requests: list[Request]
    plain: list[RequestOutput]
    fields: dict[str, Any]

    @classmethod
    def of(cls, requests: list[Request], **fields: Any) -> Pair:
        """Serve the requests without drafts."""
        return cls(requests, serve(make_engine(**fields), requests), fields)

    def engine(self, kind: str, k: int = 3, **more: Any) -> LLMEngine:
        """The same engine with drafts at the first answer to each prompt."""
        answers = [output.outputs[0].token_ids for output in self.plain]
        proposer = make_proposer(kind, [request.prompt for request in self.requests], answers)
        return make_engine(**{**self.fields, **more, **speculative(proposer, k)})

    def share_of_equal(self, outputs: Sequence[RequestOutput]) -> float:
        """How many of the answers have the same text."""
        answers = ([one.text for output in some for one in output.outputs] for some in (outputs, self.plain))
        same = [one == other for one, other in zip(*answers, strict=True)]
        return sum(same) / len(same)

    def check(self, outputs: Sequence[RequestOutput]) -> None:
        """All that a user sees is the same."""
        for output, plain in zip(outputs, self.plain, strict=True):
            assert len(output.outputs) == len(plain.outputs)
            for one, other in zip(output.outputs, plain.outputs, strict=True):
                assert [*one.token_ids] == [*other.token_ids]
                assert seen(one) == seen(other)
                assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
                assert_close(one.logprobs, other.logprobs)
            assert_close(output.prompt_logprobs, plain.prompt_logprobs)


def assert_close(rows: Any, plain: Any) -> None:
    """The same tokens with the same ranks, and log-probabilities that differ by rounding."""
    assert (rows is None) == (plain is None)
    assert len(rows or ()) == len(plain or ())
    for row, other in zip(rows or (), plain or (), strict=True):
        assert (row is None) == (other is None)
        pairs = [(p, other.get(id_)) for id_, p in (row or {}).items()]
        assert all(q and p.rank == q.rank and abs(p.logprob - q.logprob) < 1e-3 for p, q in pairs), (row, other)
