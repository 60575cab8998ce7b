"""What runs on one device: input tensors, the model, sampling of a token."""
