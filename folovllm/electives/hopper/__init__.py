"""Kernels for NVIDIA's Hopper alone (sm_90); each has a plain twin."""
