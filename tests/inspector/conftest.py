"""One Chromium for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.inspector.browser import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Playwright's browser. It has an event loop of its own, so it ends with the file: the tests behind it have theirs."""
    with chromium() as browser:
        yield browser
