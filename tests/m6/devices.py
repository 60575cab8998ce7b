"""Where the tests of M6 run: on the GPU if there is one."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
