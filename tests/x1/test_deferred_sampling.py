"""A draw that waits for its masks, on the device where it matters: each step draws with its own masks and no other's.

Without a GPU the same tests run over the captured steps of a CPU, those of `TestOnAGPU` aside.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from folovllm.config import EngineConfig
from folovllm.electives.structured_output import masked_executor
from folovllm.engine.llm_engine import LLMEngine, make_engine
from folovllm.outputs import RequestOutput
from folovllm.request import Sequence
from folovllm.sample.sampling_row import mask_of, mask_width
from folovllm.sampling_params import SamplingParams
from folovllm.step.bitmasks import TokenBitmasks
from folovllm.step.schedule import SchedulerOutput
from folovllm.worker.step_graph import SLOTS, CudaGraph, HostRing
from tests.helpers import VOCAB_SIZE, prompts, tiny_checkpoint
from tests.m6.devices import DEVICE
from tests.m6.test_overlap import MODES, assert_clean, essence
from tests.m6.test_sampling_rows import forbid_waits
from tests.workloads import Request, serve

needs_llguidance = pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance")
LARGE = 151_936 if DEVICE == "cuda" else VOCAB_SIZE  # Qwen3's: masks of 19 KB a row
NUM_SEQS = 40 if DEVICE == "cuda" else 12
LONGEST = 45 if DEVICE == "cuda" else 24


def engine(**overrides: Any) -> LLMEngine:
    fields = {"milestone": "m6", "max_model_len": 200, "max_num_seqs": NUM_SEQS, "device": DEVICE, "dtype": "float32"}
    vocab_size = overrides.pop("vocab_size", VOCAB_SIZE)
    overrides = {"model": str(tiny_checkpoint(vocab_size=vocab_size)), "use_tqdm": False} | overrides
    if DEVICE == "cuda":
        overrides = {"attention_backend": "triton"} | overrides
    return make_engine(EngineConfig(**(fields | overrides)))


FORM = {"choice": ["x"]}  # makes a request one whose draws wait; `Script` says what they may draw


class Script:
    """In place of the manager: each answer must draw one certain token next, known only once all before it have come."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._sampled: dict[int, list[int]] = defaultdict(list)  # by `seq_id`

    def next(self, num_prompt_tokens: int, drawn: list[int]) -> int:
        """It depends on whose it is, on its place and on the token before: a mask that is late or another's shows."""
        last = drawn[-1] if drawn else 0
        return (7919 * len(drawn) + 104_729 * num_prompt_tokens + 31 * last) % self._vocab_size

    def check(self, requests: list[Request], outputs: list[RequestOutput]) -> None:
        """That each answer with a form has all of its tokens, and no other's."""
        for request, output in zip(requests, outputs, strict=True):
            if request.params.structured_outputs is not None:
                drawn: list[int] = []
                for _ in range(request.params.max_tokens or 0):
                    drawn.append(self.next(len(request.prompt), drawn))
                assert output.outputs[0].token_ids == drawn

    def add(self, seqs: SequenceOf[Sequence]) -> None:
        pass

    def needs_mask(self, output: SchedulerOutput, seqs: SequenceOf[Sequence]) -> bool:
        return any(
            scheduled.num_samples and has_grammar(seq)
            for scheduled, seq in zip(output.scheduled_seqs, seqs, strict=True)
        )

    def bitmasks(self, output: SchedulerOutput, seqs: SequenceOf[Sequence]) -> TokenBitmasks:
        pairs = zip(output.scheduled_seqs, seqs, strict=True)
        drawn = [(scheduled.row, seq) for scheduled, seq in pairs if scheduled.num_samples and has_grammar(seq)]
        bits = np.zeros((len(drawn), mask_width(self._vocab_size)), np.int32)
        for i, (_, seq) in enumerate(drawn):
            bits[i] = mask_of([self.next(seq.num_prompt_tokens, self._sampled[seq.seq_id])], self._vocab_size)
        return TokenBitmasks(np.array([row for row, _ in drawn], np.int32), bits)

    def accept_tokens(self, seqs: Iterable[Sequence], token_ids: Iterable[list[int]]) -> None:
        for seq, tokens in zip(seqs, token_ids, strict=True):
            self._sampled[seq.seq_id] += tokens

    def broken(self, seqs: Iterable[Sequence]) -> list[Sequence]:
        return []


def has_grammar(seq: Sequence) -> bool:
    return seq.params.structured_outputs is not None


def scripted(**overrides: Any) -> tuple[LLMEngine, Script]:
    served = engine(vocab_size=LARGE, **overrides)
    script = Script(LARGE)
    masked_executor._managers[served] = script  # type: ignore[assignment]
    return served, script


def written_and_free(count: int = NUM_SEQS + 8) -> list[Request]:
    """Half of them with a form; answers of 1 to `LONGEST` tokens, so that batches take every width on their way down."""
    rng = random.Random(5)
    requests = []
    for i, prompt in enumerate(prompts([rng.randrange(1, 40) for _ in range(count)], seed=6)):
        fields: dict[str, Any] = {"structured_outputs": FORM} if i % 2 else {}
        fields |= [{}, {"top_k": 20, "top_p": 0.9}, {"presence_penalty": 0.7}][i % 3]
        params = SamplingParams(
            max_tokens=1 + rng.randrange(LONGEST), ignore_eos=True, temperature=0.9, seed=i, **fields
        )
        requests.append(Request(prompt, params))
    return requests


