"""Element-wise layers that `torch.compile` makes, as in nano-vLLM: the rival of the hand-written kernels."""

from __future__ import annotations

import torch
from torch import nn

from folovllm.layers.activation import SiluAndMul
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.layernorm import RMSNorm
from folovllm.layers.rotary_embedding import RotaryEmbedding

# Whether sizes other than the batch's are left open, too: for the norms of two widths that share one piece of code, not
# where a width that is known makes for wider loads.
COMPILED: dict[type[nn.Module], bool | None] = {RMSNorm: True, SiluAndMul: None, RotaryEmbedding: None}


def compiled_layers() -> LayerSet:
    """Return a set in which each kind of layer is compiled for batches of any size. All layers of a kind share the code.

    The first steps are slow, for that is when it happens: seconds on a GPU, a minute on a CPU, which also needs a C++
    compiler.
    """
    return LayerSet({kind: _compiled(kind, dynamic) for kind, dynamic in COMPILED.items()})


def _compiled(kind: type[nn.Module], dynamic: bool | None) -> type[nn.Module]:
    return type(f"Compiled{kind.__name__}", (kind,), {"forward": torch.compile(kind.forward, dynamic=dynamic)})
