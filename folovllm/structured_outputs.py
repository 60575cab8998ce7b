"""The old path of `folovllm.electives.structured_output.params`, for code that imports it by that."""

import sys

from folovllm.plugins import named

sys.modules[__name__] = named("folovllm.electives.structured_output.params")
