"""Drafts in models with states: a rejected draft token leaves no trace, so every text is the one without drafts."""

from dataclasses import replace
from typing import Any

import pytest

from folovllm import LLM, SamplingParams
from tests.helpers import prompts
from tests.workloads import Request, mixed_requests, serve
from tests.x3.engines import Pair, speculation_of
from tests.x3.test_lossless import capture_drafts, demanding
from tests.x5.checkpoints import hybrid_checkpoint, random_geometry

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
    fields = {"model": str(random_geometry(seed, may_tie=False)), **ENGINES[engine], **more}
    return Pair.of(requests, **fields)


def check_twice(pair: Pair, drafts: str, k: int = 3, **more: Any) -> None:
    """The second time slots have states and kept inputs of others, and prefixes are found."""
    engine = pair.engine(drafts, k, **more)
    for arrival in ("random_steps", "at_once"):
        pair.check(serve(engine, pair.requests, arrival))
        for i, request in enumerate(pair.requests):  # some leave with their drafts under way
            engine.add_request(f"left {i}", request.prompt, request.params)
            engine.step()
        engine.abort_request([f"left {i}" for i in range(len(pair.requests))])
    made = speculation_of(engine)
    assert made.num_draft_tokens > 5
    assert drafts != "right" or made.num_accepted == made.num_draft_tokens
    assert drafts != "wrong" or made.num_accepted == 0
    assert drafts != "each" or 0 < made.num_accepted < made.num_draft_tokens


@pytest.mark.parametrize(("engine", "drafts", "kind"), [
    ("m2", "often", "greedy"), ("m4", "often", "seeded"), ("m5", "right", "seeded"), ("m6", "wrong", "greedy"),
])  # fmt: skip
def test_the_text_is_that_without_drafts(engine: str, drafts: str, kind: str) -> None:
    check_twice(pair_of(engine, len(drafts), kind), drafts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_geometries(seed: int) -> None:
    """Drafts are right, wrong and sometimes right in turns, side by side; all presets give the text of one without drafts."""
    pair = pair_of("m2", seed, ("greedy", "seeded")[seed % 2])
    for fields in ENGINES.values():
        check_twice(replace(pair, fields={"model": pair.fields["model"], **fields}), "each", k=1 + seed % 7)


def test_all_that_a_sample_depends_on() -> None:
    """Penalties, grammars, stop strings and scores of the prompt, as with other models."""
    pair = Pair.of(demanding(), model=str(hybrid_checkpoint("qwen3_5_text")), **ENGINES["m6"])
    pair.check(serve(pair.engine("often"), pair.requests))


def test_captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU too: they have sequences without tokens, and padding at the end."""
    capture_drafts(monkeypatch, 16)
    check_twice(pair_of("m6", 2, "greedy"), "often")


def test_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter: a prompt in chunks, captured drafts, and a prefix that ends at a snapshot between drafts."""
    capture_drafts(monkeypatch, 8)
    greedy = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    (first, second) = prompts([19, 3])
    model = str(hybrid_checkpoint("qwen3_next", "LF", num_heads=2, num_kv_heads=1))
    fields = ENGINES["m6"] | {"max_num_seqs": 2, "max_model_len": 32, "attention_backend": "triton", "dtype": "float32"}
    pair = Pair.of([Request(first, greedy), Request(second, greedy)], model=model, **fields)
    engine = pair.engine("often")
    pair.check(serve(engine, pair.requests))
    answer = pair.plain[0].outputs[0].token_ids
    pair.check(serve(engine, pair.requests))
    longer = [Request([*first, *answer[:6], 9, 9, 9], greedy)]
    Pair.of(longer, model=model, **fields).check(serve(engine, longer))
    assert engine.scheduler.kv.stats.tokens_hit >= 16 + 24


def test_a_snapshot_between_drafts_serves_who_comes_next() -> None:
    """Of an answer that was drafted right, the next turn of the conversation finds all whole blocks."""
    greedy = SamplingParams(temperature=0, max_tokens=22, ignore_eos=True)
    (prompt,) = prompts([10])
    pair = Pair.of([Request(prompt, greedy)], model=str(hybrid_checkpoint()), **{**ENGINES["m6"], "num_snapshots": 20})
    answer = pair.plain[0].outputs[0].token_ids
    turn = [Request([*prompt, *answer, 5, 6, 7], greedy)]
    for drafts in ("right", "often"):
        engine = pair.engine(drafts, k=3)
        pair.check(serve(engine, pair.requests))
        Pair.of(turn, **pair.fields).check(serve(engine, turn))
        kv: Any = engine.scheduler.kv
        assert kv.stats.tokens_hit == 28
        assert len(kv.snapshots._free) + len(kv.snapshots) == 20


@pytest.mark.parametrize("method", ["ngram", "suffix", "mtp"])
def test_the_embedded_model(method: str) -> None:
    """Its own text comes again in the prompt, so that copying pays; its head knows it anyway."""
    ask = [{"role": "user", "content": "Tell me a story about Lily and a red kite."}]
    fields = {"device": "cpu", "max_model_len": 512, "max_num_seqs": 4, "snapshot_interval": 16, "use_tqdm": False}
    config = {"method": method, "num_speculative_tokens": 5, "adaptive": False}
    texts = []
    for more in ({}, {"speculative_config": config}):
        with LLM("stories-hybrid", **fields, **more) as llm:
            for params in (SamplingParams(temperature=0.0, max_tokens=60), SamplingParams(seed=4, max_tokens=60)):
                (first,) = llm.chat(ask, params)
                again = [*ask, {"role": "assistant", "content": first.outputs[0].text}, *ask]
                (second,) = llm.chat(again, params)
                texts += [first.outputs[0].text, second.outputs[0].text]
            if more:
                assert speculation_of(llm.engine).num_accepted > 5
    assert texts[:4] == texts[4:]


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", ["right", "often", "random"])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_kernels_on_a_gpu(family: str, drafts: str) -> None:
    """Captured decodes and drafts; texts agree until rounding decides."""
    model = str(hybrid_checkpoint(family, linear_key_head_dim=32, linear_value_head_dim=64))
    fields = {**ENGINES["m6"], "device": "cuda", "dtype": "float32", "attention_backend": "triton", "block_size": 16}
    pair = Pair.of(mixed_requests("seeded", 24), model=model, **{**fields, "num_kv_blocks": 60, "max_num_seqs": 8})
    engine = pair.engine(drafts, k=4)
    for _ in range(2):
        assert pair.share_of_equal(serve(engine, pair.requests)) >= 0.9
    assert speculation_of(engine).num_draft_tokens > 50
