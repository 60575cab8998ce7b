"""The engine around the batch: requests come, stream, fail, are aborted and leave nothing behind."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from folovllm import LLM, BeamSearchParams, SamplingParams
from folovllm.engine.long_prompts import encode_within
from folovllm.outputs import RequestOutput
from folovllm.request import child_seed
from folovllm.step.schedule import NothingScheduled, SchedulerOutput
from tests.helpers import prompts, tiny_checkpoint
from tests.workloads import MAX_MODEL_LEN, assert_nothing_left, finish, make_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_checkpoint()


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), milestone="m2", max_model_len=MAX_MODEL_LEN, device="cpu", use_tqdm=False) as llm:
        yield llm


def alone(llm: LLM, prompt: Any, params: SamplingParams) -> list[int]:
    """What nobody shares a batch with."""
    assert_nothing_left(llm.engine)
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids


def test_n_answers_are_n_sequences_with_their_own_seeds(model: Path, llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    engine = make_engine(model)
    engine.add_request("r", [1, 2, 3], params, stream=False)
    engine.step()
    assert engine.stats().running == 3
    answers = [answer.token_ids for answer in finish(engine)["r"].outputs]
    for index, answer in enumerate(answers):
        own = SamplingParams(temperature=1.0, seed=child_seed(5, index), max_tokens=8, ignore_eos=True)
        assert answer == alone(llm, [1, 2, 3], own)
    assert len({tuple(answer) for answer in answers}) == 3


def test_snapshots_of_steps(model: Path) -> None:
    engine = make_engine(model, max_num_seqs=2)
    engine.history = []
    for name, prompt in zip("abc", prompts([4, 7, 3]), strict=True):
        engine.add_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    finish(engine)
    seen = [(s.waiting, s.running, s.num_prefill_tokens, s.num_decode_tokens) for s in engine.history]
    assert seen == [(1, 2, 11, 0), (1, 2, 0, 2), (1, 2, 0, 2), (0, 1, 3, 0), (0, 1, 0, 1), (0, 1, 0, 1)]
    assert engine.history[0].scheduled_seqs == (("a", 0, 0, 4), ("b", 0, 0, 7))
    assert engine.history[1].scheduled_seqs == (("a", 0, 4, 1), ("b", 0, 7, 1))
    assert [s.index for s in engine.history] == list(range(6)) and all(s.seconds > 0 for s in engine.history)


def test_what_slots_waste(model: Path) -> None:
    engine = make_engine(model, max_num_seqs=4)
    per_token = 2 * 3 * 2 * 32 * 4  # K and V, 3 layers, 2 heads of 32, float32
    stats = engine.stats()
    assert (stats.kv_blocks_total, stats.kv_blocks_used) == (4, 0)
    assert stats.kv_bytes_total == 4 * MAX_MODEL_LEN * per_token and stats.kv_waste == 0
    for name, prompt in zip("ab", prompts([10, 22]), strict=True):
        engine.add_request(name, prompt, LONG)
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.kv_blocks_used, stats.kv_tokens_stored) == (2, 2, 32)
    assert stats.kv_bytes_reserved == 2 * MAX_MODEL_LEN * per_token and stats.kv_bytes_used == 32 * per_token
    assert stats.kv_waste == 1 - 32 / (2 * MAX_MODEL_LEN)
    for name in "ab":
        engine.abort_request(name)
    assert_nothing_left(engine)


def test_memory_bounds_the_batch(model: Path) -> None:
    per_slot = MAX_MODEL_LEN * 2 * 3 * 2 * 32 * 4
    engine = make_engine(model, max_num_seqs=8, kv_cache_memory=3 * per_slot + 1)
    assert engine.stats().kv_blocks_total == 3
    for i in range(5):
        engine.add_request(str(i), [1, 2, 3], LONG)
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (3, 2)
    with pytest.raises(ValueError, match="less than one sequence of max_model_len"):
        make_engine(model, kv_cache_memory=per_slot - 1)


class TestAborts:
    def test_one_that_runs(self, model: Path, llm: LLM) -> None:
        """Its slot goes to the one that waits, at once; the other does not notice."""
        engine = make_engine(model, max_num_seqs=2)
        requests = dict(zip("abc", prompts([5, 6, 7]), strict=True))
        for name, prompt in requests.items():
            engine.add_request(name, prompt, GREEDY)
        engine.step()
        engine.step()
        partial = engine.abort_request("a")
        assert partial.finished and partial.outputs[0].finish_reason == "abort"
        assert partial.outputs[0].token_ids == alone(llm, requests["a"], GREEDY)[:2]
        engine.step()
        assert (engine.stats().running, engine.stats().waiting) == (2, 0)
        rest = finish(engine)
        for name in "bc":
            assert rest[name].outputs[0].token_ids == alone(llm, requests[name], GREEDY)
        assert_nothing_left(engine)

    def test_some_of_n_have_finished(self, model: Path) -> None:
        engine = make_engine(model)
        stops = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=60, stop_token_ids=list(range(0, 250, 9)))
        engine.add_request("r", [1, 2, 3], stops)
        while engine.has_unfinished_requests() and len(engine.scheduler.running) in (0, 4):
            engine.step()
        reasons = {answer.finish_reason for answer in engine.abort_request("r").outputs}
        assert reasons == {"stop", "abort"}
        assert_nothing_left(engine)

    def test_ctrl_c_waits_for_the_end_of_a_step(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        """Even in the step that ends an answer, before `generate` has seen it."""
        step = llm.engine.step

        def interrupted() -> list[RequestOutput]:
            if outputs := step():
                os.kill(os.getpid(), signal.SIGINT)
            return outputs

        monkeypatch.setattr(llm.engine, "step", interrupted)
        answered: list[str | None] = []
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["b", "a"], [GREEDY, LONG], on_answer=lambda output: answered.append(output.prompt))
        assert answered == ["b"], "what had been answered has come by on_answer"
        assert_nothing_left(llm.engine)
        monkeypatch.undo()
        assert llm.generate(["c"], GREEDY)[0].outputs[0].token_ids, "the next call works"

    def test_ctrl_c_is_heard_while_prompts_are_added(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        add = llm.engine.add_request
        added: list[str] = []

        def interrupted(request_id: str, *rest: Any, **options: Any) -> None:
            if not added:  # a second one acts as ever
                os.kill(os.getpid(), signal.SIGINT)
            added.append(request_id)
            add(request_id, *rest, **options)

        monkeypatch.setattr(llm.engine, "add_request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], LONG, use_tqdm=False)
        assert_nothing_left(llm.engine)


def test_answers_come_in_the_order_of_the_prompts_as_soon_as_they_can(llm: LLM) -> None:
    seen: list[tuple[str | None, bool]] = []
    params = [replace(GREEDY, max_tokens=n) for n in (3, 1, 9, 2)]
    outputs = llm.generate(
        ["a", "b", "c", "d"], params, use_tqdm=False,
        on_answer=lambda output: seen.append((output.prompt, llm.engine.has_unfinished_requests())),
    )  # fmt: skip
    assert [prompt for prompt, _ in seen] == [output.prompt for output in outputs] == ["a", "b", "c", "d"]
    assert [len(output["token_ids"]) for output in outputs] == [3, 1, 9, 2]
    assert [goes_on for _, goes_on in seen] == [True, True, False, False], "a and b are there while c is written"


class TestOneCallAtATime:
    """A call beside another one is refused at once, and neither loses anything."""

    CALLS: ClassVar = {
        "generate": lambda llm: llm.generate("a", GREEDY),
        "beam_search": lambda llm: llm.beam_search(["a"], BeamSearchParams(beam_width=1, max_tokens=2)),
        "update_weights": lambda llm: llm.update_weights({}),
        "get_weights": lambda llm: llm.get_weights(),
        "sleep": lambda llm: llm.sleep(),
        "wake_up": lambda llm: llm.wake_up(),
        "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
        "close": lambda llm: llm.close(),
        "the engine's own generate": lambda llm: llm.engine.generate("a", GREEDY),
    }

    @pytest.mark.parametrize("name", CALLS)
    def test_from_a_second_thread(self, llm: LLM, name: str) -> None:
        alone = llm.generate(["a", "b"], GREEDY)
        refused: list[str] = []

        def beside(output: RequestOutput) -> None:
            with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError) as error:
                pool.submit(self.CALLS[name], llm).result()
            refused.append(str(error.value))

        answers = llm.generate(["a", "b"], GREEDY, on_answer=beside)
        assert [o["token_ids"] for o in answers] == [o["token_ids"] for o in alone]
        assert len(refused) == 2 and all("one call at a time" in said for said in refused)
        assert_nothing_left(llm.engine)

    def test_beside_the_engines_own_generate(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(llm.engine, "step", llm.close)
        with pytest.raises(RuntimeError, match="one call at a time"):
            llm.engine.generate("a", GREEDY)

    def test_from_within_on_answer(self, llm: LLM) -> None:
        with pytest.raises(RuntimeError, match="one call at a time"):
            llm.generate("a", GREEDY, on_answer=lambda output: llm.generate("b", GREEDY))
        assert_nothing_left(llm.engine)
        assert llm.generate("a", GREEDY)[0].finished


class TestFarTooLong:
    """A text of megabytes is refused by its beginning."""

    @pytest.mark.parametrize("as_chat", [False, True])
    def test_it_is_not_read_to_its_end(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, as_chat: bool) -> None:
        encode = llm.tokenizer.encode
        lengths: list[int] = []

        def counted(text: str, **options: Any) -> Any:
            lengths.append(len(text))
            return encode(text, **options)

        monkeypatch.setattr(llm.tokenizer, "encode", counted)
        text = "word " * 1_000_000
        with pytest.raises(ValueError, match=f"more than {MAX_MODEL_LEN} tokens"):
            llm.render_chat([{"role": "user", "content": text}]) if as_chat else llm.generate(text)
        assert 0 < sum(lengths) < 20_000

    def test_a_long_text_of_few_tokens_is_served(self) -> None:
        class Tokenizer:
            def encode(self, text: str) -> list[int]:
                return [1] * (len(text) // 1000)

        assert encode_within(20, cast("Any", Tokenizer()), "x" * 15_000) == [1] * 15


def test_a_budget_too_small_for_the_longest_prompt(model: Path) -> None:
    with pytest.raises(ValueError, match="could never be computed in one step"):
        make_engine(model, max_num_batched_tokens=MAX_MODEL_LEN - 1)


@pytest.mark.parametrize("fields", [
    {"milestone": "m2"},
    pytest.param({"milestone": "m6"}, marks=pytest.mark.m6),
    pytest.param({"milestone": "m6", "async_scheduling": False}, marks=pytest.mark.m6),
])  # fmt: skip
def test_a_scheduler_that_lets_nobody_in(model: Path, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, not a loop without end."""
    engine = make_engine(model, **fields)
    engine.add_request("a", [1, 2, 3])
    monkeypatch.setattr(engine.scheduler, "schedule", SchedulerOutput)
    with pytest.raises(NothingScheduled, match="lets none of them in"):
        engine.step()
    engine.abort_request("a")
    assert engine.step() == []
    engine.close()


def test_the_longest_answer_that_fits(model: Path, llm: LLM) -> None:
    """max_tokens beyond the context is cut to it: the last place in the slot is used, and none after it."""
    prompt = prompts([MAX_MODEL_LEN - 3])[0]
    answer = alone(llm, prompt, LONG)
    assert len(answer) == 3 and llm.generate([prompt], replace(LONG, max_tokens=None))[0]["finish_reason"] == "length"
    one_slot = make_engine(model, max_num_seqs=2)  # the next slot belongs to somebody else
    one_slot.add_request("full", prompt, LONG, stream=False)
    one_slot.add_request("other", [1, 2, 3], GREEDY, stream=False)
    outputs = finish(one_slot)
    assert outputs["full"].outputs[0].token_ids == answer
    assert outputs["other"].outputs[0].token_ids == alone(llm, [1, 2, 3], GREEDY)
