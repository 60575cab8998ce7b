"""Executors send a scheduled step to one device or to several, and return what it sampled."""
