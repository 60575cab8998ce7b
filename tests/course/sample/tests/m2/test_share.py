from folovllm.pool import Pool


def test_share():
    parts = Pool(5).share(2)
    assert sorted(map(len, parts)) == [2, 3]
    assert sorted(parts[0] + parts[1]) == [0, 1, 2, 3, 4]
