"""Ray's tests share one cluster."""

from collections.abc import Iterator

import pytest

from tests.ray.cluster import Ray, started


@pytest.fixture(scope="session")
def ray() -> Iterator[Ray]:
    with started() as ray:
        yield ray
