"""The hook for models whose weights are quantized. `registry.quantization_hook` returns it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from folovllm.config import EngineConfig
from folovllm.layers.layer_set import LinearMethodOf

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn
    from transformers import PretrainedConfig


class Quantization(Protocol):
    """Knows the linear methods of quantized models.

    The set-up of an engine calls `configured`, then `check`, before a weight is read. Whoever builds the model calls
    `linear_methods_of` (on each rank, too) with the configuration that `configured` returned. Each call makes an object of its own,
    so the answer must follow from the arguments.
    """

    def configured(self, hf_config: Any, config: EngineConfig) -> Any:
        """Return the model's configuration, with what `config.quantization` and `config.quantize_activations` ask for.

        Raises ValueError if the model cannot have that.
        """

    def linear_methods_of(
        self, hf_config: PretrainedConfig, packed: Mapping[str, Sequence[str]], renamed: Mapping[str, str]
    ) -> LinearMethodOf | None:
        """Return a function from the name of a linear layer to its linear method; None if no layer is quantized after all.

        Args:
            packed: the checkpoint's layers in each of ours that merges some (`packed_modules_mapping`).
            renamed: parts of names in the checkpoint: what they are called here.

        Raises ValueError if the way is not supported; so does the function, for layers that cannot be merged.
        """

    def finish_decoded(self, model: nn.Module, path: Path, dtype: torch.dtype) -> None:
        """Prepare a model that transformers has loaded from the folder `path`, whose weights it decodes, for activations of `dtype`.

        Raises ValueError if the checkpoint lacks the scale of a weight.
        """

    def check(self, hf_config: PretrainedConfig, part: PretrainedConfig, config: EngineConfig) -> None:
        """Raise ValueError if the way is not supported, or ranks cannot share the layers. `part` is one rank's configuration."""
