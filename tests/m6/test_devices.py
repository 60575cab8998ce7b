"""Which device is the current one belongs to a thread; an engine keeps to its own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from folovllm import LLM, SamplingParams
from folovllm.worker.gpu_worker import GPUWorker
from tests.helpers import prompts, tiny_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Recorder:
    """A runner that notes which device was the current one."""

    def __init__(self, entered: list[torch.device]) -> None:
        self.entered = entered
        self.seen: list[list[torch.device]] = []

    def load_model(self) -> None:
        self.seen.append(list(self.entered))

    def initialize_kv_cache(self) -> int:
        self.seen.append(list(self.entered))
        return 3

    def execute_model(self, step: str) -> str:
        self.seen.append(list(self.entered))
        return step


def test_each_call_runs_under_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading, and steps from this thread and from another, with a device that only says it is entered."""
    entered: list[torch.device] = []

    @contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.remove(device)

    monkeypatch.setattr(torch.cuda, "device", enter)
    runner, device = Recorder(entered), torch.device("cuda", 1)
    worker = GPUWorker(device, runner)
    worker.load_model()
    assert worker.execute_model("a") == "a" and worker.num_kv_blocks == 3
    thread = threading.Thread(target=worker.execute_model, args=["b"])
    thread.start()
    thread.join()
    assert runner.seen == [[device]] * 4 and entered == []


def test_what_torch_keeps_goes_back_to_the_card_before_there_are_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the cache of an engine that is closed weights would hold all of it: no room would be found for the next cache."""
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("given back"))
    runner = Recorder([])
    monkeypatch.setattr(runner, "load_model", lambda: order.append("weights"))
    GPUWorker(torch.device("cuda"), runner).load_model()
    assert order == ["given back", "weights"]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("milestone", ["m4", "m6"])
def test_an_engine_on_the_second_gpu_stepped_from_another_thread(milestone: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    ids, answers = prompts([5, 9, 3]), {}
    for device in ("cuda:0", "cuda:1"):
        llm = LLM(str(tiny_checkpoint()), milestone=milestone, device=device, dtype="float32", use_tqdm=False)
        thread = threading.Thread(
            target=lambda llm=llm, device=device: answers.setdefault(
                device, [o.outputs[0].token_ids for o in llm.generate(ids, GREEDY, use_tqdm=False)]
            )
        )
        thread.start()
        thread.join()
        llm.close()
    assert answers["cuda:0"] == answers["cuda:1"]
