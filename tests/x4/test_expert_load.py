"""How often each expert is asked: as transformers' router has it, with padding, overlap and ranks; and who gets to know it."""

import asyncio
import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from folovllm import LLM, SamplingParams
from folovllm.apps.cli.show import step_line
from folovllm.config import EngineConfig
from folovllm.electives.moe.expert_load import ExpertLoad
from folovllm.electives.server.async_engine import AsyncEngine
from folovllm.electives.server.errors import Unavailable
from folovllm.electives.server.metrics import metrics_page
from folovllm.engine.events import Event, ExpertsAsked
from folovllm.engine.llm_engine import make_engine
from folovllm.engine.metrics import imbalance
from tests.helpers import assert_tokens_equal, hf_greedy, prompts
from tests.x4.checkpoints import moe_checkpoint

PROMPTS = prompts([11, 5, 2])
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
SMALL = {"max_model_len": 32, "block_size": 4, "num_kv_blocks": 40, "device": "cpu", "use_tqdm": False}


def engine_of(family: str = "qwen3_moe", **fields):
    return make_engine(EngineConfig(model=str(moe_checkpoint(family)), count_experts=True, **SMALL | fields))


@cache
def by_transformers(family: str, texts: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """How often its routers ask each expert for these tokens."""
    model = AutoModelForCausalLM.from_pretrained(moe_checkpoint(family), dtype=torch.float32).eval()
    k, total = model.config.num_experts_per_tok, 0
    for ids in texts:
        with torch.no_grad():
            logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
        total = total + torch.stack([one.topk(k).indices.flatten().bincount(minlength=one.shape[1]) for one in logits])
    return total.tolist()


def computed(outputs) -> tuple[tuple[int, ...], ...]:
    """The tokens that the model was given: of each answer all but the last."""
    return tuple((*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]) for output in outputs)


@pytest.mark.parametrize(("family", "fields"), [
    ("qwen3_moe", {"milestone": "m3"}),  # a step at a time
    ("mixtral", {"milestone": "m5", "max_num_batched_tokens": 7}),  # prompts in chunks
    ("qwen2_moe", {"attention_backend": "torch_paged"}),  # captured steps with padding, overlapped
    pytest.param("qwen2_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, marks=pytest.mark.slow),
    pytest.param("qwen3_moe", {"device": "cuda", "dtype": "float32"}, marks=pytest.mark.gpu),  # CUDA graphs
], ids=str)  # fmt: skip
def test_counts_are_those_of_transformers(family: str, fields: dict, request: pytest.FixtureRequest) -> None:
    """And so are the answers. Twice: what is asked between steps, and in the middle of the second load, changes nothing."""
    if "tensor_parallel_size" in fields:
        request.getfixturevalue("warm")
    engine = engine_of(family, **fields)
    try:
        assert not any(map(any, engine.expert_load())), "what the warm-up asked is not counted"
        outputs = engine.generate(PROMPTS, PARAMS)
        for output in outputs:
            reference = hf_greedy(moe_checkpoint(family), output.prompt_token_ids, 4)
            assert_tokens_equal(output.outputs[0].token_ids, *reference)
        expected = by_transformers(family, computed(outputs))
        assert engine.expert_load() == expected
        assert sum(expected[0]) == sum(map(len, computed(outputs))) * engine.setup.hf_config.num_experts_per_tok
        seen: list[Event] = []
        engine.subscribe(seen.extend, experts=True)
        again = engine.generate([ids[::-1] for ids in PROMPTS], PARAMS)
        told = [event.counts for event in seen if isinstance(event, ExpertsAsked)]
        assert told[0] == expected and len(told) == 1 + sum(type(event).__name__ == "StepEnded" for event in seen)
        more = by_transformers(family, computed(again))
        assert told[-1] == (torch.tensor(expected) + torch.tensor(more)).tolist()
    finally:
        engine.close()


def test_steps_say_how_uneven_they_are() -> None:
    llm = LLM(str(moe_checkpoint()), milestone="m5", count_experts=True, **SMALL)
    llm.generate(PROMPTS[:1], PARAMS)
    llm.engine.history = []
    (output,) = llm.generate(PROMPTS[1:2], PARAMS)
    steps = llm.engine.history
    assert [sum(steps[0].experts[0]), sum(steps[1].experts[1])] == [2 * 5, 2], "5 tokens, then 1: each asks 2 experts"
    total = torch.tensor([step.experts for step in steps]).sum(0).tolist()
    assert total == by_transformers("qwen3_moe", computed([output]))
    assert step_line(steps[1]).endswith("busiest expert 4.0x"), "a token asks 2 of 8: each has 4 shares"
    assert (imbalance([3, 1, 0, 0]), imbalance([2, 2]), imbalance([0, 0])) == (3, 1, 1)


def test_prometheus_gets_counts() -> None:
    async def scrape() -> tuple[str, list[list[int]]]:
        config = EngineConfig(model=str(moe_checkpoint()), milestone="m5", count_experts=True, **SMALL)
        async with AsyncEngine(config) as engine:
            *_, output = [output async for output in engine.generate({"prompt_token_ids": PROMPTS[0]}, PARAMS)]
            load, _ = await asyncio.gather(engine.call("expert_load"), engine.call("expert_load"))
            text = metrics_page("tiny", engine.stats, engine.counters, load, False).decode()
        with pytest.raises(Unavailable):
            engine.call("expert_load")
        return text, by_transformers("qwen3_moe", computed([output]))

    text, expected = asyncio.run(scrape())
    found = re.findall(r'^folovllm:expert_tokens_total\{.*expert="(\d)",layer="(\d)",.*\} (\S+)$', text, re.M)
    counted = {(layer, e): count for layer, counts in enumerate(expected) for e, count in enumerate(counts)}
    assert {(int(layer), int(e)): float(count) for e, layer, count in found} == counted
    (uneven,) = re.findall(r'^folovllm:expert_imbalance\{.*layer="1",.*\} (\S+)$', text, re.M)
    assert float(uneven) == pytest.approx(imbalance(expected[1]))


def test_nothing_is_counted_unless_asked_for() -> None:
    """No work on the device and no event, whoever listens."""
    llm = LLM(str(moe_checkpoint()), milestone="m5", **SMALL)
    seen: list[Event] = []
    llm.engine.subscribe(seen.extend, experts=True)
    llm.generate(PROMPTS[:1], PARAMS)
    assert not any(isinstance(event, ExpertsAsked) for event in seen)
    assert llm.engine.executor._worker.runner.model.load is None
    with pytest.raises(ValueError, match="experts are not counted: set count_experts=True"):
        llm.engine.expert_load()


def test_choices_that_are_no_experts_count_nowhere() -> None:
    """Of padding, and of a token whose logits are not numbers."""
    config: Any = SimpleNamespace(num_hidden_layers=2, num_experts=4)
    counters: dict[str, torch.Tensor] = {}
    load = ExpertLoad(config, counters)
    for _ in range(2):
        load.record(torch.tensor([[0, 3], [7, -1], [2, 1]]))
    load.end(torch.tensor([5, 6, -1]))
    assert load.counts.tolist() == counters["experts"].tolist() == [[1, 0, 0, 1]] * 2
