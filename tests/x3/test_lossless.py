"""Whatever is drafted, an answer is the one that plain decoding gives."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from folovllm.attention.backends.torch_paged import TorchPagedBackend
from folovllm.electives.spec_decode.draft_steps import draft_bucket, draft_buckets
from folovllm.electives.spec_decode.proposer import Proposer, RowState
from folovllm.electives.structured_output.params import StructuredOutputsParams
from folovllm.sampling_params import SamplingParams
from folovllm.worker import graph_runner
from folovllm.worker.buckets import Bucket
from folovllm.worker.graph_runner import GraphRunner
from folovllm.worker.model_runner import ModelRunner
from tests.helpers import VOCAB_SIZE, prompts, tiny_tokenizer
from tests.workloads import Request, serve, workload
from tests.x3.engines import Pair, make_engine, make_proposer, speculation_of, speculative

BLOCKS: dict[str, dict[str, Any]] = {  # small ones, so that drafts cross their borders
    "m2": {"milestone": "m2"},
    "m5": {"milestone": "m5", "block_size": 4},
    "m6": {"milestone": "m6", "block_size": 4},
}
LETTERS = [int(id_) for id_ in tiny_tokenizer().encode("abcdefghijklmnop")]
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=14, ignore_eos=True, allowed_token_ids=LETTERS)


@pytest.mark.parametrize(("preset", "kind", "drafts"), [
    ("m2", "seeded", "often"), ("m5", "greedy", "random"),
    ("m6", "greedy", "right"), ("m6", "seeded", "wrong"), ("m6", "greedy", "random"),
])  # fmt: skip
def test_the_text_is_that_of_transformers(preset: str, kind: str, drafts: str) -> None:
    load = workload(kind, count=6)
    proposer = make_proposer(drafts, [request.prompt for request in load.requests], load.answers)
    engine = make_engine(max_num_seqs=4, **BLOCKS[preset], **speculative(proposer))
    load.check(serve(engine, load.requests))
    made = speculation_of(engine)
    assert made.num_draft_tokens > 20
    if drafts == "right":
        assert made.num_accepted == made.num_draft_tokens
    elif drafts == "wrong":
        assert made.num_accepted == 0


def demanding() -> list[Request]:
    """Requests with all that a sample may depend on."""
    grammar = StructuredOutputsParams
    every = [
        replace(SAMPLED, repetition_penalty=1.6, presence_penalty=0.5, frequency_penalty=0.4, logprobs=2),
        replace(SAMPLED, temperature=0, repetition_penalty=1.3, stop=["d"], include_stop_str_in_output=True),
        replace(SAMPLED, ignore_eos=False, stop_token_ids=LETTERS[:6], min_tokens=7),
        replace(SAMPLED, bad_words=["ab", "c", "dg", "hhp", "n"], logit_bias={LETTERS[4]: 2.0}, logprobs=0),
        replace(SAMPLED, top_k=7, top_p=0.8, min_p=0.02, n=3),
        replace(SAMPLED, prompt_logprobs=1, logprobs=1, stop=["b", "o"]),
        replace(SAMPLED, allowed_token_ids=None, structured_outputs=grammar(regex="[a-f]{3}(g|hi)*[jk]{2}")),
        replace(SAMPLED, allowed_token_ids=None, structured_outputs=grammar(choice=["abcabc", "abdeee"]), min_tokens=9),
    ]
    lengths = [5, 9, 16, 3, 8, 11, 4, 7]
    return [Request(prompt, params) for prompt, params in zip(prompts(lengths, seed=5), every, strict=True)]


@lru_cache
def demanding_pair(preset: str) -> Pair:
    return Pair.of(demanding(), max_num_seqs=6, **BLOCKS[preset])


@pytest.mark.parametrize(("preset", "drafts"), [("m2", "often"), ("m5", "random"), ("m6", "right"), ("m6", "often")])
def test_all_that_a_sample_depends_on_is_kept_token_by_token(preset: str, drafts: str) -> None:
    pair = demanding_pair(preset)
    engine = pair.engine(drafts)
    pair.check(serve(engine, pair.requests))
    made = speculation_of(engine)
    assert made.num_draft_tokens > 20 and (made.num_accepted > 20 or drafts == "random")


class NoTokens(Proposer):
    """Drafts numbers that are no tokens: before the right one, behind it, or alone."""

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = answer

    def propose(self, state: RowState, k: int) -> Sequence[int]:
        i = len(state.token_ids) - state.num_prompt_tokens
        right = [*self._answer[i : i + 3], 0]
        return [[-1, *right], [*right[:1], -1, *right[1:]], [VOCAB_SIZE], [*right, 1 << 40], [-2]][i % 5]


@pytest.mark.parametrize(("preset", "penalty"), [("m5", 1.0), ("m6", 1.3)])
def test_a_draft_token_may_be_no_token(preset: str, penalty: float) -> None:
    params = replace(SAMPLED, repetition_penalty=penalty, allowed_token_ids=None, max_tokens=30)
    load = [Request(prompts([5])[0], params)]
    pair = Pair.of(load, **BLOCKS[preset])
    proposer = NoTokens(pair.plain[0].outputs[0].token_ids)
    engine = make_engine(**pair.fields, **speculative(proposer, k=5))
    pair.check(serve(engine, load))
    assert speculation_of(engine).num_accepted > 5


@pytest.mark.parametrize("preset", ["m5", "m6"])
def test_an_answer_that_breaks_keeps_what_was_drafted_before(preset: str) -> None:
    """Its bad word rules out what its grammar asks for. One ends by its length before that."""
    grammar = StructuredOutputsParams(regex="abcdef")
    broken = replace(SAMPLED, allowed_token_ids=None, structured_outputs=grammar, bad_words=["e"], logprobs=0)
    load = [Request(prompts([5])[0], params) for params in (broken, replace(broken, max_tokens=4))]
    pair = Pair.of(load, max_num_seqs=2, **BLOCKS[preset])
    ends = [(output.outputs[0].text, output.outputs[0].finish_reason) for output in pair.plain]
    assert ends == [("abcd", "abort"), ("abcd", "length")]
    pair.check(serve(pair.engine("right", k=8), load))


def without_memory() -> list[Request]:
    """Of these those whose samples depend on no token before them but by a grammar: they are sampled all at once."""
    every = demanding()
    return [every[4], *every[6:]]


def test_grammars_and_filters_are_sampled_at_once() -> None:
    pair = Pair.of(without_memory(), max_num_seqs=4, **BLOCKS["m6"])
    engine = pair.engine("often")
    pair.check(serve(engine, pair.requests))
    assert speculation_of(engine).num_accepted > 10


def capture_drafts(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Steps with drafts are captured, on a CPU too, of up to so many samples."""
    monkeypatch.setattr(graph_runner, "buckets_for", lambda setup, more: draft_buckets(most) if more else [])


