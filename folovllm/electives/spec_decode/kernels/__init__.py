"""The kernels of steps that verify draft tokens."""
