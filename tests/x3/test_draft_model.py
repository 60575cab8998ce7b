"""A draft model drafts what it would write alone, whatever was accepted or rejected before."""

import weakref
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from folovllm.config import EngineConfig
from folovllm.electives.spec_decode.draft_model import DraftModel
from folovllm.electives.spec_decode.extension import make_draft_executor, make_draft_tokens
from folovllm.electives.spec_decode.proposer import RowState
from folovllm.engine.setup import set_up
from folovllm.llm import LLM
from folovllm.sampling_params import SamplingParams
from folovllm.step.schedule import SamplingSpec
from folovllm.worker.device_tables import DeviceTables
from tests.helpers import VOCAB_SIZE, tiny_checkpoint

LENGTH, BLOCK, BUDGET = 64, 4, 24
SAMPLING = {
    "greedy": SamplingSpec(temperature=0),
    "noise": SamplingSpec(seed=7, temperature=0.9),
    "seeded": SamplingSpec(seed=7, temperature=0.8, top_k=50, logprobs=2),
}


def drafter(num_blocks: int = 64, max_num_seqs: int = 3, by_name: bool = False, **fields: Any) -> DraftModel:
    config = EngineConfig(
        model=str(tiny_checkpoint()), milestone="m6", enable_prefix_caching=False, max_model_len=LENGTH, dtype="float32",
        max_num_seqs=max_num_seqs, max_num_batched_tokens=BUDGET, block_size=BLOCK, num_kv_blocks=num_blocks, use_tqdm=False,
        **{"device": "cpu", **fields},
    )  # fmt: skip
    setup = set_up(config)
    return DraftModel(make_draft_executor(setup, make_draft_tokens(setup, 13)), setup, by_name)


@pytest.fixture(scope="module")
def alone() -> LLM:
    return LLM(str(tiny_checkpoint()), milestone="m3", device="cpu", max_model_len=LENGTH, use_tqdm=False)


def written(alone: LLM, state: RowState, k: int) -> list[int]:
    """What the model writes behind the text by itself."""
    spec = state.sampling
    kept = {"temperature": spec.temperature, "top_k": spec.top_k, "seed": spec.seed}
    params = SamplingParams(**kept, max_tokens=k, ignore_eos=True)
    return list(alone.generate([state.token_ids.tolist()], params)[0].outputs[0].token_ids)


UNPACK = DeviceTables._unpack


