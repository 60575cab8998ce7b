"""A head of 16 bits beside a model in codes: the text is the model's own, and drafts come from the hidden states that it has."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import prompts
from tests.workloads import Request, serve
from tests.x2.quantized import FP8_WIDE, INT4_KINDS, tiny, write_quantized
from tests.x3.eagle_folders import write_head
from tests.x3.engines import Pair, make_engine, speculation_of
from tests.x3.test_eagle3 import FEW, GREEDY, Drafted, check_drafts, eagle, only
from tests.x3.test_mtp import a_model, mtp
from tests.x5.checkpoints import hybrid_checkpoint

KINDS = {"fp8": FP8_WIDE, "int4": INT4_KINDS["gptq"]}
LOAD = [Request(one, GREEDY) for one in prompts([9, 14, 5], seed=8)]


@pytest.mark.parametrize("kind", KINDS)
def test_eagle3(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drafts are those of the definition, over the floats that the codes stand for."""
    quantize, config = KINDS[kind]
    coded, floats = write_quantized(tiny(), tmp_path / "model", quantize, config)
    pair = Pair.of(LOAD, model=str(coded), milestone="m6", block_size=4)
    folder, drafted = only(write_head(tmp_path / "head", coded), FEW), Drafted().watch(monkeypatch)
    outputs = serve(make_engine(**pair.fields, **eagle(folder)), LOAD)
    pair.check(outputs)
    assert check_drafts(drafted, folder, floats, LOAD, outputs) > 20


@pytest.mark.parametrize("kind", KINDS)
def test_mtp(kind: str) -> None:
    """Weights are from chance where a checkpoint cannot be put into codes as it is read."""
    wide = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64, "linear_value_head_dim": 32}
    model = a_model() if kind == "fp8" else hybrid_checkpoint("qwen3_5_text", "LF", num_heads=2, num_kv_heads=1, **wide)
    fields: dict[str, Any] = {"quantization": kind, "random_weights": kind != "fp8"}
    pair = Pair.of(LOAD, model=str(model), milestone="m6", block_size=4, **fields)
    engine = make_engine(**pair.fields, **mtp())
    pair.check(serve(engine, LOAD))
    assert speculation_of(engine).num_draft_tokens > 20
