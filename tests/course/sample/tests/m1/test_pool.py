import pytest
from folovllm.pool import Empty, Pool


def test_take():
    pool = Pool(2)
    assert [pool.take(), pool.take()] == [0, 1]
    with pytest.raises(Empty):
        pool.take()


def test_give():
    pool = Pool(2)
    pool.give(pool.take())
    assert [pool.take(), pool.take()] == [1, 0]
