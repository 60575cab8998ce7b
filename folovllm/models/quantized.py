"""What the core asks about quantized models: whoever knows their checkpoints answers (`folovllm.electives.QUANTIZATION`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from folovllm.config import EngineConfig
from folovllm.electives import QUANTIZATION, require
from folovllm.layers.layer_set import LinearMethodOf

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Quantization:
    """The hook for models whose weights are quantized. This class knows none: each method does nothing.

    The set-up of an engine calls `configured`, then `check`, before a weight is read. Whoever builds the model calls
    `linear_methods_of` (on each rank, too) with the configuration that `configured` returned. Each call makes an object of its own,
    so the answer must follow from the arguments.
    """

    def configured(self, hf_config: Any, config: EngineConfig) -> Any:
        """Return the model's configuration, with what `config.quantization` and `config.quantize_activations` ask for.

        Raises ValueError if the model cannot have that.
        """
        return hf_config

    def linear_methods_of(
        self, hf_config: PretrainedConfig, packed: Mapping[str, Sequence[str]], renamed: Mapping[str, str]
    ) -> LinearMethodOf | None:
        """Return a function from the name of a linear layer to its linear method; None for models that are not quantized.

        Args:
            packed: the checkpoint's layers in each of ours that merges some (`packed_modules_mapping`).
            renamed: parts of names in the checkpoint: what they are called here.

        Raises:
            ValueError: the way is not supported; so does the function, for layers that cannot be merged.
        """
        return None

    def check(self, hf_config: PretrainedConfig, part: PretrainedConfig, config: EngineConfig) -> None:
        """Raise ValueError if the way is not supported, or ranks cannot share the layers. `part` is one rank's configuration."""


def quantization_of(hf_config: PretrainedConfig, config: EngineConfig | None = None) -> Quantization:
    """Return what knows the model's quantization: nothing does where neither the model nor `config` speaks of one.

    Raises:
        ValueError: one of them does, and the package is not installed.
    """
    said = getattr(hf_config, "quantization_config", None) is not None
    if said or (config is not None and (config.quantization is not None or config.quantize_activations)):
        found: Quantization = require(QUANTIZATION, "a quantized model (`quantization_config`)")()
        return found
    return Quantization()
