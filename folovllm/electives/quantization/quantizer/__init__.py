"""Weights in few bits: how numbers become codes, and who chooses the codes."""
