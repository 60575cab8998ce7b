from folovllm.pool import Pool
from folovllm.tap import drain


def test_drain():
    assert drain(Pool(3)) == [0, 1, 2]
