"""Who owns which part of the KV cache."""
