"""X3: guesses at the tokens to come. The model checks several in one step, and keeps those that it would have sampled."""