def test_captured_steps_with_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU too, with buckets of few sizes: those that no bucket holds, and those with prompts, run as before."""
    used: list[Bucket] = []
    run = GraphRunner._graph

    def noted(self: GraphRunner, bucket: Bucket, work: Any) -> Any:
        used.extend([bucket] * bucket.has_drafts)
        return run(self, bucket, work)

    capture_drafts(monkeypatch, 24)
    monkeypatch.setattr(GraphRunner, "_graph", noted)
    pair = demanding_pair("m6")
    pair.check(serve(pair.engine("often"), pair.requests))
    assert len(set(used)) > 3 and max(used).num_tokens <= 24
    assert draft_buckets(64)[-2:] == [draft_bucket(48), draft_bucket(64)]
    assert draft_buckets(2000)[-1] == draft_bucket(512)


def test_captured_drafts_beside_a_prompt_that_will_be_penalised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt samples nothing yet: who samples beside it samples as if it were not there."""
    capture_drafts(monkeypatch, 24)
    short, long = prompts([3, 40], seed=6)
    load = [Request(short, replace(SAMPLED, max_tokens=24)), Request(long, replace(SAMPLED, repetition_penalty=1.5))]
    pair = Pair.of(load, max_num_seqs=2, long_prefill_token_threshold=2, **BLOCKS["m6"])
    engine = pair.engine("often")
    pair.check(serve(engine, load))
    assert speculation_of(engine).num_accepted > 10


@pytest.mark.parametrize("captured", [True, False])
def test_logits_have_places_only_where_steps_are_captured(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there before the cache takes what is left; none where the backend cannot be part of a capture."""
    made: list[GraphRunner] = []
    sizes: list[int] = []
    make, fit = GraphRunner.__init__, ModelRunner.fit_kv_cache

    def places() -> int:
        return len(made[0]._logits)

    def noted(self: GraphRunner, *rest: Any, **more: Any) -> None:
        made.append(self)
        make(self, *rest, **more)

    capture_drafts(monkeypatch, 24)
    monkeypatch.setattr(TorchPagedBackend, "supports_graph", lambda self, device: captured)
    monkeypatch.setattr(GraphRunner, "__init__", noted)
    monkeypatch.setattr(ModelRunner, "fit_kv_cache", lambda *args: (sizes.append(places()), fit(*args))[1])
    make_engine(max_num_seqs=4, **BLOCKS["m6"], **speculative(make_proposer("right", [], [])))
    assert [*sizes, places()] == ([24, 24] if captured else [0, 0])
