"""What the tests of several files share: servers that nothing is changed in, and signals that stay what they were."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from folovllm.electives.server.config import ServerConfig
from tests.helpers import tiny_checkpoint
from tests.x1.background import Background, served


@pytest.fixture(autouse=True)
def signals_are_left_as_they_were() -> Iterator[None]:
    """Or Ctrl-C means something else to the tests behind this one."""
    before = [signal.getsignal(sign) for sign in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(sign) for sign in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.fixture(scope="session")
def tiny_server() -> Iterator[Background]:
    """Of a tiny random model, with the inspector."""
    config = ServerConfig(max_body_size=50_000, inspector=True)
    yield from served(config, model=str(tiny_checkpoint()), max_model_len=512, max_num_seqs=32)


@pytest.fixture(scope="session")
def open_server() -> Iterator[Background]:
    """Of the embedded model, whose tokens are of many lengths."""
    yield from served(max_model_len=512)


@pytest.fixture(scope="session")
def keyed_server() -> Iterator[Background]:
    """Of the embedded model, with two keys and two names."""
    config = ServerConfig(api_key=["another", "a-key"], served_model_name=["little", "stories"], max_body_size=60_000)
    yield from served(config, max_model_len=512)
