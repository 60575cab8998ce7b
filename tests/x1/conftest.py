"""What the tests of several files share."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from folovllm.server.config import ServerConfig
from folovllm.server.transport import ProcessTransport
from tests.helpers import tiny_checkpoint
from tests.x1.background import Background, served

GUESSING: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
ROOM = 16  # sequences that may wait


@pytest.fixture(autouse=True)
def signals_are_left_as_they_were() -> Iterator[None]:
    """Or Ctrl-C means something else to the tests behind this one."""
    before = [signal.getsignal(sign) for sign in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(sign) for sign in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.fixture(scope="session")
def process_server() -> Iterator[Background]:
    """A server whose engine is a process of its own, which takes seconds to start. `faulty` may make it fail on demand."""
    transport = ProcessTransport([sys.executable, "-m", "tests.x1.faulty"])
    config = ServerConfig(max_queued_requests=ROOM)
    yield from served(
        config, transport=transport, model=str(tiny_checkpoint()), max_model_len=256, max_num_seqs=8, **GUESSING
    )
