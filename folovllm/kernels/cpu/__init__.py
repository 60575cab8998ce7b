"""Kernels for a CPU: C++ that the machine's own compiler compiles (`library`), and typed functions that call it (`ops`)."""
