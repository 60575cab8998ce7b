"""The kernels of a mixture of experts."""
