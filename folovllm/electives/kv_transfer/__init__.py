"""K/V that moves (X7): evicted blocks go to host memory and disk and come back, and prefill is computed apart from decode."""
