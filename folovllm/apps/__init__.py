"""What uses the engine: the command line, the benchmarks, the inspector."""
