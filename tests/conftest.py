"""For every test: Triton interpreted where no GPU is, one torch thread, hypothesis without deadlines, messages in English."""

import importlib.util
import os

import hypothesis
import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
    if importlib.util.find_spec("triton"):  # there is none for some platforms
        from tests.interpreter import patch_the_language_once, stay_inside_the_arguments

        patch_the_language_once()
        stay_inside_the_arguments()
torch.set_num_threads(1)
os.environ["FOLOVLLM_LANG"] = "en"  # whatever the system's locale is
hypothesis.settings.register_profile("folovllm", deadline=None, derandomize=True)
hypothesis.settings.load_profile("folovllm")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not CUDA:
        pytest.skip("needs a CUDA GPU")
    if item.get_closest_marker("multi_gpu") and torch.cuda.device_count() < 2:
        pytest.skip(f"needs several CUDA GPUs, there are {torch.cuda.device_count()}")
