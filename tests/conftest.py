"""For every test: Triton interpreted where no GPU is, one torch thread, hypothesis without deadlines, messages in English, a Ctrl-C that is heard."""

import gc
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator

import hypothesis
import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
    if importlib.util.find_spec("triton"):  # there is none for some platforms
        from tests import interpreter

        interpreter.patch_the_language_once()
        interpreter.remember_types()
        interpreter.stay_inside_the_arguments()
    else:
        import folovllm.kernels  # noqa: F401 -- puts numpy in Triton's place
signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background job ignores it, and so would children
torch.set_num_threads(1)
os.environ["FOLOVLLM_LANG"] = "en"  # whatever the system's locale is
os.environ.setdefault("FOLOVLLM_WARM", "0")  # what a test starts leaves no process behind that waits for the next run
hypothesis.settings.register_profile("folovllm", deadline=None, derandomize=True)
hypothesis.settings.load_profile("folovllm")

FREEZE, UNFREEZE, COLLECT = gc.freeze, gc.unfreeze, gc.collect
SLOW = 0.03  # seconds of a collection
# The libraries' objects were frozen before the fork: to look at them copies their pages.
FORKED = gc.get_freeze_count() > 0
last_collection = 0.0 if FORKED else SLOW  # how long it took
EACH = 20  # of so many slow collections one looks at what was frozen before, which takes a second or more
num_slow = 0


def timed_collect(generation: int = 2) -> int:
    """Collect, and remember how long it took."""
    global last_collection
    start = time.perf_counter()
    found = COLLECT(generation)
    last_collection = time.perf_counter() - start
    return found


@pytest.fixture(scope="session", autouse=True)
def engines_do_not_freeze() -> None:
    """Tests freeze what there is, before one begins and if a collection has become slow; engines do not.

    An engine looks for garbage when it is made and when it is closed, which takes a quarter of a second each time among
    the objects of thousands of tests and of large libraries. There are hundreds of engines here.
    """
    gc.collect, gc.freeze, gc.unfreeze = timed_collect, lambda: None, lambda: None


@pytest.fixture(scope="session", autouse=True)
def most_cached() -> int:
    """The blocks of a cache that nobody gave a size. Here it has fewer: to make them takes longer than most tests."""
    from folovllm.worker import kv_memory

    most = kv_memory.MOST_CACHED
    if not CUDA:
        kv_memory.MOST_CACHED = 4096
    return most


@pytest.fixture(scope="session")
def forked_commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The path of a `python` that forks a process with the large libraries (`tests/warm.py`), which are imported once."""
    from tests.warm import Warm

    with Warm(tmp_path_factory.mktemp("warm")) as warm:
        yield warm.python


@pytest.fixture
def warm(forked_commands: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test starts by `sys.executable` need not import the large libraries anew."""
    monkeypatch.setattr(sys, "executable", forked_commands)


@pytest.fixture
def real_freezing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a test of what engines freeze and thaw."""
    monkeypatch.setattr(gc, "freeze", FREEZE)
    monkeypatch.setattr(gc, "unfreeze", UNFREEZE)
    yield
    gc.collect()
    FREEZE()


def pytest_runtest_setup(item: pytest.Item) -> None:
    global last_collection, num_slow
    if last_collection >= SLOW:
        num_slow += 1
        if not FORKED and num_slow % EACH == 0:
            UNFREEZE()  # of an engine that has ended meanwhile, too
        COLLECT()
        FREEZE()
        last_collection = 0.0
    torch.manual_seed(0)  # so no draw depends on the tests before it, which change with the number of workers
    if item.get_closest_marker("gpu") and not CUDA:
        pytest.skip("needs a CUDA GPU")
    if item.get_closest_marker("multi_gpu") and torch.cuda.device_count() < 2:
        pytest.skip(f"needs several CUDA GPUs, there are {torch.cuda.device_count()}")
