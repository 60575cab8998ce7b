"""A package as small as can be, for tests of the course's tool; `learn/overlay.py` beside it is the engine's own."""

import os as _os

if _os.environ.get("FOLOVLLM_MINE"):
    from folovllm.learn import overlay as _overlay

    _overlay.install()


def __getattr__(name: str) -> object:
    if name not in ("LLM", "SamplingParams"):
        raise AttributeError(name)
    from folovllm import llm

    return getattr(llm, name)
