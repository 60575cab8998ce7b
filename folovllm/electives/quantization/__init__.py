"""Quantization (X2): linear methods for weights in few bits, their checkpoints and kernels, scales of the KV cache."""
