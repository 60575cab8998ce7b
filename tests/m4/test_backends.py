"""What backends say where they cannot run. (`test_contract.py`: what they compute.)"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from folovllm.attention.backends.abstract import AttentionConfig, BackendUnavailable
from folovllm.attention.backends.flash_attn import FlashAttentionBackend
from folovllm.attention.backends.registry import choose_backend
from folovllm.attention.backends.torch_paged import TorchPagedBackend
from folovllm.attention.backends.triton import TritonBackend
from tests.m4.cases import DEVICE

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG = AttentionConfig(4, 2, 16, torch.float32, DEVICE, 16, 8)


def test_what_a_backend_declares_is_kept(monkeypatch):
    """A backend need only name the blocks that it can use; the smallest is taken, and another refused in a sentence."""
    monkeypatch.setattr(TorchPagedBackend, "supported_block_sizes", (64,))
    config = replace(CONFIG, device=CPU, block_size=None)
    assert choose_backend("torch_paged", config) == ("torch_paged", 64)
    with pytest.raises(BackendUnavailable, match="torch_paged cannot use blocks of 48 tokens: leave block_size open"):
        choose_backend("torch_paged", replace(config, block_size=48))


HALF = {"device": CUDA, "dtype": torch.float16}
REFUSED = [  # what is asked for, the machine's lack, and the words that say so
    (TritonBackend, {"device": CPU, "head_dim": 80}, {}, "power of two"),
    (TritonBackend, {"device": CPU, "head_dim": 8}, {}, "power of two"),
    (TritonBackend, {"device": CPU, "dtype": torch.bfloat16}, {}, "float16"),
    (TritonBackend, {"device": CPU}, {"interpreted": False}, "TRITON_INTERPRET=1"),
    (TritonBackend, {"device": CUDA, "head_dim": 256}, {}, "128 in float32"),  # tiles of a small card's shared memory
    (TritonBackend, HALF | {"head_dim": 256}, {}, None),
    (FlashAttentionBackend, HALF | {"device": CPU}, {}, "CUDA"),
    (FlashAttentionBackend, HALF, {"capability": (7, 5)}, "8.0"),
    (FlashAttentionBackend, HALF, {"installed": False}, "pip install flash-attn"),
    (FlashAttentionBackend, HALF | {"dtype": torch.float32}, {}, "float16 or bfloat16"),
    (FlashAttentionBackend, HALF | {"head_dim": 264}, {}, "head_dim"),
    (FlashAttentionBackend, HALF | {"block_size": 16}, {}, "multiple of 256"),
    (FlashAttentionBackend, HALF, {}, None),
]


@pytest.mark.parametrize(("backend", "asked", "machine", "message"), REFUSED)
def test_backends_say_why_not(monkeypatch, backend, asked, machine, message):
    """Each of their demands, on a machine that we only pretend to have; what they can do they accept."""
    given = {"interpreted": True, "capability": (8, 0), "installed": True} | machine
    monkeypatch.setattr("folovllm.attention.backends.triton.interpreted", lambda: given["interpreted"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: given["capability"])
    monkeypatch.setattr(
        "folovllm.attention.backends.flash_attn.find_spec", lambda name: object() if given["installed"] else None
    )
    config = replace(CONFIG, **{"head_dim": 64, "block_size": 256 if backend is FlashAttentionBackend else 16} | asked)
    with pytest.raises(BackendUnavailable, match=message) if message else nullcontext():
        backend.check_available(config)
