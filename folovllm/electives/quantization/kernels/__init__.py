"""The kernels of quantized weights and of a KV cache in FP8."""
