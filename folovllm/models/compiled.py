"""Element-wise layers through `torch.compile`, as nano-vLLM does it: the rival of the hand-written kernels."""

from __future__ import annotations

import torch
from torch import nn

from folovllm.layers.activation import SiluAndMul
from folovllm.layers.layernorm import RMSNorm
from folovllm.layers.rotary_embedding import RotaryEmbedding

# Whether sizes other than the batch's are left open, too: for the norms of two widths that share one piece of code, not
# where a width that is known makes for wider loads.
COMPILED: dict[type[nn.Module], bool | None] = {RMSNorm: True, SiluAndMul: None, RotaryEmbedding: None}


def compile_layers(model: nn.Module) -> None:
    """Compile each kind of layer for batches of any size; all layers of a kind share the code.

    The first steps are slow, for that is when it happens: seconds on a GPU, a minute on a CPU, which also needs a C++
    compiler.
    """
    for kind, dynamic in COMPILED.items():
        forward = torch.compile(kind.forward, dynamic=dynamic)
        for module in model.modules():
            if type(module) is kind:
                module.forward = forward.__get__(module)
