"""Model architectures, and the way from a checkpoint to a module."""
