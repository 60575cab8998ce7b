"""Nothing is compiled for experts once requests are served."""

import pytest

from tests.m6.traffic import assert_nothing_is_compiled_after_the_start, assert_the_start_meets_every_variant
from tests.x4.traffic import ENGINES


@pytest.mark.slow
def test_the_start_meets_every_variant() -> None:
    assert_the_start_meets_every_variant("tests.x4.traffic")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ENGINES)
def test_nothing_is_compiled_after_the_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_nothing_is_compiled_after_the_start(ENGINES[name], monkeypatch)
