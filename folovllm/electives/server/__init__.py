"""Serving: an asynchronous engine, and an OpenAI-compatible server on top of it. Needs the extra `serve`."""
