"""For M1's tests."""

from collections.abc import Iterator
from functools import cache

import pytest
import typer.main

from folovllm.apps import cli


@pytest.fixture(scope="session", autouse=True)
def commands_built_once() -> Iterator[None]:
    """The flags of all commands come from dataclasses, a tenth of a second each time, and a hundred tests run a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "build_app", cache(cli.build_app))
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield
