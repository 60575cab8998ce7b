"""Answers of a given form: which tokens may come next, decided on the host and applied before the draw."""
