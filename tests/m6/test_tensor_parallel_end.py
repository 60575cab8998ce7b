"""However an engine of several ranks ends, it ends soon, says why, and leaves nothing: no process, no file, no descriptor."""

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from folovllm import LLM, SamplingParams
from folovllm.distributed import sharding
from folovllm.executor.multiproc_executor import WorkerDied
from folovllm.step.packed import Field, PackedStep
from tests.helpers import tiny_checkpoint

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("FOLOVLLM_KILLS", "2"))  # 20 for the whole proof
PATIENCE = 60.0  # seconds: an end must be there by then, on a busy machine too
FOREVER = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks into /proc")]


def engine(**overrides: Any) -> LLM:
    fields = {"device": "cpu", "max_model_len": 512, "max_num_seqs": 4, "use_tqdm": False, "tensor_parallel_size": 2}
    return LLM(str(tiny_checkpoint()), **(fields | overrides))


def two_ranks(what: str) -> list[str]:
    return [sys.executable, "-m", "tests.m6.two_ranks", str(tiny_checkpoint()), what]


def exists(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_gone(pids: list[int], within: float = PATIENCE) -> None:
    deadline = time.monotonic() + within
    while any(map(exists, pids)):
        assert time.monotonic() < deadline, f"{[pid for pid in pids if exists(pid)]} are still there"
        time.sleep(0.05)


def kill(llm: LLM, victim: int) -> None:
    """Kill a rank of an engine that has requests: a step names it soon, the others are gone, each step says it again."""
    pids = llm.engine.executor.pids
    os.kill(pids[victim], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerDied, match=rf"rank {victim} \(process {pids[victim]}\).*signal 9"):
        while True:
            llm.engine.step()
    assert time.monotonic() - start < PATIENCE
    assert_gone(pids, 0.0)
    for _ in range(3):  # a loop until all requests have ended must not go on for ever
        assert llm.engine.has_unfinished_requests()
        with pytest.raises(WorkerDied, match=f"rank {victim}"):
            llm.engine.step()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After the test there is nothing in the temporary folder, and no descriptor more than before."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    checkpoint = tiny_checkpoint()  # before the temporary folder moves
    monkeypatch.setattr(sys.modules[__name__], "tiny_checkpoint", lambda: checkpoint)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = descriptors()
    yield
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert list(tmp_path.iterdir()) == []
    assert descriptors() <= before


@pytest.mark.parametrize("attempt", range(KILLS))
def test_a_killed_rank_is_named(leftovers: None, attempt: int) -> None:
    rng, llm = random.Random(attempt), engine(async_scheduling=attempt % 3 > 0)
    victim = attempt % 2
    for i in range(3):
        llm.engine.add_request(f"r{i}", [1, 2, 3 + i], FOREVER)
    for _ in range(rng.randint(0, 30)):
        llm.engine.step()
    kill(llm, victim)
    for i in range(3):
        llm.engine.abort_request(f"r{i}")
    with pytest.raises(WorkerDied, match=f"rank {victim}"):
        llm.generate([[1]], use_tqdm=False)
    llm.close()


def test_an_exception_is_named(leftovers: None) -> None:
    with engine() as llm:
        pids = llm.engine.executor.pids
        fields = np.zeros((len(Field), 1), np.int32)
        fields[[Field.ROW, Field.SEQ_LEN, Field.QUERY_LEN]] = [[1_000_000], [1], [1]]
        nonsense = PackedStep(fields, 1, 1, np.zeros(1, np.int32), np.zeros((3, 0), np.int32))
        llm.engine.executor._packer.pack = lambda output: nonsense
        with pytest.raises(WorkerDied, match=r"rank [01] failed with IndexError: [\s\S]*Traceback") as caught:
            llm.generate([[1]], use_tqdm=False)
        assert "lost its peers" not in str(caught.value)
        assert_gone(pids, 0.0)


def test_an_error_of_the_user_is_a_value_error(leftovers: None) -> None:
    with pytest.raises(ValueError, match="the KV cache has room for"):
        engine(kv_cache_memory=4096)


@pytest.fixture
def traps(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The working directory has files with the names of modules. A rank imports its parent's, not these."""
    folder = tmp_path_factory.mktemp("work")
    for name in ("numpy", "queue", "torch", "folovllm"):
        (folder / f"{name}.py").write_text(f"open({str(folder)!r} + '/was_run', 'w').close()")
    monkeypatch.chdir(folder)
    yield
    assert not (folder / "was_run").exists(), "what lies in the working directory was imported"


def test_two_engines_side_by_side(leftovers: None, traps: None, real_freezing: None) -> None:
    """They do not disturb each other; the one that is garbage goes, the other goes on."""
    first, second = engine(), engine(async_scheduling=False)
    pids = first.engine.executor.pids, second.engine.executor.pids
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    with engine(tensor_parallel_size=1) as alone:
        expected = alone.generate([[4, 5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids
    for llm in (first, second, first):
        assert llm.generate([[4, 5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids == expected
    del first, llm
    gc.collect()
    assert_gone(pids[0])
    with second:
        assert second.generate([[4, 5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids == expected
    assert_gone(pids[1], 0.0)


Start = Callable[..., tuple[subprocess.Popen[str], list[int]]]


@pytest.fixture
def script() -> Iterator[Start]:
    """Starts programs of their own that have an engine, and names its ranks. None outlives a test that fails."""
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path, what: str, waits: bool = True, **variables: str) -> tuple[subprocess.Popen[str], list[int]]:
        process = subprocess.Popen(
            two_ranks(what), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True, env=os.environ | {"TMPDIR": str(folder)} | variables,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        return process, [int(pid) for pid in process.stdout.readline().split()] if waits else []

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_the_interpreter_ends(script: Start, tmp_path: Path) -> None:
    """With no word of goodbye. And a learner's file reaches every rank."""
    mine, marks = tmp_path / "mine", tmp_path / "marks"
    (mine / "folovllm/distributed").mkdir(parents=True)
    marks.mkdir()
    own = Path(str(sharding.__file__)).read_text() + f"\nimport os\nopen(f'{marks}/{{os.getpid()}}', 'w').close()\n"
    (mine / "folovllm/distributed/sharding.py").write_text(own)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    process, pids = script(temporary, "once", FOLOVLLM_MINE=str(mine))
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert len(pids) == 2 and {int(mark.name) for mark in marks.iterdir()} == {process.pid, *pids}
    assert_gone(pids)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_a_killed_parent(script: Start, tmp_path: Path, number: int) -> None:
    process, pids = script(tmp_path, "forever")
    time.sleep(0.3)
    # A terminal sends Ctrl-C to all of them.
    os.killpg(process.pid, number) if number == signal.SIGINT else process.kill()
    _, errors = process.communicate(timeout=60)
    assert number == signal.SIGKILL or "Interrupt" in errors.splitlines()[-1]  # `Interrupted` while it answers
    assert len(pids) == 2
    assert_gone(pids)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("send", "number"), [(os.kill, signal.SIGKILL), (os.killpg, signal.SIGTERM)])
def test_the_parent_is_killed_while_its_ranks_start(script: Start, tmp_path: Path, send: Any, number: int) -> None:
    """By a signal to itself, or to all: no rank stays, and nothing among the temporary files."""
    parent, _ = script(tmp_path, "once", waits=False)
    while len(ranks := in_session(parent.pid)) < 2:  # its first rank is there
        time.sleep(0.01)
    send(parent.pid, number)
    parent.wait(timeout=60)
    assert_gone(ranks)
    assert list(tmp_path.iterdir()) == []


def in_session(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and exists(int(folder.name)):
            with contextlib.suppress(ProcessLookupError):
                found += [int(folder.name)] * (os.getsid(int(folder.name)) == leader)
    return found


@pytest.mark.multi_gpu
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_on_gpus(victim: int) -> None:
    """The others wait in a kernel for a sum that never comes; that must not keep them, nor their memory."""
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    with engine(device="cuda") as llm:
        pids = set(llm.engine.executor.pids)
        llm.engine.add_request("r", [1, 2, 3], FOREVER)
        for _ in range(10):
            llm.engine.step()
        assert pids <= who_has_memory()
        kill(llm, victim)
        assert not pids & who_has_memory()


def who_has_memory() -> set[int]:
    """Processes that the driver holds memory of a GPU for. How much there is in all says nothing: others use it, too."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader,nounits"]
    return set(map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))
