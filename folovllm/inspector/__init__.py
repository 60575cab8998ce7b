"""Seeing the engine think: recordings of its events, and the page that shows them, live or later."""
