"""One model over several GPUs: who holds which part (tensor parallelism), and how the parts talk to each other."""
