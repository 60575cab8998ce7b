import torch
from folovllm.kernel import doubled


def test_doubled():
    assert doubled(torch.tensor([0.0, 1.0, 2.0, 3.0])).tolist() == [0.0, 2.0, 4.0, 6.0]
