"""The kernels of Gated DeltaNet."""
