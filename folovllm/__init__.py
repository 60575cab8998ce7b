"""FoloVLLM: a mini-vLLM that you grow in six milestones, and the engine that results."""

import os as _os

if _os.environ.get("FOLOVLLM_MINE"):  # the learner's files first; in every process, hence here
    from folovllm import _overlay

    _overlay.install()
