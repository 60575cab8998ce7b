"""Whatever satisfies `DraftHead` can draft: here a double that is no elective's."""

from __future__ import annotations

from pathlib import Path
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
from tests.x3.test_eagle3 import CLOSE, FEW, Drafted, hidden_states

MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}}


def head_of(target: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return model.get_output_embeddings().weight.detach()


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
    fields: dict[str, Any] = {
        "milestone": preset,
        "model": str(target),
        **({} if preset == "m2" else {"block_size": 4}),
    }
    pair, drafted = Pair.of(load, **fields), Drafted().watch(monkeypatch)
    engine = make_engine(**fields, **MTP)
    outputs = serve(engine, load)
    pair.check(outputs)
    if family != "qwen3":
        return
    texts = [[*one.prompt, *out.outputs[0].token_ids] for one, out in zip(load, outputs, strict=True)]
    head, count = head_of(target), 0
    for text, draft in drafted.found:
        number, whole = next((i, tuple(one)) for i, one in enumerate(texts) if one[: len(text)] == text)
        if number == 0:
            continue  # its drafts are limited to some tokens
        states, embedding = hidden_states(target, whole)
        wanted, margin = drafts_by_hand(states[-1][: len(text) - 1], embedding, head, text, len(draft))
        if margin > CLOSE:
            assert draft == wanted, f"behind {len(text)} tokens"
            count += len(draft)
    assert count > 30 and speculation_of(engine).num_draft_tokens > 60
