"""Workers: the code that runs on one device. It builds input tensors, runs the model, and samples tokens."""
