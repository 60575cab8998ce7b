from folovllm.tap import twins


def test_twins():
    assert twins([1, 2]) == [1, 1, 2, 2]
