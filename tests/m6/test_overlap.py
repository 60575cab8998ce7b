"""One step late, and nobody notices. (That the answers are M1's: `test_sampling_rows.py`.)"""

import gc
import weakref
from typing import Any

import pytest
import torch

from folovllm.cache.block_manager import BlockManager
from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine, make_engine
from folovllm.engine.scheduler import Scheduler, chunk, preempt, unless_finished
from folovllm.outputs import RequestOutput
from folovllm.sampling_params import SamplingParams
from tests.helpers import prompts, tiny_checkpoint
from tests.sequences import make_seq
from tests.workloads import KINDS, MAX_MODEL_LEN, assert_nothing_left, serve, workload

COUNT = 16  # of requests: more than any engine here has room for at once
MODES = {
    "overlap and graphs": {},
    "overlap alone": {"enforce_eager": True},
    "graphs alone": {"async_scheduling": False},
}


def engine(**overrides: Any) -> LLMEngine:
    fields = {"milestone": "m6", "max_model_len": MAX_MODEL_LEN, "device": "cpu", "use_tqdm": False, "max_num_seqs": 24}
    return make_engine(EngineConfig(**({"model": str(tiny_checkpoint())} | fields | overrides)))


def assert_clean(served: LLMEngine) -> None:
    """Nothing is held: no block, no row, no step in flight."""
    assert_nothing_left(served)
    rows = served.scheduler._rows
    rows.release([])
    assert len(rows._free) == served.setup.max_num_seqs
    assert getattr(served.loop, "_in_flight", None) is None


def test_a_decode_that_may_need_a_block_waits_where_none_is_free() -> None:
    for num_blocks, waits in ((1, True), (2, False)):
        kv = BlockManager(num_blocks, 4)
        scheduler = Scheduler(kv, 1, 8, unless_finished(chunk), preempt)
        scheduler.add(make_seq(4))
        assert scheduler.schedule().num_tokens == 4 and kv.num_free == num_blocks - 1
        assert scheduler.must_wait() == waits, "its next token begins a block; to give way, it must know all its tokens"


def essence(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(o.text, o.token_ids, o.finish_reason, o.stop_reason) for o in output.outputs]


def test_length_costs_no_step_and_a_stop_one() -> None:
    """Four tokens, known beforehand, take four steps; when a stop token is met, one step more was under way.

    Each token is streamed once.
    """
    prompt, served, steps = prompts([9])[0], engine(), list[int]()
    submit = served.executor.submit
    served.executor.submit = lambda output: steps.append(output.num_tokens) or submit(output)

    def answer_to(**params: Any) -> list[int]:
        served.add_request("a", prompt, SamplingParams(temperature=0, **params))
        text, ids, last = "", [], None
        while served.has_unfinished_requests():
            for last in served.step():
                text, ids = text + last.outputs[0].delta_text, ids + last.outputs[0].delta_token_ids
        assert last is not None and (text, ids) == (last.outputs[0].text, last.outputs[0].token_ids)
        return ids

    answer = answer_to(max_tokens=4, ignore_eos=True)
    assert steps == [9, 1, 1, 1]
    steps.clear()
    served.reset_prefix_cache()
    last = next(i for i in (3, 2, 1) if answer[i] not in answer[:i])
    assert len(answer_to(max_tokens=20, stop_token_ids=[answer[last]])) == last + 1
    assert steps == [9, *[1] * (last + 1)]  # one more than tokens: it was started before the last token arrived
    assert_clean(served)


def test_what_cannot_be_captured_is_eager(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from folovllm.attention.backends.torch_paged import TorchPagedBackend

    monkeypatch.setattr(TorchPagedBackend, "supports_graph", classmethod(lambda cls, device: False))
    load, served = workload("greedy", COUNT), engine()
    assert "cannot be captured" in caplog.text
    load.check(serve(served, load.requests))


def test_an_engine_that_was_dropped_without_close_is_collected(real_freezing: None) -> None:
    """What is frozen would never be: not the blocks, and not a model that a captured step on a CPU refers to."""
    served = engine(max_num_seqs=2)
    served.add_request("r", [5, 6, 7], SamplingParams(max_tokens=4), stream=False)
    while served.has_unfinished_requests():
        served.step()
    held = [*map(weakref.ref, (served, served.scheduler, served.executor._worker.runner.model))]
    assert all(ref() is not None for ref in held)
    del served
    gc.collect()
    assert [ref() for ref in held] == [None] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind: str) -> None:
    load = workload(kind)
    served = engine(device="cuda", dtype="float32", attention_backend="triton")
    torch.cuda.synchronize()
    load.check(serve(served, load.requests), tol=0.05)
    assert_clean(served)
