"""A step takes draft tokens from the device by their placeholder ids, whatever else a sample depends on, and whoever watches."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from folovllm.apps.inspector.recorder import Recorder
from folovllm.electives.spec_decode.chain import DraftTokens
from folovllm.engine.events import Event, StepEnded
from folovllm.engine.llm_engine import LLMEngine
from folovllm.sampling_params import SamplingParams
from tests.helpers import VOCAB_SIZE, prompts, tiny_checkpoint
from tests.workloads import Request, serve, workload
from tests.x3.engines import Pair, make_engine, speculation_of
from tests.x3.test_lossless import BLOCKS, capture_drafts, demanding_pair

SMALL: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 34, "max_num_batched_tokens": 18, "max_num_seqs": 6}


def drafting(preset: str = "m6", layers: int = 3, k: int = 3, **fields: Any) -> LLMEngine:
    """An engine whose draft is the model itself, or with fewer layers another one, which is wrong most of the time."""
    draft = str(tiny_checkpoint() if layers == 3 else tiny_checkpoint(num_hidden_layers=layers))
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": k, "adaptive": False}
    return make_engine(**{**BLOCKS[preset], **fields, "speculative_config": config})


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with drafts are captured, on a CPU too."""
    capture_drafts(monkeypatch, 24)


@pytest.mark.parametrize(("layers", "captured"), [(3, True), (1, False)], ids=["right, captured", "wrong"])
def test_all_that_a_sample_depends_on(layers: int, captured: bool, request: pytest.FixtureRequest) -> None:
    if captured:
        request.getfixturevalue("rooms")
    pair = demanding_pair("m6")
    engine = drafting(layers=layers, max_num_seqs=6)
    pair.check(serve(engine, pair.requests))
    made = speculation_of(engine)
    assert made.num_draft_tokens > 20


def test_drafts_are_right_where_little_else_counts(rooms: None) -> None:
    """One request each; if the drafts of one kind were wrong, fewer than 0.7 would be right."""
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=20, ignore_eos=True)
    kinds: list[dict[str, Any]] = [{"presence_penalty": 0.1}, {"top_k": 40, "top_p": 0.98}, {"logprobs": 2}]
    pairs = zip(prompts([3, 9, 16], 2), kinds, strict=True)
    load = [Request(prompt, replace(params, **kind)) for prompt, kind in pairs]
    pair = Pair.of(load, max_num_seqs=3, **BLOCKS["m6"])
    engine = drafting(max_num_seqs=3)
    pair.check(serve(engine, pair.requests))
    made = speculation_of(engine)
    assert made.num_accepted > 0.7 * made.num_draft_tokens > 20


@pytest.mark.parametrize(
    ("preset", "fields"),
    [("m5", {}), ("m6", {}), ("m6", {"async_scheduling": False, "enforce_eager": True})],
    ids=str,
)
def test_sequences_that_give_way(preset: str, fields: dict[str, Any]) -> None:
    load = workload("seeded", count=8)
    engine = drafting(preset, **SMALL, **fields)
    load.check(serve(engine, load.requests))
    assert engine.stats().preemptions > 0 and speculation_of(engine).num_accepted > 20


def test_who_watches_sees_tokens() -> None:
    """So does a recording, which hears of a step before its drafts are known."""
    load, seen, data = workload("greedy", count=4), list[Event](), bytearray()
    engine = drafting(layers=1, max_num_seqs=4)
    engine.subscribe(seen.extend)
    recorder = Recorder(engine, data.extend)
    load.check(serve(engine, load.requests))
    recorder.close()
    drafts = [s.token_ids for event in seen if isinstance(event, StepEnded) for s in event.output.scheduled_seqs]
    assert max(map(len, drafts)) > 2 and all(tokens.max(initial=0) < VOCAB_SIZE for tokens in drafts)
    turns = [turn for name, *_, turn in map(json.loads, data.decode().splitlines()) if name == "Turn"]
    rejected = [token for turn in turns for name, *_, last in turn if name == "DraftsVerified" for token in last]
    assert len(rejected) > 20 and max(rejected) < VOCAB_SIZE


def test_requests_that_are_aborted_between_two_steps() -> None:
    load = workload("greedy", count=6)
    engine = drafting(max_num_seqs=4)
    texts: dict[str, list[int]] = {}
    for i, asked in enumerate(load.requests):
        engine.add_request(f"r{i}", asked.prompt, asked.params, stream=False)
    for step in range(200):
        if step in (3, 5):
            engine.abort_request(f"r{step - 3}")
        texts |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
    assert texts == {f"r{i}": list(load.answers[i]) for i in (1, 3, 4, 5)}


def test_names() -> None:
    drafted = DraftTokens(100, 3, 4, torch.device("cpu"))
    assert drafted.placeholder_ids.tolist() == [[100, 101, 102, 103], [104, 105, 106, 107], [108, 109, 110, 111]]
    drafted.write(torch.arange(40, 52).view(3, 4))
    tokens = np.array([-1, 0, 99, 100, 111], np.int32)
    assert drafted.resolve(tokens).tolist() == [-1, 0, 99, 40, 51], "what is in flight stays"
    on_device = torch.from_numpy(tokens.copy())
    drafted.resolve_on_device(on_device)
    assert on_device.tolist() == [-1, 0, 99, 40, 51]