def unpacked_as_on_a_gpu(tables: DeviceTables, fields: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """With somebody else's block in each entry behind the sequence: the kernel leaves them as they are."""
    input_ids, positions, slots, blocks = UNPACK(tables, fields)
    behind = torch.arange(blocks.shape[1], device=blocks.device) > positions[:, None] // BLOCK
    return input_ids, positions, slots, blocks.masked_fill(behind, 1)


def state(seq_id: int, tokens: list[int], spec: SamplingSpec) -> RowState:
    return RowState(seq_id, np.array(tokens, np.int32), 1, spec)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("how", "by_name", "eager"), [
    ("greedy", False, False), ("seeded", True, False), ("noise", True, False), ("noise", False, True),
])  # fmt: skip
def test_drafts_are_what_the_model_writes(
    alone: LLM, how: str, by_name: bool, eager: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts grow by part of the draft and a token of another's; some are not asked, some are short of blocks, and some end."""
    if device == "cuda":
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(DeviceTables, "_unpack", unpacked_as_on_a_gpu)
    rng, proposer = Random(3), drafter(num_blocks=25, by_name=by_name, device=device, enforce_eager=eager)
    texts = {i: [rng.randrange(VOCAB_SIZE) for _ in range(n)] for i, n in enumerate((1, 9, 30))}
    num_draft_tokens = 0
    for turn in range(12):
        if turn == 6:  # another sequence gets the row of the longest one
            proposer.finish(2)
            texts[3] = texts.pop(2)[:3]
        ids = [i for i in texts if rng.random() < 0.8 or turn == 0]
        states = [state(i, texts[i], SAMPLING[how]) for i in ids]
        ks = [rng.choice((0, 1, 2, 5)) for _ in ids]
        for now, k, draft in zip(states, ks, proposer.propose_all(states, ks), strict=True):
            assert len(draft) in (0, k)
            assert all((token >= VOCAB_SIZE) == by_name for token in draft)
            draft = proposer.resolve(draft)
            num_draft_tokens += len(draft)
            if draft:
                assert draft == written(alone, now, k), f"turn {turn}, sequence {now.seq_id}"
            kept = rng.randint(0, len(draft))
            texts[now.seq_id] += [*draft[:kept], rng.randrange(VOCAB_SIZE)]
    assert num_draft_tokens > 30


def test_many_drafts_at_once(alone: LLM) -> None:
    proposer, now = drafter(), state(0, [5, 6, 7], SAMPLING["greedy"])
    assert proposer.propose(now, 12) == written(alone, now, 12), "more steps than an executor keeps in flight"


def test_a_text_beyond_the_budget_takes_several_calls(alone: LLM) -> None:
    proposer, now = drafter(), state(0, [i % VOCAB_SIZE for i in range(40)], SAMPLING["greedy"])
    assert proposer.propose(now, 2) == [], "24 tokens a step: 16 are left to compute"
    assert proposer.propose(now, 2) == written(alone, now, 2)


def test_who_is_not_asked_makes_room(alone: LLM) -> None:
    proposer = drafter(num_blocks=17, max_num_seqs=2)
    states = [state(i, [i + 1] * 20, SAMPLING["greedy"]) for i in range(3)]
    for now in states + states[:1]:
        assert proposer.propose(now, 3) == written(alone, now, 3)
    assert [bool(draft) for draft in proposer.propose_all(states, [3, 3, 3])].count(True) == 2, "2 rows, 3 sequences"
    for now in states:
        proposer.finish(now.seq_id)
    assert (len(proposer._rows), len(proposer._free)) == (2, 16), "rows and blocks come back"


def test_a_chain_writes_to_no_block_of_another_sequence(alone: LLM) -> None:
    """It goes on behind what was asked for one that gets few tokens beside one that gets many, in a row that another had."""
    proposer, spec = drafter(num_blocks=16), SAMPLING["greedy"]
    long, texts = [i % VOCAB_SIZE for i in range(20)], {seq_id: [5 + seq_id, 6, 7] for seq_id in (1, 2)}
    proposer.propose_all([state(0, long, spec), state(1, texts[1], spec)], [2, 2])
    proposer.finish(0)
    texts[1] += long[3:]
    proposer.propose(state(1, texts[1], spec), 2)  # with blocks that were those of 0
    both = [state(seq_id, text, spec) for seq_id, text in texts.items()]
    for _ in range(2):
        drafts = proposer.propose_all(both, [12, 1])
        assert drafts == [written(alone, both[0], 12), written(alone, both[1], 1)]


def test_no_draft_token_beyond_the_context() -> None:
    proposer = drafter()
    assert proposer.propose(state(0, [1] * (LENGTH - 1), SAMPLING["greedy"]), 3) == []


@pytest.mark.parametrize(("milestone", "method"), [("m3", "draft_model"), ("m6", "ngram+draft_model")])
def test_a_closed_engine_holds_no_draft_weights(milestone: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while somebody holds the engine. An engine of the same process may need the memory."""
    made: list[DraftModel] = []
    begin = DraftModel.__init__
    monkeypatch.setattr(DraftModel, "__init__", lambda self, *a, **k: made.append(self) or begin(self, *a, **k))
    model = str(tiny_checkpoint())
    config = {"method": method, "model": model, "num_speculative_tokens": 3, "adaptive": method == "draft_model"}
    fields: dict[str, Any] = {"milestone": milestone, "device": "cpu", "max_model_len": LENGTH, "use_tqdm": False}
    llm = LLM(model, **fields, max_num_seqs=2, speculative_config=config)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    weights = weakref.ref(made[0]._executor._worker.runner.model)
    llm.close()
    llm.close()
    assert weights() is None
