"""The options of quantization (X2), which are keywords of `EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from folovllm.config import EngineConfig

CACHE_DTYPES = ("auto", "fp8_e4m3")


@dataclass(slots=True, kw_only=True)
class QuantizationOptions:
    """What is kept in fewer bits.

    Attributes:
        kv_cache_dtype: "auto" is the model's own; "fp8_e4m3" (or "fp8") keeps K/V in 8 bits, half of what 16 bits take.
        calculate_kv_scales: choose the scales of K/V in 8 bits by running made-up tokens, instead of taking the
            checkpoint's, or 1.
        quantization: how the weights are kept, which a checkpoint says by itself: "fp8", "compressed-tensors", "gptq", "awq".
            "fp8" of a checkpoint in 16 bits quantizes it while it is loaded: a scale for each output, and for each token of
            the inputs. With `random_weights` the kind to make up: "fp8", "int8" (a scale for each output) or "int4" (one for
            each 128 inputs of an output).
        quantize_activations: of a model in FP8, multiply FP8 by FP8 where the checkpoint or `quantization` means that, on GPUs
            from compute capability 8.9 on. False keeps only weights in FP8: more exact, and slower with several sequences.
    """

    kv_cache_dtype: str = "auto"
    calculate_kv_scales: bool = False
    quantization: str | None = None
    quantize_activations: bool = True

    def __post_init__(self) -> None:
        if self.kv_cache_dtype == "fp8":
            self.kv_cache_dtype = "fp8_e4m3"
        if self.kv_cache_dtype not in CACHE_DTYPES:
            raise ValueError(f"unknown kv_cache_dtype {self.kv_cache_dtype!r}: choose one of {', '.join(CACHE_DTYPES)}")

    def check(self, config: EngineConfig) -> None:
        """Raise ValueError where these do not fit the rest of the configuration."""
        if config.kv_cache == "growing" and self.kv_cache_dtype != "auto":
            raise ValueError(
                'kv_cache="growing" keeps K/V in the dtype of the model: leave kv_cache_dtype out, or use milestone="m2"'
            )
        if self.calculate_kv_scales and self.kv_cache_dtype == "auto":
            raise ValueError('calculate_kv_scales is of use with kv_cache_dtype="fp8_e4m3" only')
