"""Steps are values, so ranks need to know nothing of guesses."""

from tests.workloads import serve
from tests.x3.engines import speculation_of
from tests.x3.test_lossless import demanding_pair


def test_two_ranks() -> None:
    pair = demanding_pair("m6")
    engine = pair.engine("often", tensor_parallel_size=2)
    try:
        pair.check(serve(engine, pair.requests))
        assert speculation_of(engine).num_accepted > 20
    finally:
        engine.close()
