"""What the tests of several files share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def signals_are_left_as_they_were() -> Iterator[None]:
    """Or Ctrl-C means something else to the tests behind this one."""
    before = [signal.getsignal(sign) for sign in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(sign) for sign in (signal.SIGINT, signal.SIGTERM)] == before
