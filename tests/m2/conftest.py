"""For M2's tests."""

from collections.abc import Iterator

import pytest
import torch

from folovllm.apps.bench import roofline, throughput
from tests.m1.conftest import commands_built_once  # noqa: F401


def quick_rates(device: torch.device, dtype: torch.dtype) -> roofline.Rates:
    return roofline.measure_rates(device, dtype, 1 << 16, 64)


@pytest.fixture(scope="session", autouse=True)
def rates_of_little() -> Iterator[None]:
    """What a benchmark measures of the machine, over a thousandth of the numbers: else it takes five seconds each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "measure_rates", quick_rates)
        yield
