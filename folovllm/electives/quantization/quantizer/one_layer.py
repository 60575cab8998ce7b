"""A decoder layer at a time: the engine's own layer, filled again and again from a checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from typing import Any

import torch

from folovllm.electives.quantization.config import ROUTERS
from folovllm.electives.quantization.quantizer.folder import PREFIX, Tensors
from folovllm.electives.quantization.quantizer.whole import TOKENS_AT_ONCE, attend_within, whole_batch
from folovllm.layers.linear import LinearBase
from folovllm.models.llama import LlamaDecoderLayer
from folovllm.models.loader import checkpoint_places, copy_weight
from folovllm.models.registry import build_model


class Inputs:
    """Sums over all calibration tokens; the inputs themselves are not kept."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._squares = torch.zeros(size, size, device=device)  # 4 size^2 bytes
        self._sizes = torch.zeros(size, device=device)
        self.num_tokens = 0

    def add(self, x: torch.Tensor) -> None:
        """Add inputs of T tokens, [T, size]."""
        x = x.float()
        self._squares.addmm_(x.t(), x)
        self._sizes += x.abs().sum(dim=0)
        self.num_tokens += len(x)

    def divide(self, scale: torch.Tensor) -> None:
        """Change the sums to those of the inputs divided by `scale` [size]."""
        self._squares /= torch.outer(scale, scale)
        self._sizes /= scale

    @property
    def gram(self) -> torch.Tensor:
        """x^T x / T: [size, size] float32."""
        return self._squares / self.num_tokens

    @property
    def magnitude(self) -> torch.Tensor:
        """The mean absolute value of each input: [size] float32."""
        return self._sizes / self.num_tokens


class OneLayer:
    """The engine's decoder layer, and the checkpoint's names for its parts.

    `linears` are the merged layers ("self_attn.qkv_proj"). `projections` are the checkpoint's: "self_attn.q_proj" -> the linear
    layer that holds it, and a view of its rows. `routers`, of a mixture of experts, are in neither: they stay unquantized, for a
    small error in them would ask other experts.
    """

    def __init__(self, hf_config: Any, device: torch.device, length: int) -> None:
        one = deepcopy(hf_config)
        one.num_hidden_layers = 1
        model = build_model(one, torch.float32, device, length)  # 16 bits would hide small errors, and it is one layer
        places, prefix = checkpoint_places(model), f"{PREFIX}0."
        self._places = {name.removeprefix(prefix): p for name, p in places.items() if name.startswith(prefix)}
        self.module: LlamaDecoderLayer = model.model.layers[0]  # type: ignore[assignment]
        linears = {name: m for name, m in self.module.named_modules() if isinstance(m, LinearBase)}
        self.routers = [name for name in linears if name.rpartition(".")[2] in ROUTERS]
        self.linears = {name: m for name, m in linears.items() if name not in self.routers}
        self.projections: dict[str, tuple[str, torch.Tensor]] = {}
        for name, linear in self.linears.items():
            parent, _, leaf = name.rpartition(".")
            parts = model.packed_modules_mapping.get(leaf, [leaf])
            for part, rows in zip(parts, linear.weight_views()["weight"], strict=True):
                self.projections[f"{parent}.{part}"] = name, rows
        for name, view in self.tensors().items():
            if view.dim() > 1 and name.removesuffix(".weight") not in {*self.routers, *self.projections}:
                raise ValueError(f"{name} is in no linear layer: models with such weights cannot be quantized here")
        attend_within(self.module, length)

    def load(self, tensors: Tensors) -> None:
        """Fill the layer with tensors that `read_checkpoint` has seen. Raises ValueError if one is not finite."""
        left = dict(self._places)
        for name in tensors.keys() & left.keys():  # scales of a KV cache have no place
            copy_weight(name, tensors[name], left)

    def tensors(self) -> Tensors:
        """Return what the layer holds now, by the checkpoint's names: views."""
        return {name: place.view for name, place in self._places.items()}

    @torch.no_grad()
    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Turn hidden states before the layer, [n, length, H], into those after it; some sequences at a time."""
        done = [x[:0]]
        for some in x.split(max(1, TOKENS_AT_ONCE // x.shape[1])) if len(x) else ():
            batch = whole_batch(torch.zeros(some.shape[:2], dtype=torch.int64, device=x.device))
            out, residual = self.module(some.flatten(0, 1), None, batch)
            done.append((out + residual).view_as(some))
        return torch.cat(done)

    @torch.no_grad()
    def inputs(self, x: torch.Tensor) -> dict[str, Inputs]:
        """Return what each of `linears` reads when the layer is given `x` [n, length, H]."""
        found = {name: Inputs(linear.input_size, x.device) for name, linear in self.linears.items()}
        with ExitStack() as hooks:
            for name, linear in self.linears.items():
                hook = linear.register_forward_pre_hook(lambda _, args, name=name: found[name].add(args[0]))
                hooks.enter_context(hook)
            self.run(x)
        return found
