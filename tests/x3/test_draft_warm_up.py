"""With drafts, too, no kernel is compiled while requests wait."""

import pytest

from tests.m6.traffic import assert_the_start_meets_every_variant


@pytest.mark.slow
def test_the_start_meets_every_variant() -> None:
    """Other tokens go to other kernels than without: what short prompts compiled there, something else must."""
    assert_the_start_meets_every_variant("tests.x3.traffic", steps=90)
