"""The old path of `folovllm.engine.beam_search`, for code that imports it by that."""

import sys

from folovllm.engine import beam_search

sys.modules[__name__] = beam_search
