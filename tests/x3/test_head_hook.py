"""Whatever satisfies `DraftHead` can draft: here a double that is no elective's."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from folovllm.models.draft_head import DraftHead
from folovllm.models.llama import LlamaForCausalLM
from folovllm.sampling_params import SamplingParams
from tests.helpers import prompts, tiny_checkpoint
from tests.workloads import Request, serve
from tests.x3.engines import Pair, make_engine, speculation_of
from tests.x3.head_double import MeanHead, drafts_by_hand
from tests.x3.test_eagle3 import FEW, Drafted, hidden_states, num_compared

MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}}


@pytest.mark.parametrize(
    ("preset", "family"), [("m2", "qwen3"), ("m5", "qwen3"), ("m6", "qwen3"), ("m6", "gemma3_text")]
)
def test_a_double_drafts_what_it_should(preset: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    double: type[DraftHead] = MeanHead
    monkeypatch.setattr(LlamaForCausalLM, "mtp_head", double)
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, allowed_token_ids=FEW)
    free = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    load = [Request(one, each) for one, each in zip(prompts([9, 4, 17], seed=4), (params, free, free), strict=True)]
    target = tiny_checkpoint(family, tied=False)
    fields: dict[str, Any] = {"milestone": preset, "model": str(target)} | ({} if preset == "m2" else {"block_size": 4})
    pair, drafted = Pair.of(load, **fields), Drafted().watch(monkeypatch)
    engine = make_engine(**fields, **MTP)
    outputs = serve(engine, load)
    pair.check(outputs)
    if family != "qwen3":
        return
    head = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).get_output_embeddings().weight.detach()

    def plain(whole: tuple[int, ...], text: list[int], k: int) -> tuple[list[int], float]:
        states, embedding = hidden_states(target, whole)
        return drafts_by_hand(states[-1][: len(text) - 1], embedding, head, text, k)

    drafted.found = [(text, draft) for text, draft in drafted.found if text[:9] != load[0].prompt]  # limited
    assert num_compared(drafted, load, outputs, plain) > 30 and speculation_of(engine).num_draft_tokens > 60