class TestEveryStepsOwnMasks:
    """Scripted: with masks of one token each the answers are known, whatever the model says."""

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("arrival", ["at_once", "random_steps"])
    def test_every_token_is_the_one_that_was_allowed(self, mode: str, arrival: str) -> None:
        served, script = scripted(**MODES[mode])
        requests = written_and_free()
        script.check(requests, serve(served, requests, arrival))
        assert_clean(served)

    @pytest.mark.parametrize("mode", MODES)
    def test_who_is_beside_draws_what_it_draws_alone(self, mode: str) -> None:
        served, _ = scripted(**MODES[mode])
        requests = written_and_free()
        together = serve(served, requests)
        alone = serve(served, free := [request for request in requests if request.params.structured_outputs is None])
        beside = [o for o, request in zip(together, requests, strict=True) if request.params.structured_outputs is None]
        assert len(free) >= 10
        for one, other in zip(beside, alone, strict=True):
            assert essence(one) == essence(other)

    def test_small_cache(self) -> None:
        """Preemption and chunks: a sequence comes back to another row, and draws on."""
        served, script = scripted(block_size=16, num_kv_blocks=4 * NUM_SEQS // 3, max_num_batched_tokens=48)
        requests = written_and_free()
        script.check(requests, serve(served, requests))
        assert served.stats().preemptions > 0
        assert_clean(served)


def choices() -> list[Request]:
    """Texts of a real form, some with all else that a request may ask for; free ones between them."""
    rng = random.Random(1)
    texts = ["".join(rng.choices("abcd", k=rng.randrange(4, 30))) for _ in range(40)]
    kinds: list[dict[str, Any]] = [
        {"structured_outputs": {"choice": texts}},
        {},
        {"structured_outputs": {"choice": texts}, "presence_penalty": 0.8, "repetition_penalty": 1.3, "logprobs": 2},
        {"top_p": 0.8, "frequency_penalty": 1.0},
        {"structured_outputs": {"choice": texts}, "top_k": 2, "min_tokens": 12},
        {"logit_bias": {70: 4.0}, "bad_words": ["a", "bc"], "logprobs": 0},
        {"structured_outputs": {"choice": texts}, "logit_bias": {64: 9.0}, "n": 3},
    ]
    return [
        Request(prompt, SamplingParams(seed=i, max_tokens=40, **kinds[i % len(kinds)]))
        for i, prompt in enumerate(prompts([1 + 3 * i for i in range(21)], seed=8))
    ]


def grammars() -> list[Request]:
    """What llguidance holds answers to, and free ones between them."""
    from tests.x1.test_structured import INPUTS, MIXED

    return [Request(prompt, params) for prompt, params in zip(INPUTS, MIXED, strict=True)]


FORMS = [pytest.param(choices, id="choice"), pytest.param(grammars, id="llguidance", marks=needs_llguidance)]


@pytest.mark.gpu
class TestOnAGPU:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("asked", FORMS)
    def test_answers_are_those_of_m5(self, asked: Any, mode: str) -> None:
        """Which draws with torch, a step at a time, on the same card: forms, seeds, penalties, and who is beside."""
        requests = asked()
        expected = serve(engine(milestone="m5"), requests)
        served = engine(**MODES[mode])
        for request, mine, other in zip(requests, serve(served, requests, "random_steps"), expected, strict=True):
            assert essence(mine) == essence(other), request.params
            form = request.params.structured_outputs
            if form is not None and form.choice is not None:
                texts = {answer.text for answer in mine.outputs if answer.finish_reason == "stop"}
                assert texts and texts <= {*form.choice}
        assert_clean(served)

    def test_nothing_is_captured_and_nothing_waits_while_it_serves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A late step costs others no stall: all its graphs are there, and the host never waits for the device in it."""
        served, script = scripted()
        monkeypatch.setattr(CudaGraph, "capture", None)
        forbid_waits(monkeypatch, served.executor._worker.runner, "execute_model")
        requests = written_and_free()
        script.check(requests, serve(served, requests))

    def test_two_engines_at_once(self) -> None:
        """Each in a thread of its own, on one card."""
        right: list[bool] = []

        def work() -> None:
            served, script = engines.pop()
            requests = written_and_free()
            script.check(requests, serve(served, requests))
            right.append(True)

        engines = [scripted(num_kv_blocks=600), scripted(num_kv_blocks=600)]
        threads = [threading.Thread(target=work) for _ in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert right == [True, True]

    def test_no_buffer_is_used_again_too_early(self) -> None:
        """The device is far behind: what was put aside for it is still there when it comes to it."""
        device = torch.device("cuda")
        ring = HostRing(torch.int32, device)
        torch.cuda._sleep(1_000_000)
        sizes = [1 + 977 * i % 5000 for i in range(5 * SLOTS)]
        copies = []
        for i, size in enumerate(sizes):
            torch.cuda._sleep(200_000)
            copies.append(ring.to_device(np.full(size, i, np.int32)))
        for i, (size, copy) in enumerate(zip(sizes, copies, strict=True)):
            assert copy.tolist() == [i] * size
