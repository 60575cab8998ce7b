"""Tensor parallelism: one model over several GPUs. How weights are sharded, and the collectives between ranks."""
