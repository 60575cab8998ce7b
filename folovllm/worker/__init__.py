"""What runs on one device: input tensors, the model, the draw of a token."""
