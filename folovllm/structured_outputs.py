"""The old path of `folovllm.engine.structured_outputs`, for code that imports it by that."""

import sys

from folovllm.engine import structured_outputs

sys.modules[__name__] = structured_outputs
